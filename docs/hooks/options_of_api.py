"""The Args of `SamplingParams` on the API page, with their defaults: its fields declare them
(`foretoken.sampling.options`), so they are read from the class and not from its source."""

from __future__ import annotations

import inspect
from dataclasses import fields
from typing import Any

import griffe

from foretoken.sampling.params import SamplingParams


class DeclaredOptions(griffe.Extension):
    """Takes docstring and defaults of `SamplingParams` from the class."""

    def on_class_members(self, *, cls: griffe.Class, **kwargs: Any) -> None:
        if cls.path == "foretoken.sampling.params.SamplingParams" and cls.docstring:
            cls.docstring.value = inspect.getdoc(SamplingParams) or ""
            for each in fields(SamplingParams):
                member = cls.members[each.name]
                assert isinstance(member, griffe.Attribute)
                member.value = repr(each.default)
