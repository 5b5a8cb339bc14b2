"""Requests, their sequences and their results: plain data, independent of models."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Literal, NamedTuple, Protocol

from torch import Tensor

from foretoken.errors import ControlError, RefusedError, format_value
from foretoken.media.inputs import Media
from foretoken.records import Stats, StepRecord
from foretoken.sampling.draw import LogitShaper
from foretoken.sampling.keys import SequenceKey
from foretoken.sampling.logprobs import Logprobs
from foretoken.sampling.params import SamplingParams
from foretoken.text.prediction import PredictedOutput

FinishReason = Literal["stop", "length", "interrupted", "error"]


@dataclass(frozen=True, slots=True)
class Request:
    """The input of one sequence: its prompt as token ids, its limits, sampling params and key."""

    prompt: list[int]  # of the decoder; for an encoder-decoder usually its start token
    limit: int  # maximum number of new tokens
    key: SequenceKey
    eos: frozenset[int] = frozenset()
    source: list[int] | None = None  # encoder input
    forced: dict[int, int] = field(default_factory=dict[int, int])  # output position -> id
    params: SamplingParams = SamplingParams()  # with defaults from the generation config
    salt: str = ""  # only sequences of the same salt share cached prefixes
    prediction: tuple[int, ...] = ()  # the output that the caller expects
    media: Media | None = None  # part of the prompt, or encoder input in place of `source`
    # ids in `eos` that are stop strings: they do not stop the sequence before min_new_tokens
    late_eos: frozenset[int] = frozenset()


class SequenceControls(LogitShaper, Protocol):
    """Sampling controls of a sequence, which change its logits depending on its tokens."""

    def commit(self, tokens: list[int]) -> None:
        """Append tokens to the sequence."""
        ...


class OutputPredictor(Protocol):
    """Proposes draft tokens without a drafter: from the request's prediction, or from earlier parts
    of the sequence."""

    priors: tuple[tuple[float, float], ...]  # expected acceptance by grade, as `Drafter.priors`

    @property
    def grade(self) -> int:
        """The confidence in the last prediction: an index into `priors`."""
        ...

    def predict_next(self, new_tokens: list[int], max_tokens: int) -> list[int]:
        """Return at most `max_tokens` tokens that may follow the output `new_tokens`."""
        ...


class StopCondition(Protocol):
    """A stop condition other than an EOS id: stop strings or a user's stopping criterion."""

    def append_token(self, token: int) -> str | None:
        """Append a token. Return the stop reason if the sequence stops with this token, else None.
        Raises ControlError if a user's criterion fails."""
        ...

    def close(self) -> str | None:
        """At the end of the sequence, check the characters that were withheld so far. Return the
        stop reason if these characters stop the sequence, else None."""
        ...


class StepLogits(NamedTuple):
    """The logits that a step's n tokens were sampled from."""

    raw: Tensor  # [n, V], the target's logits
    shaped: Tensor  # [n, V], after the sequence's controls


class SequenceStatus(Enum):
    """The scheduling status of a sequence."""

    WAITING = auto()  # not in the batch, also after a preemption
    PREFILLING = auto()
    RUNNING = auto()  # all its tokens but the last are in the target's cache
    FINISHED = auto()


