"""A model in memory whose own `generate` is speculative."""

from __future__ import annotations

import logging
from contextvars import ContextVar
from functools import wraps
from inspect import signature
from traceback import walk_tb
from types import MethodType
from typing import TYPE_CHECKING, Any, cast

import torch

from foretoken.drafters.base import Drafter
from foretoken.errors import ForeignError, InputError, RefusedError, format_value, to_one_line
from foretoken.generation_config import find_unfollowed
from foretoken.loading.load import load
from foretoken.loading.options import require_known
from foretoken.loading.sources import unwrap_model
from foretoken.models.stock.rowwise import SINGLE_TOKEN_HINT
from foretoken.speculator import Speculator
from foretoken.transformers_integration.generate_call import build_stop_criteria

if TYPE_CHECKING:
    from pathlib import Path

    from torch import Tensor
    from transformers import PreTrainedModel
    from transformers.generation.streamers import BaseStreamer

log = logging.getLogger(__name__)
LEFT_TO_TRANSFORMERS = ContextVar(
    "LEFT", default=False
)  # whether transformers decodes: its drafts stay its own
REPLACED_ATTRIBUTE = (
    "foretoken_replaced"  # what an attached `generate` stands for is kept under this name
)


def attach(
    model: PreTrainedModel,
    draft: str | Path | PreTrainedModel | Drafter | Speculator | None = None,
    *,
    strict: bool = False,
    **options: Any,
) -> Speculator | None:
    """Make `model.generate` speculative.

    From now on `model.generate(...)` is `model.generate(..., custom_generate=spec)`, unless the
    call has a `custom_generate` of its own. Attaching again replaces the draft. A copy of the model
    has to be attached itself.

    Args:
        model: A model of transformers in memory.
        draft: As `load` takes it.
        strict: The treatment of a call that a Speculator cannot decode (`Speculator.__call__` says
            which), such as one with num_beams=3, and of a model whose passes score single tokens,
            so that drafts save nothing. False leaves them to the `generate` that was there before,
            and the logger "foretoken" says why at INFO; True raises ForeignError for the call, and
            RefusedError for the model.
        **options: Options of `load`.

    Returns:
        The Speculator that `model.generate` uses; None where the model is left as it was.

    Raises:
        InputError: An option is unknown or invalid, or `model` has no `generate`.
        RefusedError: A model or a pair that cannot be decoded exactly; the model keeps its own
            `generate`.

    Examples:
        >>> import foretoken, torch
        >>> from transformers import LlamaConfig, LlamaForCausalLM
        >>> shape = {"hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 2}
        >>> config = LlamaConfig(vocab_size=64, num_hidden_layers=1, eos_token_id=None, **shape)
        >>> model = LlamaForCausalLM(config).eval()  # random weights, and a text that never ends
        >>> spec = foretoken.attach(model, draft="lookup")
        >>> out = model.generate(
        ...     torch.tensor([[5, 6, 7]]), max_new_tokens=4, do_sample=False, num_assistant_tokens=2
        ... )
        >>> out.shape
        torch.Size([1, 7])
    """
    model = cast(Any, unwrap_model(model, "model"))
    if not isinstance(strict, bool):
        raise InputError(f"strict is {format_value(strict)}; give True or False")
    if not callable(getattr(model, "generate", None)):
        raise InputError(f"model is {format_value(model)}; give a model of transformers in memory")
    require_known(options, "attach")
    detach(model)
    if not strict and options.get("generation_config") is None:
        options |= _ignore_unfollowed_config(model)
    try:
        spec = load(model, draft, **options)
    except RefusedError as error:
        if strict or SINGLE_TOKEN_HINT not in str(error):
            raise
        log.info("the model keeps its own generate: %s", error)
        return None
    open_: Any = model  # nn.Module declares no method of its own as an attribute
    replaced = vars(model).get("generate")  # somebody else's, if any

    @wraps(open_.generate)
    def generate(self: Any, *args: Any, **kwargs: Any) -> Any:
        theirs = replaced or MethodType(type(self).generate, self)
        args, kwargs = _name_arguments(theirs, args, kwargs)
        if LEFT_TO_TRANSFORMERS.get() or kwargs.get("custom_generate") is not None:
            return theirs(*args, **kwargs)
        state = torch.get_rng_state()
        try:
            return _generate_speculatively(theirs, spec, args, kwargs)
        except Exception as error:
            reached = _is_from_speculator(error)
            if strict or (reached and not isinstance(error, ForeignError)):
                raise
            log.info("transformers decodes this call: %s", to_one_line(error))
        if reached and kwargs.get("streamer") is not None:
            kwargs["streamer"] = SkipPromptStreamer(kwargs["streamer"])
        torch.set_rng_state(state)  # a seed may have been drawn
        token = LEFT_TO_TRANSFORMERS.set(True)
        try:
            return theirs(*args, **kwargs)
        finally:
            LEFT_TO_TRANSFORMERS.reset(token)

    setattr(generate, REPLACED_ATTRIBUTE, replaced)
    # a method, so that a copy of the model does not generate with this one
    open_.generate = MethodType(generate, model)
    return spec


