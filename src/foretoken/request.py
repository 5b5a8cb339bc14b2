"""Requests, their rows and their results. Plain data; knows no models."""

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
    """One row's task, in token ids."""

    prompt: list[int]  # what the target continues; for an encoder-decoder its decoder start
    limit: int  # new tokens at most
    key: SequenceKey
    eos: frozenset[int] = frozenset()
    source: list[int] | None = None  # what the encoder reads
    forced: dict[int, int] = field(default_factory=dict[int, int])  # place among new tokens -> id
    params: SamplingParams = SamplingParams()  # with the model's own where the caller left None
    salt: str = ""  # only texts of the same one share what was read
    prediction: tuple[int, ...] = ()  # the new tokens that the caller expects
    media: Media | None = None  # read with the prompt, or by the encoder instead of a source
    late_eos: frozenset[int] = frozenset()  # of eos: stop strings, which min_new_tokens lets pass


class SequenceControls(LogitShaper, Protocol):
    """Controls that shape a row's logits, and follow its text."""

    def commit(self, tokens: list[int]) -> None:
        """The text goes on by these."""
        ...


class OutputPredictor(Protocol):
    """A predictor of a text without a drafter: from its request's prediction, or from earlier parts
    of the text."""

    prior: tuple[float, float]  # as `Costs.prior`

    def predict_next(self, new_tokens: list[int], max_tokens: int) -> list[int]:
        """At most so many tokens that may follow the new tokens `text`."""
        ...


class StopCondition(Protocol):
    """An end of a text other than an id."""

    def append_token(self, token: int) -> str | None:
        """The text goes on by this token: why it ends with it, None where it does not.
        ControlError where that cannot be said."""
        ...

    def close(self) -> str | None:
        """The same where the text ends anyway, for what could not be read before."""
        ...


class StepLogits(NamedTuple):
    """The logits that a step drew its tokens from."""

    raw: Tensor  # [n, V], the target's own
    shaped: Tensor  # [n, V], as the row's controls leave them


class SequenceStatus(Enum):
    """Where a row is on its way."""

    WAITING = auto()  # to join a batch, for the first time or again
    PREFILLING = auto()
    RUNNING = auto()  # all but its last token is in the target's cache
    FINISHED = auto()


@dataclass(slots=True)
class SequenceState:
    """A request on its way: `tokens` is prompt and new tokens; all but the last `num_pending` are
    in the target's cache."""

    request: Request
    tokens: list[int]
    records: list[StepRecord] = field(default_factory=list[StepRecord])
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None  # the id, string or criterion that stopped it
    error: RefusedError | None = None
    controls: SequenceControls | None = None
    stop_conditions: list[StopCondition] = field(default_factory=list[StopCondition])
    logprobs: list[Logprobs] = field(default_factory=list[Logprobs])
    prompt_logprobs: list[Logprobs] = field(default_factory=list[Logprobs])
    step_logits: list[StepLogits] | None = (
        None  # of every step, where somebody asks for it: [] to begin with
    )
    prefill_seconds: float = 0.0
    draft_prefill_seconds: float = 0.0
    encoder_seconds: float = 0.0  # of the target's prefill
    draft_encoder_seconds: float = 0.0  # of the drafter's
    first_seconds: float = 0.0
    prefill_end_seconds: float = 0.0  # until the drafter, too, had read the prompt
    seconds: float = 0.0
    num_pending: int = 1
    in_batch: bool = False
    cached: int = 0  # tokens of the prompt that had been read for other rows
    output_predictor: OutputPredictor | None = None
    drafting_disabled: bool = False  # draft tokens have spoilt its logits: it makes none any more
    last_retry_length: int = (
        0  # its length when its draft's logits were last invalid, and it was read anew
    )
    grade: int = 0  # of its next draft tokens (`drafters.base.Grades`)
    uses_prediction: bool = (
        True  # its predicted output, where that says something, and not its draft
    )
    start_time: float = 0.0  # when it first joined, by `perf_counter`

    @property
    def status(self) -> SequenceStatus:
        """Where the row is on its way."""
        if self.finish_reason is not None:
            return SequenceStatus.FINISHED
        if not self.in_batch:
            return SequenceStatus.WAITING
        return SequenceStatus.RUNNING if self.num_pending == 1 else SequenceStatus.PREFILLING

    def raise_error(self, number: int) -> None:
        """Raise the error that the row failed with; `number`: of the row, for the message."""
        if self.error is not None:
            raise type(self.error)(f"row {number}: {self.error}")

    @classmethod
    def from_request(cls, request: Request) -> SequenceState:
        """A fresh row."""
        expected = PredictedOutput(request.prediction) if request.prediction else None
        return cls(request, list(request.prompt), output_predictor=expected)

    @property
    def new_tokens(self) -> list[int]:
        return self.tokens[len(self.request.prompt) :]

    @property
    def pending_tokens(self) -> list[int]:
        """The tokens that the target has not read."""
        return self.tokens[len(self.tokens) - self.num_pending :]

    @property
    def num_remaining(self) -> int:
        """New tokens still allowed."""
        return self.request.limit - (len(self.tokens) - len(self.request.prompt))

    def predict_tokens(self, max_tokens: int) -> list[int]:
        """At most so many tokens that are predicted to come next."""
        return (
            []
            if self.output_predictor is None
            else self.output_predictor.predict_next(self.new_tokens, max_tokens)
        )

    def find_forced_tokens(self, max_tokens: int) -> list[int]:
        """At most so many tokens that its grammar leaves no choice about."""
        return (
            self.controls.find_forced_tokens([])[:max_tokens]
            if self.controls is not None and max_tokens
            else []
        )

    @property
    def reports_logits(self) -> bool:
        """True where the logits of its tokens are to be reported."""
        return self.step_logits is not None or self.request.params.logprobs is not None

    @property
    def needs_prompt_logprobs(self) -> bool:
        """True where logprobs of its prompt are still to come."""
        wanted = self.request.params.prompt_logprobs is not None
        return wanted and self.num_missing_prompt_logprobs > 0

    @property
    def num_missing_prompt_logprobs(self) -> int:
        """The number of its prompt's tokens that have no logprob yet."""
        return len(self.request.prompt) - 1 - len(self.prompt_logprobs)

    @property
    def visible_tokens(self) -> list[int]:
        """New tokens without the id that stopped the row, unless it is to be included."""
        stopped = isinstance(self.stop_reason, int) and not self.request.params.include_stop_string
        return self.new_tokens[:-1] if stopped else self.new_tokens

    def commit(self, tokens: list[int]) -> list[int]:
        """Append `tokens` up to one that ends the text, or to the limit; returns the appended."""
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
        """End the text where this token ends it."""
        stops = token in self.request.eos and not self._ignores_stop_string(token)
        if not stops or self.request.params.include_stop_string:
            for ending in self.stop_conditions:
                try:
                    reason = ending.append_token(token)
                except ControlError as error:
                    self.finish_reason, self.error = "error", error
                    continue  # the others read it too
                if reason is not None:
                    self._stop(reason)
        if stops:
            self._stop(token)

    def _ignores_stop_string(self, token: int) -> bool:
        """Tell whether the last token is a stop string that min_new_tokens lets pass."""
        count = len(self.tokens) - len(self.request.prompt)
        min_new_tokens = self.request.params.min_new_tokens or 0
        return token in self.request.late_eos and count <= min_new_tokens

    def _stop(self, reason: int | str) -> None:
        if self.error is None:
            self.finish_reason, self.stop_reason = "stop", reason

    def roll_back(self, num_tokens: int, num_records: int, num_logprobs: int) -> None:
        """Undo a step that was broken off: keep so many of each. Nothing can follow, as controls
        and endings have read on."""
        del self.tokens[num_tokens:], self.records[num_records:], self.logprobs[num_logprobs:]
        self.finish_reason = self.stop_reason = self.error = None

    def fail(self, error: RefusedError) -> None:
        """The row ends here; other rows go on."""
        self.finish_reason, self.error = "error", error
        self.close()

    def close(self) -> None:
        """Nothing follows: what could not be read before is final."""
        for ending in self.stop_conditions:
            if (reason := ending.close()) is not None:
                self._stop(reason)