@dataclass(slots=True)
class SequenceState:
    """The state of a sequence: `tokens` holds the prompt and the output; all tokens but the last
    `num_pending` are in the target's cache."""

    request: Request
    tokens: list[int]
    records: list[StepRecord] = field(default_factory=list[StepRecord])
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None  # the id, string or criterion that stopped the sequence
    error: RefusedError | None = None
    controls: SequenceControls | None = None
    stop_conditions: list[StopCondition] = field(default_factory=list[StopCondition])
    logprobs: list[Logprobs] = field(default_factory=list[Logprobs])
    prompt_logprobs: list[Logprobs] = field(default_factory=list[Logprobs])
    step_logits: list[StepLogits] | None = None  # of every step; None: not recorded
    prefill_seconds: float = 0.0
    draft_prefill_seconds: float = 0.0
    encoder_seconds: float = 0.0  # in the target's prefill
    draft_encoder_seconds: float = 0.0  # in the drafter's prefill
    first_seconds: float = 0.0
    prefill_end_seconds: float = 0.0  # until the end of the drafter's prefill
    seconds: float = 0.0
    num_pending: int = 1
    in_batch: bool = False
    cached: int = 0  # prompt tokens found in the prefix cache
    output_predictor: OutputPredictor | None = None
    drafting_disabled: bool = False  # True after draft tokens made the target's logits invalid
    # the sequence's length when invalid draft logits last caused it to be prefilled again
    last_retry_length: int = 0
    grade: int = 0  # confidence in the next draft tokens: an index into `Drafter.priors`
    # True: draft tokens come from `output_predictor`; if it has none, from the drafter. None: no
    # policy has decided, and only predictions of the highest grade are used
    uses_prediction: bool | None = None
    start_time: float = 0.0  # when it first joined a batch, by `perf_counter`; 0: not yet

    @property
    def status(self) -> SequenceStatus:
        if self.finish_reason is not None:
            return SequenceStatus.FINISHED
        if not self.in_batch:
            return SequenceStatus.WAITING
        return SequenceStatus.RUNNING if self.num_pending == 1 else SequenceStatus.PREFILLING

    def raise_error(self, number: int) -> None:
        """Raise the sequence's error, if there is one; the message begins with the row `number`."""
        if self.error is not None:
            raise type(self.error)(f"row {number}: {self.error}")

    @classmethod
    def from_request(cls, request: Request) -> SequenceState:
        """Return the state of a sequence that has not started."""
        expected = PredictedOutput(request.prediction) if request.prediction else None
        return cls(request, list(request.prompt), output_predictor=expected)

    @property
    def new_tokens(self) -> list[int]:
        return self.tokens[len(self.request.prompt) :]

    @property
    def pending_tokens(self) -> list[int]:
        """The last `num_pending` tokens, which are not in the target's cache yet."""
        return self.tokens[len(self.tokens) - self.num_pending :]

    @property
    def num_remaining(self) -> int:
        """The number of tokens that may still be generated."""
        return self.request.limit - (len(self.tokens) - len(self.request.prompt))

    def predict_tokens(self, max_tokens: int) -> list[int]:
        """Return at most `max_tokens` next tokens of the predicted output; [] without an output
        predictor."""
        return (
            []
            if self.output_predictor is None
            else self.output_predictor.predict_next(self.new_tokens, max_tokens)
        )

    @property
    def is_prediction_confident(self) -> bool:
        """True if the last prediction has the highest grade of its predictor."""
        predictor = self.output_predictor
        return predictor is not None and predictor.grade == len(predictor.priors) - 1

    def find_predicted_draft(self, max_tokens: int) -> list[int]:
        """Return at most `max_tokens` next tokens of the predicted output, if the next draft tokens
        come from it, else []."""
        if not max_tokens or self.uses_prediction is False:
            return []
        tokens = self.predict_tokens(max_tokens)
        return tokens if self.uses_prediction or self.is_prediction_confident else []

    def find_forced_tokens(self, max_tokens: int) -> list[int]:
        """Return at most `max_tokens` next tokens that the grammar determines."""
        return (
            self.controls.find_forced_tokens([])[:max_tokens]
            if self.controls is not None and max_tokens
            else []
        )

    @property
    def reports_logits(self) -> bool:
        """True if logits or logprobs of the output are requested."""
        return self.step_logits is not None or self.request.params.logprobs is not None

    @property
    def needs_prompt_logprobs(self) -> bool:
        """True if prompt logprobs are requested and not complete."""
        requested = self.request.params.prompt_logprobs is not None
        return requested and self.num_missing_prompt_logprobs > 0

    @property
    def num_missing_prompt_logprobs(self) -> int:
        """The number of prompt tokens whose logprobs have not been computed."""
        return len(self.request.prompt) - 1 - len(self.prompt_logprobs)

    @property
    def visible_tokens(self) -> list[int]:
        """The output, without a final stop id unless `include_stop_string` is set."""
        stopped = isinstance(self.stop_reason, int) and not self.request.params.include_stop_string
        return self.new_tokens[:-1] if stopped else self.new_tokens

    def commit(self, tokens: list[int]) -> list[int]:
        """Append `tokens` up to the sequence's limit or the first token that stops the sequence.
        Return the appended tokens. Set `finish_reason` if the sequence ends."""
        before = len(self.tokens)
        for token in tokens[: self.num_remaining]:
            if self.finish_reason is not None:
                break
            self.tokens.append(token)
            self._check_stop(token)
        new = self.tokens[before:]
        if self.controls is not None:
            self.controls.commit(new)
        if self.finish_reason is None and self.num_remaining == 0:
            self.finish_reason = "length"
        if self.finish_reason is not None:
            self.close()
        return new

    def _check_stop(self, token: int) -> None:
        """Finish the sequence if `token` stops the sequence or makes a stop condition fail."""
        stops = token in self.request.eos and not self._ignores_stop_string(token)
        if not stops or self.request.params.include_stop_string:
            for ending in self.stop_conditions:
                try:
                    reason = ending.append_token(token)
                except ControlError as error:
                    self.finish_reason, self.error = "error", error
                    continue  # the other conditions must not miss the token
                if reason is not None:
                    self._stop(reason)
        if stops:
            self._stop(token)

    def _ignores_stop_string(self, token: int) -> bool:
        """Return whether `token`, the sequence's last token, is a stop string that does not stop
        the sequence yet because of min_new_tokens."""
        count = len(self.tokens) - len(self.request.prompt)
        min_new_tokens = self.request.params.min_new_tokens or 0
        return token in self.request.late_eos and count <= min_new_tokens

    def _stop(self, reason: int | str) -> None:
        if self.error is None:
            self.finish_reason, self.stop_reason = "stop", reason

    def roll_back(self, num_tokens: int, num_records: int, num_logprobs: int) -> None:
        """Undo an interrupted step: truncate the tokens, records and logprobs to these lengths. The
        sequence cannot continue, as its controls and stop conditions are not undone."""
        del self.tokens[num_tokens:], self.records[num_records:], self.logprobs[num_logprobs:]
        self.finish_reason = self.stop_reason = self.error = None

    def fail(self, error: RefusedError) -> None:
        """Finish the sequence with an error."""
        self.finish_reason, self.error = "error", error
        self.close()

    def close(self) -> None:
        """Close the stop conditions: the characters that they withheld may still stop the
        sequence."""
        for ending in self.stop_conditions:
            if (reason := ending.close()) is not None:
                self._stop(reason)


