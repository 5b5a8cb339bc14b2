"""A user's own processors and stopping criteria, in transformers' form, row by row; and what a
request's controls need of the model and its tokenizer, checked before either runs.

A user's own are functions of a row's ids: one that keeps a state, or that needs its place in a
batch, would be wrong here where draft tokens are taken back. Transformers' own that do are
adapted or refused by name; a user's own must be functions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from foretoken.controls.penalties import TokenHistory
from foretoken.errors import (
    ControlError,
    ForeignError,
    InputError,
    RefusedError,
    format_value,
    to_one_line,
)
from foretoken.models.base import Model
from foretoken.sampling.params import SamplingParams

PREFIX_PROCESSOR = "PrefixConstrainedLogitsProcessor"

# Classes of transformers that no row alone can call, and why
REFUSED_CLASSES = {
    "UnbatchedClassifierFreeGuidanceLogitsProcessor": "runs the model and keeps its cache",
    "ClassifierFreeGuidanceLogitsProcessor": "reads a second half of the batch",
    "DiaClassifierFreeGuidanceLogitsProcessor": "reads a second half of the batch",
    "DiaEOSDelayPatternLogitsProcessor": "keeps a state from call to call",
    "SynthIDTextWatermarkLogitsProcessor": "keeps a state from call to call",
    "WhisperNoSpeechDetection": "runs the model",
    "ConfidenceCriteria": "reads a draft's scores",
}


@dataclass(frozen=True, slots=True)
class CustomProcessor:
    """A user's processor: `processor(ids [1, n], scores [1, V]) -> [1, V]`."""

    processor: Callable[[Tensor, Tensor], Tensor]

    def __call__(self, scores: Tensor, history: TokenHistory) -> Tensor:
        ids = history.to_tensor(scores.device)[None]
        name = type(self.processor).__name__
        try:
            changed = self.processor(ids, scores[None])
        except Exception as error:  # anybody's code
            kind = type(error).__name__
            raise ControlError(f"processor {name} raised {kind}: {to_one_line(error)}") from error
        if not isinstance(changed, Tensor) or changed.shape != (1, len(scores)):
            shape = tuple(changed.shape) if isinstance(changed, Tensor) else type(changed).__name__
            raise ControlError(f"processor {name} gave {shape}; it must give (1, {len(scores)})")
        return changed[0].to(scores)


class CustomStoppingCriterion:
    """A user's stopping criterion: `criterion(ids [1, n], scores) -> [1]` or a bool. `scores`:
    None, or what stands for them where its caller would be given some."""

    def __init__(self, criterion: Callable[[Tensor, Any], Any], prompt: list[int]) -> None:
        self.criterion, self.tokens = criterion, list(prompt)
        self.scores: Any = None

    def append_token(self, token: int) -> str | None:
        """The criterion's name where it ends the text with this token."""
        self.tokens.append(token)
        name = type(self.criterion).__name__
        try:
            over = self.criterion(torch.tensor([self.tokens]), self.scores)
            over = bool(over.all()) if isinstance(over, Tensor) else bool(over)
        except ForeignError:
            raise
        except Exception as error:  # anybody's code
            kind = type(error).__name__
            raise ControlError(f"stopping {name} raised {kind}: {to_one_line(error)}") from error
        return name if over else None

    def close(self) -> None:
        """Nothing is held back."""


def flatten(objects: Iterable[Any]) -> list[Any]:
    """Objects, and those in transformers' lists of them."""
    return [
        each for part in objects for each in (flatten(part) if isinstance(part, list) else [part])
    ]


def require_supported(objects: Iterable[Any]) -> None:
    """RefusedError for a class of transformers that no row alone can call."""
    for each in flatten(objects):
        name = next((c.__name__ for c in type(each).__mro__ if c.__name__ in REFUSED_CLASSES), None)
        if name is not None:
            raise RefusedError(
                f"{name} {REFUSED_CLASSES[name]}, which no single row can honour; leave it out"
            )


def wrap_processors(objects: Iterable[Any], number: int) -> list[CustomProcessor]:
    """Return processors as controls of a sequence; `row`: its number in the call, which some ask
    for."""
    return [CustomProcessor(_adapt(each, number)) for each in flatten(objects)]


def wrap_criteria(objects: Iterable[Any], prompt: list[int]) -> list[CustomStoppingCriterion]:
    """Return stopping criteria as endings of a sequence."""
    return [CustomStoppingCriterion(each, prompt) for each in flatten(objects)]


def _adapt(processor: Any, number: int) -> Any:
    """transformers counts rows where it allows tokens by prefix: here every row is alone."""
    if type(processor).__name__ != PREFIX_PROCESSOR:
        return processor
    allowed = processor._prefix_allowed_tokens_fn
    return type(processor)(lambda _, ids: allowed(number, ids), num_beams=1)


def require_supported_params(params: SamplingParams, target: Model, has_tokenizer: bool) -> None:
    """InputError for ids and counts beyond the target's vocabulary and for options that only a
    tokenizer could honour, RefusedError for what no row can have here."""
    V = target.vocab_size
    for name, ids in params.ids().items():
        for token in ids:
            if token >= V:
                problem = f"{name} names the id {format_value(token)}; ids must be in 0..{V - 1}"
                raise InputError(problem).about(name)
    for name in ("logprobs", "prompt_logprobs"):
        count = getattr(params, name)
        if count is not None and count > V:
            raise InputError(
                f"{name} is {format_value(count)}, but there are {V} tokens; give at most that"
            ).about(name)
    if params.prompt_logprobs is not None and target.encoder_decoder:
        raise RefusedError(
            "prompt_logprobs: an encoder reads the prompt, which has no probabilities; leave it out"
        ).about("prompt_logprobs")
    for name in ("stop_strings", "structured"):
        if getattr(params, name) and not has_tokenizer:
            raise InputError(f"{name} needs a tokenizer; load the model with one").about(name)
    require_supported((*params.processors, *params.stopping))
