"""Options on the API page, with their defaults: `SamplingParams` and `LoadOptions` declare them
(`foretoken.sampling.options`), so they are read from the objects and not from their source."""

from __future__ import annotations

import inspect
from dataclasses import fields
from typing import Any

import griffe

from foretoken.loading.load import load
from foretoken.sampling.params import SamplingParams


class DeclaredOptions(griffe.Extension):
    """Takes the docstring and defaults of `SamplingParams` and of `load` from the objects."""

    def on_class_members(self, *, cls: griffe.Class, **kwargs: Any) -> None:
        if cls.path == "foretoken.sampling.params.SamplingParams" and cls.docstring:
            cls.docstring.value = inspect.getdoc(SamplingParams) or ""
            for each in fields(SamplingParams):
                member = cls.members[each.name]
                assert isinstance(member, griffe.Attribute)
                member.value = repr(each.default)

    def on_function_instance(self, *, func: griffe.Function, **kwargs: Any) -> None:
        if func.path == "foretoken.loading.load.load" and func.docstring:
            func.docstring.value = inspect.getdoc(load) or ""
            func.parameters = griffe.Parameters(
                *(
                    griffe.Parameter(
                        each.name,
                        annotation=each.annotation,
                        kind=griffe.ParameterKind(each.kind.description),
                        default=repr(each.default),
                    )
                    for each in inspect.signature(load).parameters.values()
                )
            )