class SteadySteps(NamedTuple):
    """Some steps of a sequence, and the tokens and seconds of all these steps together."""

    tokens: int
    seconds: float
    steps: list[StepRecord]


@dataclass(frozen=True, slots=True)
class Completion:
    """One output of a prompt.

    Attributes:
        text: The decoded output; None without a tokenizer.
        tokens: The output's token ids, including a final end-of-sequence token.
        finish_reason: "stop", "length", "interrupted" or "error".
        seed: The sequence's key; `seed=[completion.seed]` generates the same output again.
        stats: Costs and acceptance.
        steps: A record of every step.
        stop_reason: The id, string or criterion that stopped the sequence, or None.
        error: The error's message, if finish_reason is "error".
        logprobs: The logprobs of every token; None if not requested.
        prompt_logprobs: The logprobs of the prompt's tokens after the first; None if not requested.

    Examples:
        >>> import foretoken
        >>> spec = foretoken.load("novels")
        >>> (out,) = spec.generate("The captain looked", max_new_tokens=8, gamma=3)
        >>> out.text, out.finish_reason, out.seed
        (' at the doctor, and the doctor said', 'length', (0, 0))
    """

    text: str | None
    tokens: list[int]
    finish_reason: FinishReason
    seed: tuple[int, int]
    stats: Stats
    steps: list[StepRecord]
    stop_reason: int | str | None = None
    error: str | None = None
    logprobs: list[Logprobs] | None = None
    prompt_logprobs: list[Logprobs] | None = None

    @property
    def steady(self) -> SteadySteps:
        """Tokens, seconds and records of the steps after the first, without the drafter's prefill.

        The first step is left out because it often prefills the end of the prompt; if it is the
        only step, it is included.
        """
        tokens, seconds = len(self.tokens), self.stats.seconds
        if len(self.steps) < 2:
            return SteadySteps(tokens, seconds, self.steps)
        first = len(self.steps[0].new_tokens)
        return SteadySteps(tokens - first, seconds - self.stats.prefill_end_seconds, self.steps[1:])

    def __repr__(self) -> str:
        """Return a summary in one line, without `steps` and most of `stats`."""
        rates = {"alpha": self.stats.alpha, "tokens_per_call": self.stats.tokens_per_call}
        parts = [f", {name}={rate:.2f}" for name, rate in rates.items() if rate is not None]
        name, value = ("tokens", self.tokens) if self.text is None else ("text", self.text)
        return (
            f"Completion({name}={format_value(value)}, {len(self.tokens)} tokens, "
            f"finish_reason={self.finish_reason!r}{''.join(parts)})"
        )


