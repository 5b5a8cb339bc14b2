"""A second module tree over the same weights, whose configuration and parts can be changed while
the original stays as it is: in every thread, and wherever a Ctrl-C comes.

It does not know attention, nor what is changed.
"""

from __future__ import annotations

import copy
from functools import partial
from types import MethodType
from typing import Any, cast

from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from foretoken.errors import RefusedError


def twin(model: PreTrainedModel) -> PreTrainedModel:
    """`model` as it stands, in evaluation mode, over its very weights and hooks.

    Later changes of the weights show in the twin, other changes do not: each run makes a new one.
    Buffers that some forwards recompute, such as rotary frequencies, are the twin's own. Raises
    RefusedError where a part's forward was replaced by an unknown function.
    """
    parts = list(model.modules())
    twins = [type(part).__new__(type(part)) for part in parts]
    remade: dict[int, Any] = {id(part): copied for part, copied in zip(parts, twins, strict=True)}
    for part, copied in zip(parts, twins, strict=True):
        attributes = _attributes(part).items()
        vars(copied).update({name: _twin_of(value, remade) for name, value in attributes})
    return cast(PreTrainedModel, twins[0])


def _attributes(part: nn.Module) -> dict[str, Any]:
    """A part's attributes for its twin. A compiled forward would run the original tree: the one it
    was compiled from is taken."""
    own = vars(part) | {"training": False, "_compiled_call_impl": None, "_buffers": _buffers(part)}
    if "forward" in own:
        own["forward"] = getattr(own["forward"], "_torchdynamo_orig_callable", own["forward"])
        if not isinstance(own["forward"], MethodType | partial):
            raise RefusedError(
                f"the forward of {type(part).__name__} was replaced by {own['forward']!r:.60}, "
                "which may do anything; give the model as transformers makes it"
            )
    return own


def separate(model: nn.Module) -> None:
    """Let parts of a twin share no computed buffer: a forward may have put one in another's place,
    and what is shared cannot be traced."""
    for part in model.modules():
        part._buffers = _buffers(part)


def _buffers(part: nn.Module) -> dict[str, Any]:
    """The same buffers, but copies of those that are computed and not saved."""
    computed = part._non_persistent_buffers_set
    return {
        name: x.clone() if x is not None and name in computed and x.is_floating_point() else x
        for name, x in part._buffers.items()
    }


def _twin_of(value: Any, remade: dict[int, Any]) -> Any:
    """The same value for the twin: modules become the twin's, configurations copies. `remade`: what
    has been made already, by the id of its original."""
    if isinstance(value, nn.Module):
        return remade.get(id(value), value)
    if isinstance(value, PreTrainedConfig):
        return copy.deepcopy(value, remade)
    if isinstance(value, MethodType):
        return MethodType(value.__func__, _twin_of(value.__self__, remade))
    if isinstance(value, partial):
        arguments = [_twin_of(part, remade) for part in (value.func, *value.args)]
        return partial(*arguments, **{k: _twin_of(v, remade) for k, v in value.keywords.items()})
    if isinstance(value, dict) and any(isinstance(part, nn.Module) for part in value.values()):
        return {name: _twin_of(part, remade) for name, part in value.items()}
    if isinstance(value, list | tuple) and any(isinstance(part, nn.Module) for part in value):
        return type(value)(_twin_of(part, remade) for part in value)
    return value
