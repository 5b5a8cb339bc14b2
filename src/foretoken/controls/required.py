"""What a row's options need of the model and its tokenizer, checked before either runs."""

from __future__ import annotations

from collections.abc import Iterable

from foretoken.controls.own import require_own
from foretoken.errors import InputError, RefusedError, shown
from foretoken.models.base import Model
from foretoken.sampling.params import FIELDS, BeamControls, SamplingParams


def require_beams(params: SamplingParams, names: Iterable[str]) -> None:
    """RefusedError for options that a beam search does not follow; `names`: a caller's own."""
    for name in names:
        if name in FIELDS and name not in BeamControls.__annotations__:
            raise RefusedError(f"beam_search does not take {name}; leave it out, or call generate")
    if params.stop_strings:
        raise RefusedError(
            f"the model's generation config sets stop_strings={list(params.stop_strings)!r:.60}, "
            "which beam_search does not follow; load with generation_config='ignore'"
        )


def require(params: SamplingParams, target: Model, tokenizer: bool) -> None:
    """InputError for ids and counts beyond the target's vocabulary and for options that only a
    tokenizer could honour, RefusedError for what no row can have here."""
    V = target.vocab_size
    for name, ids in params.ids().items():
        for token in ids:
            if token >= V:
                problem = f"{name} names the id {shown(token)}; ids must be in 0..{V - 1}"
                raise InputError(problem).about(name)
    for name in ("logprobs", "prompt_logprobs"):
        count = getattr(params, name)
        if count is not None and count > V:
            raise InputError(
                f"{name} is {shown(count)}, but there are {V} tokens; give at most that"
            ).about(name)
    if params.prompt_logprobs is not None and target.encoder_decoder:
        raise RefusedError(
            "prompt_logprobs: an encoder reads the prompt, which has no probabilities; leave it out"
        ).about("prompt_logprobs")
    for name in ("stop_strings", "structured"):
        if getattr(params, name) and not tokenizer:
            raise InputError(f"{name} needs a tokenizer; load the model with one").about(name)
    require_own((*params.processors, *params.stopping))
