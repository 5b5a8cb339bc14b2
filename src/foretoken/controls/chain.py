"""All controls of one row, in transformers' order: one place that the draft, the verification, the
next token and plain decoding share.

Exact because a position's scores are shaped by its true prefix, guesses included (the exactness
contract: processors with history are evaluated per position, for p and for q).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Protocol, cast

import torch
from torch import Tensor

from foretoken.controls import own, penalties
from foretoken.controls.penalties import History, Rewindable
from foretoken.errors import ControlError
from foretoken.request import Request
from foretoken.sampling.params import SamplingParams

LARGEST = 1e30  # of scores: divided by any temperature above greedy's they are still float32
Control = Callable[[Tensor, History], Tensor]  # scores [V], which it may change -> scores [V]


class Matcher(Rewindable, Protocol):
    """A text on its way through a grammar."""

    def __call__(self, scores: Tensor) -> Tensor:
        """Scores where no other token is possible than those that the grammar allows."""
        ...

    def find_forced_tokens(self) -> list[int]:
        """The next tokens, where the grammar leaves no choice."""
        ...


class Chain:
    """The controls of one row. Committed tokens are pushed for good; draft tokens are pushed when a
    position behind them is shaped, and popped when another guess takes their place."""

    def __init__(self, controls: list[tuple[str, Control]], row: _Setting) -> None:
        self.controls, self.history, self.V = controls, History(row.request.prompt), row.V
        memories = [control for _, control in controls if hasattr(control, "push")]
        matchers = [] if row.matcher is None else [row.matcher]
        self._memories = [*cast(list[Rewindable], memories), *matchers, self.history]
        self._matcher = row.matcher
        self._ahead: list[int] = []  # guesses pushed behind the committed text

    def shape(self, logits: Tensor, draft_tokens: list[int]) -> Tensor:
        """The scores `[V]` behind the committed text and the draft tokens `ahead`, from the model's
        logits there, which stay as they are.

        ControlError where a control leaves no token or fails; it names the control.
        """
        self._seek(draft_tokens)
        scores = logits.clone()
        for _, control in self.controls:
            scores = control(scores, self.history)
        top = float(scores.amax())
        if not math.isfinite(top):
            raise self._blame(logits)
        return scores if abs(top) <= LARGEST else scores - top  # the same distribution

    def find_forced_tokens(self, draft_tokens: list[int]) -> list[int]:
        """The tokens behind `ahead` that the grammar leaves no choice about."""
        if self._matcher is None:
            return []
        self._seek(draft_tokens)
        return self._matcher.find_forced_tokens()

    def commit(self, tokens: list[int]) -> None:
        """The text goes on by these."""
        self._seek(tokens)
        self._ahead = []

    def _seek(self, ahead: list[int]) -> None:
        same = 0
        while same < min(len(ahead), len(self._ahead)) and ahead[same] == self._ahead[same]:
            same += 1
        for _ in self._ahead[same:]:
            for memory in self._memories:
                memory.pop()
        for token in ahead[same:]:
            for memory in self._memories:
                memory.push(token)
        self._ahead = list(ahead)

    def _blame(self, logits: Tensor) -> ControlError:
        """Which control leaves nothing, of scores that something was left of."""
        scores = logits.clone()
        for name, control in self.controls:
            scores = control(scores, self.history)
            top = float(scores.amax())
            if not math.isfinite(top):
                length = len(self.history.tokens)
                if top == -torch.inf:
                    error = ControlError(f"{name} leaves no token behind {length} tokens")
                else:
                    error = ControlError(
                        f"{name} leaves a score of NaN or infinity behind {length} tokens"
                    )
                return error.about(name)
        return ControlError("the controls leave no token")


@dataclass(frozen=True, slots=True)
class _Setting:
    """Facts about a request that its controls need."""

    request: Request
    V: int
    number: int
    matcher: Matcher | None

    @property
    def read(self) -> list[int]:
        """The ids that controls named after an encoder look at: without an encoder, the prompt."""
        return self.request.source or self.request.prompt

    @property
    def stops(self) -> list[int]:
        return sorted(token for token in self.request.eos if 0 <= token < self.V)


def chain(
    request: Request, V: int, number: int = 0, matcher: Matcher | None = None
) -> Chain | None:
    """The controls that a request asks for; None where it asks for none, which costs nothing.

    V: rows of the target's output layer; number: the row's in its call, which transformers'
    prefix constraints ask for; matcher: of the grammar that its text must match.
    """
    row = _Setting(request, V, number, matcher)
    ordered = (_raised_and_lowered, _banned, _ends, _own_controls)
    controls = [control for part in ordered for control in part(request.params, row)]
    return Chain(controls, row) if controls else None


Named = Iterator[tuple[str, Control]]


def _raised_and_lowered(params: SamplingParams, row: _Setting) -> Named:
    if params.sequence_bias:
        yield "sequence_bias", penalties.Biased(dict(params.sequence_bias))
    if params.logit_bias:
        yield "logit_bias", penalties.Biased(dict(params.logit_bias))
    encoder, every = params.encoder_repetition_penalty or 1, params.repetition_penalty or 1
    if encoder != 1:
        yield "encoder_repetition_penalty", penalties.Encoder(encoder, row.read, row.V)
    if every != 1:
        yield "repetition_penalty", penalties.Repetition(every)
    if params.presence_penalty or params.frequency_penalty:
        occurrence = penalties.Occurrence(params.presence_penalty, params.frequency_penalty)
        yield "presence_penalty and frequency_penalty", occurrence


def _banned(params: SamplingParams, row: _Setting) -> Named:
    if n := params.no_repeat_ngram_size:
        yield "no_repeat_ngram_size", penalties.NoRepeat(n, row.request.prompt)
    if params.encoder_no_repeat_ngram_size:
        none = penalties.NoneOfSource(params.encoder_no_repeat_ngram_size, row.read, row.V)
        yield "encoder_no_repeat_ngram_size", none
    if params.allowed_token_ids is not None:
        yield "allowed_token_ids", penalties.Allowed(params.allowed_token_ids, row.V)
    # as transformers has it, an end is no bad word
    bad = [
        ids
        for ids in params.bad_words_ids or ()
        if not row.request.eos.issuperset(ids) or len(ids) > 1
    ]
    if bad:
        yield "bad_words_ids", penalties.Biased(dict.fromkeys(bad, -torch.inf))
    ends = [token for token in row.stops if token not in row.request.late_eos]
    if params.min_new_tokens and ends:
        yield "min_new_tokens", penalties.Suppressed(ends, until=params.min_new_tokens)
    if row.request.forced:
        yield "forced_bos_token_id and forced_eos_token_id", penalties.Forced(row.request.forced)


def _ends(params: SamplingParams, row: _Setting) -> Named:
    if params.remove_invalid_values:
        yield "remove_invalid_values", penalties.finite
    if params.exponential_decay_length_penalty:
        start, factor = params.exponential_decay_length_penalty
        yield "exponential_decay_length_penalty", penalties.Decay(start, factor, row.stops)
    if params.suppress_tokens:
        yield "suppress_tokens", penalties.Suppressed(list(params.suppress_tokens))
    if params.begin_suppress_tokens:
        begin = int(len(row.request.prompt) == 1 and params.forced_bos_token_id is not None)
        suppressed = penalties.Suppressed(list(params.begin_suppress_tokens), begin, begin + 1)
        yield "begin_suppress_tokens", suppressed


def _own_controls(params: SamplingParams, row: _Setting) -> Named:
    for each in own.processors(params.processors, row.number):
        yield f"processor {type(each.processor).__name__}", each
    if (matcher := row.matcher) is not None:
        yield "structured", lambda scores, history: matcher(scores)
    if params.thinking_budget:  # last: it sees where a grammar does not let thoughts end yet
        yield "thinking_budget", penalties.BoundedThoughts(params.thinking_budget)
