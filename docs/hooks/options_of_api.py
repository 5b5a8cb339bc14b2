"""Options on the API page, with their defaults: `SamplingParams`, `LoadOptions` and `EngineOptions`
declare them (`foretoken.sampling.options`), so they are read from the objects, not their source."""

from __future__ import annotations

import inspect
from dataclasses import fields
from typing import Any

import griffe

from foretoken.engine.options import EngineOptions
from foretoken.loading.load import load
from foretoken.sampling.params import SamplingParams


class DeclaredOptions(griffe.Extension):
    """Takes docstrings and signatures of `SamplingParams`, `load` and `Engine` from the objects."""

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
        if func.path == "foretoken.engine.engine.Engine.__init__":
            own = [each for each in func.parameters if each.name != "options"]
            func.parameters = griffe.Parameters(
                *own,
                *(
                    griffe.Parameter(
                        each.name,
                        annotation=str(each.type),
                        kind=griffe.ParameterKind.keyword_only,
                        default=repr(each.default),
                    )
                    for each in fields(EngineOptions)
                    if each.name not in [one.name for one in own]
                ),
            )
