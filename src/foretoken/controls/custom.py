"""Custom logits processors and stopping criteria, called as in transformers, for one sequence at a
time; and checks of a request's controls against the model and its tokenizer.

Processors and criteria must be functions of a sequence's ids (and scores): a state stored from call
to call would be wrong after rejected draft tokens, and no batch index is passed to them. Classes of
transformers that need such state or an index are adapted, or refused by name.
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

# classes of transformers that are not functions of one sequence, and why
REFUSED_CLASSES = {
    "UnbatchedClassifierFreeGuidanceLogitsProcessor": "runs the model and stores its cache",
    "ClassifierFreeGuidanceLogitsProcessor": "uses a second half of the batch",
    "DiaClassifierFreeGuidanceLogitsProcessor": "uses a second half of the batch",
    "DiaEOSDelayPatternLogitsProcessor": "stores state from call to call",
    "SynthIDTextWatermarkLogitsProcessor": "stores state from call to call",
    "WhisperNoSpeechDetection": "runs the model",
    "ConfidenceCriteria": "uses a draft model's scores",
}


@dataclass(frozen=True, slots=True)
class CustomProcessor:
    """A user's logits processor as a control: `processor(ids [1, n], scores [1, V]) -> [1, V]`."""

    processor: Callable[[Tensor, Tensor], Tensor]

    def __call__(self, scores: Tensor, history: TokenHistory) -> Tensor:
        ids = history.to_tensor(scores.device)[None]
        name = type(self.processor).__name__
        try:
            changed = self.processor(ids, scores[None])
        except Exception as error:  # custom code may raise anything
            kind = type(error).__name__
            raise ControlError(f"processor {name} raised {kind}: {to_one_line(error)}") from error
        if not isinstance(changed, Tensor) or changed.shape != (1, len(scores)):
            shape = tuple(changed.shape) if isinstance(changed, Tensor) else type(changed).__name__
            raise ControlError(
                f"processor {name} returned {shape}; it must return a tensor of shape "
                f"(1, {len(scores)})"
            )
        return changed[0].to(scores)


class CustomStoppingCriterion:
    """A user's stopping criterion: `criterion(ids [1, n], scores) -> [1]` or a bool. Its second
    argument is the attribute `scores`, by default None."""

    def __init__(self, criterion: Callable[[Tensor, Any], Any], prompt: list[int]) -> None:
        self.criterion, self.tokens = criterion, list(prompt)
        self.scores: Any = None

    def append_token(self, token: int) -> str | None:
        """Append a token; return the criterion's name if the criterion ends the sequence with this
        token, else None."""
        self.tokens.append(token)
        name = type(self.criterion).__name__
        try:
            over = self.criterion(torch.tensor([self.tokens]), self.scores)
            over = bool(over.all()) if isinstance(over, Tensor) else bool(over)
        except ForeignError:
            raise
        except Exception as error:  # custom code may raise anything
            kind = type(error).__name__
            raise ControlError(f"stopping {name} raised {kind}: {to_one_line(error)}") from error
        return name if over else None

    def close(self) -> None:
        """Do nothing: unlike a detokenizer, a criterion delays no text."""


def flatten(objects: Iterable[Any]) -> list[Any]:
    """Return the objects, with lists (such as transformers' processor lists) flattened."""
    return [
        each for part in objects for each in (flatten(part) if isinstance(part, list) else [part])
    ]


def require_supported(objects: Iterable[Any]) -> None:
    """Raise RefusedError for a class of transformers that is not a function of one sequence."""
    for each in flatten(objects):
        name = next((c.__name__ for c in type(each).__mro__ if c.__name__ in REFUSED_CLASSES), None)
        if name is not None:
            raise RefusedError(
                f"{name} is not supported, because it {REFUSED_CLASSES[name]}; leave out {name}"
            )


def wrap_processors(objects: Iterable[Any], number: int) -> list[CustomProcessor]:
    """Return a user's processors as controls of one sequence. number: index of the sequence in its
    call, which some processors take as an argument."""
    return [CustomProcessor(_adapt(each, number)) for each in flatten(objects)]


def wrap_criteria(objects: Iterable[Any], prompt: list[int]) -> list[CustomStoppingCriterion]:
    """Return a user's stopping criteria as stop conditions of the sequence with this prompt."""
    return [CustomStoppingCriterion(each, prompt) for each in flatten(objects)]


def _adapt(processor: Any, number: int) -> Any:
    """Return the processor. A prefix constraint is wrapped to get `number` as its batch index;
    otherwise the index would always be 0, because each call has one sequence."""
    if type(processor).__name__ != PREFIX_PROCESSOR:
        return processor
    allowed = processor._prefix_allowed_tokens_fn
    return type(processor)(lambda _, ids: allowed(number, ids), num_beams=1)


def require_supported_params(params: SamplingParams, target: Model, has_tokenizer: bool) -> None:
    """Raise InputError for ids and counts that exceed the target's vocabulary, and for options that
    need a tokenizer if there is none; RefusedError for unsupported options."""
    V = target.vocab_size
    for name, ids in params.list_ids().items():
        for token in ids:
            if token >= V:
                problem = f"{name} names the id {format_value(token)}; ids must be in 0..{V - 1}"
                raise InputError(problem).with_option(name)
    for name in ("logprobs", "prompt_logprobs"):
        count = getattr(params, name)
        if count is not None and count > V:
            raise InputError(
                f"{name} is {format_value(count)}, but the model has {V} tokens; give at most {V}"
            ).with_option(name)
    if params.prompt_logprobs is not None and target.encoder_decoder:
        raise RefusedError(
            "prompt_logprobs does not work with an encoder-decoder, which computes no "
            "probabilities of its prompt, the encoder's input; leave out prompt_logprobs"
        ).with_option("prompt_logprobs")
    for name in ("stop_strings", "structured"):
        if getattr(params, name) and not has_tokenizer:
            problem = f"{name} needs a tokenizer; load the model with a tokenizer"
            raise InputError(problem).with_option(name)
    require_supported((*params.processors, *params.stopping))
