"""A model in memory whose own `generate` is speculative."""

from __future__ import annotations

from difflib import get_close_matches
from functools import wraps
from inspect import signature
from types import MethodType
from typing import TYPE_CHECKING, Any, cast

from foretoken.drafters.base import Drafter
from foretoken.errors import InputError, shown
from foretoken.handover.handed import ending_strings
from foretoken.loading.load import load
from foretoken.loading.wrapped import unwrapped
from foretoken.speculator import Speculator

if TYPE_CHECKING:
    from pathlib import Path

    from transformers import PreTrainedModel

MARK = "foretoken_replaced"  # what an attached `generate` stands for is kept under this name


def attach(
    model: PreTrainedModel,
    draft: str | Path | PreTrainedModel | Drafter | Speculator | None = None,
    **options: Any,
) -> Speculator:
    """Make `model.generate` speculative, and return the Speculator that it uses.

    draft, options: as `load` takes them. From now on `model.generate(...)` is
    `model.generate(..., custom_generate=spec)`, unless the call has a `custom_generate` of its own;
    what that honours and refuses, `Speculator.__call__` says. Attaching again replaces the draft,
    `detach` takes it back. A copy of the model has to be attached itself.
    """
    model = cast(Any, unwrapped(model, "model"))
    if not callable(getattr(model, "generate", None)):
        raise InputError(f"model is {shown(model)}; give a model of transformers in memory")
    parameters = signature(load).parameters.values()
    names = [each.name for each in parameters if each.kind is each.KEYWORD_ONLY]
    for name in options:
        if name not in names:
            near = get_close_matches(name, names, 1, 0.5)
            remedy = f"did you mean {near[0]}?" if near else "give it to model.generate"
            raise InputError(f"{name} is no option of attach; {remedy}")
    detach(model)
    spec = load(model, draft, **options)
    open_: Any = model  # nn.Module declares no method of its own as an attribute
    replaced = vars(model).get("generate")  # somebody else's, if any

    @wraps(open_.generate)
    def generate(self: Any, *args: Any, **kwargs: Any) -> Any:
        if kwargs.get("custom_generate") is None:
            kwargs["custom_generate"] = spec
            _end_by_strings(kwargs, spec)
        return (replaced or MethodType(type(self).generate, self))(*args, **kwargs)

    setattr(generate, MARK, replaced)
    # a method, so that a copy of the model does not generate with this one
    open_.generate = MethodType(generate, model)
    return spec


def _end_by_strings(kwargs: dict[str, Any], spec: Speculator) -> None:
    """Turn a call's stop strings into a criterion: transformers does not hand the call's tokenizer
    to a custom_generate."""
    tokenizer = kwargs.pop("tokenizer", None) or spec.tokenizer
    strings = ending_strings(kwargs.pop("stop_strings", None), tokenizer)
    if strings:
        kwargs["stopping_criteria"] = [*(kwargs.get("stopping_criteria") or ()), *strings]


def detach(model: PreTrainedModel) -> None:
    """Give the model back the `generate` that it had before `attach`; without one, do nothing."""
    model = cast(Any, unwrapped(model, "model"))
    method: Any = vars(model).get("generate")
    if not hasattr(method, MARK):
        return
    replaced = getattr(method, MARK)
    del model.generate
    if replaced is not None:
        vars(model)["generate"] = replaced
