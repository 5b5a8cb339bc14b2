"""`attach` and `detach`: make the `generate` of a transformers model in memory speculative, and
restore it."""

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
# True while transformers decodes a call: if the call's assistant model is attached too, this model
# then uses its own generate as well
LEFT_TO_TRANSFORMERS = ContextVar("LEFT", default=False)
# Attribute of an attached `generate` that holds the `generate` that it replaced
REPLACED_ATTRIBUTE = "foretoken_replaced"


def attach(
    model: PreTrainedModel,
    draft: str | Path | PreTrainedModel | Drafter | Speculator | None = None,
    *,
    strict: bool = False,
    **options: Any,
) -> Speculator | None:
    """Make `model.generate` speculative.

    Afterwards `model.generate(...)` means `model.generate(..., custom_generate=spec)`, unless the
    call has its own `custom_generate`. Attaching again replaces the draft. A copy of the model does
    not decode speculatively.

    Args:
        model: A transformers model in memory.
        draft: The draft, as in `load`.
        strict: True to raise errors instead of leaving calls to transformers. A Speculator cannot
            decode some calls, such as one with num_beams=3 (see `Speculator.__call__`), and for a
            model that scores one token per forward pass, speculative decoding saves nothing.
            False: the model's previous `generate` decodes such calls and runs such models, and the
            logger "foretoken" states the reason at INFO. True: such calls raise ForeignError, and
            `attach` raises RefusedError for such a model.
        **options: Options of `load`.

    Returns:
        The Speculator that `model.generate` uses; None if the model is left unchanged, as it scores
        one token per forward pass.

    Raises:
        InputError: An option is unknown or invalid, or `model` has no `generate`.
        RefusedError: The model, or the model with this draft, cannot be decoded exactly. The model
            then has the `generate` from before any `attach`.

    Examples:
        >>> import foretoken, torch
        >>> from transformers import LlamaConfig, LlamaForCausalLM
        >>> shape = {"hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 2}
        >>> config = LlamaConfig(vocab_size=64, num_hidden_layers=1, eos_token_id=None, **shape)
        >>> model = LlamaForCausalLM(config).eval()  # random weights, no end-of-sequence token
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
        raise InputError(f"model is {format_value(model)}; give a transformers model in memory")
    require_known(options, "attach")
    detach(model)
    if not strict and options.get("generation_config") is None:
        options |= _ignore_unfollowed_config(model)
    try:
        spec = load(model, draft, **options)
    except RefusedError as error:
        if strict or SINGLE_TOKEN_HINT not in str(error):
            raise
        log.info("model.generate is left unchanged: %s", error)
        return None
    open_: Any = model  # so that the type checker accepts the assignment of a method
    replaced = vars(model).get("generate")  # a `generate` that other code has set on the instance

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
        torch.set_rng_state(state)  # undo a seed that the failed attempt may have drawn
        token = LEFT_TO_TRANSFORMERS.set(True)
        try:
            return theirs(*args, **kwargs)
        finally:
            LEFT_TO_TRANSFORMERS.reset(token)

    setattr(generate, REPLACED_ATTRIBUTE, replaced)
    # A bound method, so that a deep copy of the model generates with its own weights
    open_.generate = MethodType(generate, model)
    return spec


class SkipPromptStreamer:
    """Wraps a streamer that already has the prompt, so that another `generate` does not stream the
    prompt to it again."""

    def __init__(self, streamer: BaseStreamer) -> None:
        self.streamer, self.begun = streamer, False

    def put(self, value: Tensor) -> None:
        """Forward every value except the first one, the prompt."""
        if self.begun:
            self.streamer.put(value)
        self.begun = True

    def end(self) -> None:
        """End the streamer."""
        self.streamer.end()


def _ignore_unfollowed_config(model: PreTrainedModel) -> dict[str, str]:
    """If no Speculator can follow the model's generation config, return the option of `load` that
    ignores the config, else {}. transformers decodes calls with such a config."""
    config = getattr(model, "generation_config", None)
    entry = None if config is None else find_unfollowed(config)
    if entry is None:
        return {}
    log.info(
        "the model's generation config sets %s=%s, which foretoken does not support: transformers "
        "decodes such calls, and the Speculator's own generate ignores this config",
        entry,
        format_value(getattr(config, entry)),
    )
    return {"generation_config": "ignore"}


def _name_arguments(
    method: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return a call's arguments, with positional arguments converted to keywords. Return them
    unchanged if there are too many or one is given twice, so that the method raises its own
    error."""
    parameters = signature(method).parameters.values()
    names = [each.name for each in parameters if each.kind is each.POSITIONAL_OR_KEYWORD]
    positional = dict(zip(names, args, strict=False))
    if len(positional) < len(args) or positional.keys() & kwargs.keys():
        return args, kwargs
    return (), positional | kwargs


def _generate_speculatively(
    method: Any, spec: Speculator, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Call `method`, the model's own `generate`, with `spec` as its custom_generate."""
    if kwargs.get("cache_implementation") == "paged":  # transformers would bypass custom_generate
        raise ForeignError("cache_implementation='paged' is not supported; leave it out")
    kwargs = {**kwargs, "custom_generate": spec}
    _convert_stop_strings(kwargs, spec)
    return method(*args, **kwargs)


def _is_from_speculator(error: Exception) -> bool:
    """Return whether a Speculator raised the error.

    Otherwise transformers raised the error while it prepared the call. The call may then succeed
    without a custom_generate: transformers does not pass the tokenizer to a custom_generate, but
    token_healing and a config's stop_strings need it.
    """
    frames = walk_tb(error.__traceback__)
    return any(frame.f_code is Speculator.__call__.__code__ for frame, _ in frames)


def _convert_stop_strings(kwargs: dict[str, Any], spec: Speculator) -> None:
    """Replace a call's stop_strings and tokenizer in `kwargs` by a stopping criterion, since
    transformers does not pass the tokenizer to a custom_generate."""
    tokenizer = kwargs.pop("tokenizer", None) or spec.tokenizer
    strings = build_stop_criteria(kwargs.pop("stop_strings", None), tokenizer)
    if strings:
        kwargs["stopping_criteria"] = [*(kwargs.get("stopping_criteria") or ()), *strings]


def detach(model: PreTrainedModel) -> None:
    """Restore the `generate` that a model had before `attach`. Does nothing if the model is not
    attached.

    Args:
        model: A transformers model in memory.

    Raises:
        InputError: `model` is a pipeline or an adapter's wrapper.

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
