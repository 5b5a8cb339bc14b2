"""All controls of one sequence, in transformers' order. Drafting, verification, the next token and
plain decoding share these controls.

Speculative decoding stays exact with controls, because the same controls apply to p and to q, and
at each position the controls depend on all earlier tokens, draft tokens included.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Protocol, cast

import torch
from torch import Tensor

from foretoken.controls import custom, penalties
from foretoken.controls.penalties import Rewindable, TokenHistory
from foretoken.errors import ControlError
from foretoken.request import Request
from foretoken.sampling.params import SamplingParams

MAX_SCORE = 1e30  # still finite in float32 after division by the lowest non-greedy temperature
Control = Callable[[Tensor, TokenHistory], Tensor]  # scores [V], may change them -> scores [V]


class Matcher(Rewindable, Protocol):
    """The state of a grammar after the tokens of a sequence."""

    def __call__(self, scores: Tensor) -> Tensor:
        """Return the scores with -inf for tokens that the grammar does not allow."""
        ...

    def find_forced_tokens(self) -> list[int]:
        """Return the next tokens that the grammar forces; [] if no tokens are forced."""
        ...


class Chain:
    """The controls of one sequence, with their state. To compute the scores after some draft
    tokens, these draft tokens are pushed to the controls, and are popped when other draft tokens
    replace them. Committed tokens are never popped."""

    def __init__(self, controls: list[tuple[str, Control]], context: _ControlContext) -> None:
        self.controls, self.history, self.V = (
            controls,
            TokenHistory(context.request.prompt),
            context.V,
        )
        stateful = [control for _, control in controls if hasattr(control, "push")]
        matchers = [] if context.matcher is None else [context.matcher]
        self._rewindables = [*cast(list[Rewindable], stateful), *matchers, self.history]
        self._matcher = context.matcher
        self._draft_tokens: list[int] = []  # pushed after the committed tokens

    def shape(self, logits: Tensor, draft_tokens: list[int]) -> Tensor:
        """Apply the controls after the committed tokens and `draft_tokens`: take the model's logits
        `[V]` there, which are not changed, and return scores `[V]`.

        Raises a ControlError that names the control if a control allows no token or fails.
        """
        self._seek(draft_tokens)
        scores = logits.clone()
        for _, control in self.controls:
            scores = control(scores, self.history)
        top = float(scores.amax())
        if not math.isfinite(top):
            raise self._blame(logits)
        return scores if abs(top) <= MAX_SCORE else scores - top  # the same distribution

    def find_forced_tokens(self, draft_tokens: list[int]) -> list[int]:
        """Return the tokens after `draft_tokens` that the grammar forces."""
        if self._matcher is None:
            return []
        self._seek(draft_tokens)
        return self._matcher.find_forced_tokens()

    def commit(self, tokens: list[int]) -> None:
        """Update the controls for newly committed tokens."""
        self._seek(tokens)
        self._draft_tokens = []

    def _seek(self, draft_tokens: list[int]) -> None:
        """Pop and push tokens until the controls have the state after the committed tokens and
        `draft_tokens`."""
        common = 0
        while (
            common < min(len(draft_tokens), len(self._draft_tokens))
            and draft_tokens[common] == self._draft_tokens[common]
        ):
            common += 1
        for _ in self._draft_tokens[common:]:
            for memory in self._rewindables:
                memory.pop()
        for token in draft_tokens[common:]:
            for memory in self._rewindables:
                memory.push(token)
        self._draft_tokens = list(draft_tokens)

    def _blame(self, logits: Tensor) -> ControlError:
        """Return an error that names the first control after which the highest score is not finite:
        all scores are -inf, or a score is NaN or +inf."""
        scores = logits.clone()
        for name, control in self.controls:
            scores = control(scores, self.history)
            top = float(scores.amax())
            if not math.isfinite(top):
                length = len(self.history.tokens)
                if top == -torch.inf:
                    error = ControlError(f"{name} allows no token after {length} tokens")
                else:
                    error = ControlError(
                        f"{name} returns a score of NaN or infinity after {length} tokens"
                    )
                return error.with_option(name)
        return ControlError("the controls allow no token")


@dataclass(frozen=True, slots=True)
class _ControlContext:
    """The data of a request that its controls need."""

    request: Request
    V: int
    number: int
    matcher: Matcher | None

    @property
    def source_ids(self) -> list[int]:
        """The ids for controls of the encoder's input; the prompt if there is no encoder."""
        return self.request.source or self.request.prompt

    @property
    def eos_ids(self) -> list[int]:
        return sorted(token for token in self.request.eos if 0 <= token < self.V)