@dataclass(frozen=True, slots=True)
class Piece:
    """New output in a stream. All pieces of a sequence, joined, are its completion.

    Attributes:
        text: The new characters; None without a tokenizer.
        tokens: The new token ids.
        logprobs: The logprobs of these tokens; None if not requested.
        row: The index of the sequence in the stream.

    Examples:
        >>> import foretoken
        >>> spec = foretoken.load("novels")
        >>> pieces = list(spec.stream("The captain looked", max_new_tokens=8, gamma=3))
        >>> sum(len(piece.tokens) for piece in pieces)
        8
    """

    text: str | None
    tokens: list[int]
    logprobs: list[Logprobs] | None = None
    row: int = 0


def compute_stats(seq: SequenceState, runtime: str, draft_runtime: str) -> Stats:
    """Compute a sequence's statistics from its records. `runtime`: the target's backend."""
    records = seq.records
    drafted = sum(r.drafted for r in records)
    accepted = sum(r.accepted for r in records)
    overlaps = [overlap for r in records for overlap in r.overlaps]
    return Stats(
        target_calls=len(records),
        draft_calls=sum(r.draft_calls for r in records),
        drafted=drafted,
        accepted=accepted,
        rounds=len(records),
        alpha=sum(overlaps) / len(overlaps) if overlaps else None,
        accepted_per_drafted=accepted / drafted if drafted else None,
        tokens_per_call=len(seq.new_tokens) / len(records) if records else None,
        seconds=seq.seconds,
        prefill_seconds=seq.prefill_seconds,
        first_seconds=seq.first_seconds,
        runtime=runtime,
        draft_runtime=draft_runtime,
        cached_tokens=seq.cached,
        bias=sum(sum(r.biases) for r in records) / max(1, len(seq.new_tokens)),
        draft_prefill_seconds=seq.draft_prefill_seconds,
        encoder_seconds=seq.encoder_seconds,
        draft_encoder_seconds=seq.draft_encoder_seconds,
        prefill_end_seconds=seq.prefill_end_seconds,
    )


def require_uninterrupted(completions: list[Completion]) -> list[Completion]:
    """Return `completions` unchanged. Raises KeyboardInterrupt if one of them was interrupted: the
    times and tokens of an interrupted completion are incomplete."""
    if any(each.finish_reason == "interrupted" for each in completions):
        raise KeyboardInterrupt
    return completions