class SkipPromptStreamer:
    """A streamer that was given the prompt, and is given it once more by another `generate`."""

    def __init__(self, streamer: BaseStreamer) -> None:
        self.streamer, self.begun = streamer, False

    def put(self, value: Tensor) -> None:
        """All but the first value."""
        if self.begun:
            self.streamer.put(value)
        self.begun = True

    def end(self) -> None:
        """Nothing follows."""
        self.streamer.end()


def _ignore_unfollowed_config(model: PreTrainedModel) -> dict[str, str]:
    """The option of `load` for a model whose generation config asks for what no Speculator decodes:
    its calls go to transformers as long as they ask for it."""
    config = getattr(model, "generation_config", None)
    entry = None if config is None else find_unfollowed(config)
    if entry is None:
        return {}
    log.info(
        "the model's generation config sets %s=%s: transformers decodes such calls, and the "
        "Speculator's own generate ignores this config",
        entry,
        format_value(getattr(config, entry)),
    )
    return {"generation_config": "ignore"}


def _name_arguments(
    method: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """A call's arguments by name, where the method names all of them."""
    parameters = signature(method).parameters.values()
    names = [each.name for each in parameters if each.kind is each.POSITIONAL_OR_KEYWORD]
    by_place = dict(zip(names, args, strict=False))
    if len(by_place) < len(args) or by_place.keys() & kwargs.keys():
        return args, kwargs  # left for the method to refuse
    return (), by_place | kwargs


def _generate_speculatively(
    method: Any, spec: Speculator, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """The call as `spec` decodes it."""
    if kwargs.get("cache_implementation") == "paged":  # which no custom_generate hears of
        raise ForeignError("cache_implementation='paged' is not followed here; leave it out")
    kwargs = {**kwargs, "custom_generate": spec}
    _convert_stop_strings(kwargs, spec)
    return method(*args, **kwargs)


def _is_from_speculator(error: Exception) -> bool:
    """Tell whether the error was raised by a Speculator, rather than by transformers' preparations
    for one: without one, the call may succeed (transformers hides the call's tokenizer from a
    custom_generate, which token_healing and a config's stop_strings need)."""
    frames = walk_tb(error.__traceback__)
    return any(frame.f_code is Speculator.__call__.__code__ for frame, _ in frames)


def _convert_stop_strings(kwargs: dict[str, Any], spec: Speculator) -> None:
    """Turn a call's stop strings into a criterion: transformers does not hand the call's tokenizer
    to a custom_generate."""
    tokenizer = kwargs.pop("tokenizer", None) or spec.tokenizer
    strings = build_stop_criteria(kwargs.pop("stop_strings", None), tokenizer)
    if strings:
        kwargs["stopping_criteria"] = [*(kwargs.get("stopping_criteria") or ()), *strings]


def detach(model: PreTrainedModel) -> None:
    """Give a model back the `generate` that it had before `attach`; without one, do nothing.

    Args:
        model: A model of transformers in memory.

    Examples:
        >>> import foretoken
        >>> from transformers import LlamaConfig, LlamaForCausalLM
        >>> shape = {"hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 2}
        >>> model = LlamaForCausalLM(LlamaConfig(vocab_size=64, num_hidden_layers=1, **shape))
        >>> spec = foretoken.attach(model, draft="lookup")
        >>> foretoken.detach(model)
        >>> "generate" in vars(model)
        False
    """
    model = cast(Any, unwrap_model(model, "model"))
    method: Any = vars(model).get("generate")
    if not hasattr(method, REPLACED_ATTRIBUTE):
        return
    replaced = getattr(method, REPLACED_ATTRIBUTE)
    del model.generate
    if replaced is not None:
        vars(model)["generate"] = replaced