class SteadySteps(NamedTuple):
    """Some steps of a text: the tokens that they made, and their seconds."""

    tokens: int
    seconds: float
    steps: list[StepRecord]


@dataclass(frozen=True, slots=True)
class Completion:
    """The result for one prompt.

    Attributes:
        text: The text that `tokens` add to the prompt's; None without a tokenizer.
        tokens: The new ids, a final end-of-sequence token included.
        finish_reason: "stop", "length", "interrupted" or "error".
        seed: The sequence's key; `seed=[completion.seed]` generates it again alone.
        stats: Costs and acceptance.
        steps: A record of every step.
        stop_reason: The id, string or criterion behind a "stop".
        error: The control that failed behind an "error", and how.
        logprobs: The ones of every new token, where they were asked for.
        prompt_logprobs: The ones of the prompt's tokens but the first, where asked for.

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
        """Tokens, seconds and records after the first step, which also reads the prompt's end, and
        without the drafter's reading of the prompt.

        All of the steps where there is only one.
        """
        tokens, seconds = len(self.tokens), self.stats.seconds
        if len(self.steps) < 2:
            return SteadySteps(tokens, seconds, self.steps)
        first = len(self.steps[0].new_tokens)
        return SteadySteps(tokens - first, seconds - self.stats.prefill_end_seconds, self.steps[1:])

    def __repr__(self) -> str:
        """In a line; `steps` and `stats` have the rest."""
        rates = {"alpha": self.stats.alpha, "tokens_per_call": self.stats.tokens_per_call}
        parts = [f", {name}={rate:.2f}" for name, rate in rates.items() if rate is not None]
        name, value = ("tokens", self.tokens) if self.text is None else ("text", self.text)
        return (
            f"Completion({name}={format_value(value)}, {len(self.tokens)} tokens, "
            f"finish_reason={self.finish_reason!r}{''.join(parts)})"
        )


@dataclass(frozen=True, slots=True)
class Piece:
    """New text of a stream: the pieces of a text concatenate to its completion.

    Attributes:
        text: The text that was added; None without a tokenizer.
        tokens: The ids that were added.
        logprobs: The ones of these tokens, where they were asked for.
        row: The number of the text within the stream.

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
    """Sum up a row's records."""
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
    """Return `completions`. Raises KeyboardInterrupt where one was interrupted: its times and its
    text mean nothing."""
    if any(row.finish_reason == "interrupted" for row in completions):
        raise KeyboardInterrupt
    return completions