def build_chain(
    request: Request, V: int, number: int = 0, matcher: Matcher | None = None
) -> Chain | None:
    """Return the controls of a request; None if the request has no controls.

    V: size of the target's output layer; number: index of the sequence in its call, which
    transformers' prefix constraints take as an argument; matcher: state of the grammar that the
    output must match.
    """
    context = _ControlContext(request, V, number, matcher)
    ordered = (_iter_biases_and_penalties, _iter_bans, _iter_end_controls, _iter_custom_controls)
    controls = [control for part in ordered for control in part(request.params, context)]
    return Chain(controls, context) if controls else None


NamedControls = Iterator[tuple[str, Control]]


def _iter_biases_and_penalties(params: SamplingParams, context: _ControlContext) -> NamedControls:
    if params.sequence_bias:
        yield "sequence_bias", penalties.SequenceBias(dict(params.sequence_bias))
    if params.logit_bias:
        yield "logit_bias", penalties.SequenceBias(dict(params.logit_bias))
    encoder_penalty, penalty = (
        params.encoder_repetition_penalty or 1,
        params.repetition_penalty or 1,
    )
    if encoder_penalty != 1:
        yield (
            "encoder_repetition_penalty",
            penalties.EncoderRepetitionPenalty(encoder_penalty, context.source_ids, context.V),
        )
    if penalty != 1:
        yield "repetition_penalty", penalties.RepetitionPenalty(penalty)
    if params.presence_penalty or params.frequency_penalty:
        occurrence = penalties.OccurrencePenalty(params.presence_penalty, params.frequency_penalty)
        yield "presence_penalty and frequency_penalty", occurrence


def _iter_bans(params: SamplingParams, context: _ControlContext) -> NamedControls:
    if n := params.no_repeat_ngram_size:
        yield "no_repeat_ngram_size", penalties.NoRepeatNgram(n, context.request.prompt)
    if params.encoder_no_repeat_ngram_size:
        control = penalties.NoSourceNgram(
            params.encoder_no_repeat_ngram_size, context.source_ids, context.V
        )
        yield "encoder_no_repeat_ngram_size", control
    if params.allowed_token_ids is not None:
        yield "allowed_token_ids", penalties.AllowTokens(params.allowed_token_ids, context.V)
    # as in transformers, EOS ids are not bad words
    bad = [
        ids
        for ids in params.bad_words_ids or ()
        if not context.request.eos.issuperset(ids) or len(ids) > 1
    ]
    if bad:
        yield "bad_words_ids", penalties.SequenceBias(dict.fromkeys(bad, -torch.inf))
    eos_ids = [token for token in context.eos_ids if token not in context.request.late_eos]
    if params.min_new_tokens and eos_ids:
        yield "min_new_tokens", penalties.SuppressTokens(eos_ids, until=params.min_new_tokens)
    if context.request.forced:
        yield (
            "forced_bos_token_id and forced_eos_token_id",
            penalties.ForceTokens(context.request.forced),
        )


def _iter_end_controls(params: SamplingParams, context: _ControlContext) -> NamedControls:
    if params.remove_invalid_values:
        yield "remove_invalid_values", penalties.replace_nonfinite
    if params.exponential_decay_length_penalty:
        start, factor = params.exponential_decay_length_penalty
        yield (
            "exponential_decay_length_penalty",
            penalties.ExponentialDecayPenalty(start, factor, context.eos_ids),
        )
    if params.suppress_tokens:
        yield "suppress_tokens", penalties.SuppressTokens(list(params.suppress_tokens))
    if params.begin_suppress_tokens:
        begin = int(len(context.request.prompt) == 1 and params.forced_bos_token_id is not None)
        suppressed = penalties.SuppressTokens(list(params.begin_suppress_tokens), begin, begin + 1)
        yield "begin_suppress_tokens", suppressed


def _iter_custom_controls(params: SamplingParams, context: _ControlContext) -> NamedControls:
    for each in custom.wrap_processors(params.processors, context.number):
        yield f"processor {type(each.processor).__name__}", each
    if (matcher := context.matcher) is not None:
        yield "structured", lambda scores, history: matcher(scores)
    if params.thinking_budget:  # last: checks if the grammar allows the end of thinking
        yield "thinking_budget", penalties.LimitThinking(params.thinking_budget)
