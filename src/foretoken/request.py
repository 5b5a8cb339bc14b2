"""Requests, their rows and their results. Plain data; knows no models."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Literal, NamedTuple, Protocol

from torch import Tensor

from foretoken.errors import ControlError, RefusedError, shown
from foretoken.media.inputs import Media
from foretoken.records import Stats, StepRecord
from foretoken.sampling.draw import Shaping
from foretoken.sampling.keys import RowKey
from foretoken.sampling.logprobs import Logprobs
from foretoken.sampling.params import SamplingParams
from foretoken.text.prediction import Prediction

FinishReason = Literal["stop", "length", "interrupted", "error"]


@dataclass(frozen=True, slots=True)
class Request:
    """One row's task, in token ids."""

    prompt: list[int]  # what the target continues; for an encoder-decoder its decoder start
    limit: int  # new tokens at most
    key: RowKey
    eos: frozenset[int] = frozenset()
    source: list[int] | None = None  # what the encoder reads
    forced: dict[int, int] = field(default_factory=dict[int, int])  # place among new tokens -> id
    params: SamplingParams = SamplingParams()  # with the model's own where the caller left None
    salt: str = ""  # only texts of the same one share what was read
    prediction: tuple[int, ...] = ()  # the new tokens that the caller expects
    media: Media | None = None  # read with the prompt, or by the encoder instead of a source
    late_eos: frozenset[int] = frozenset()  # of eos: stop strings, which min_new_tokens lets pass


class RowControls(Shaping, Protocol):
    """Controls that shape a row's logits, and follow its text."""

    def commit(self, tokens: list[int]) -> None:
        """The text goes on by these."""
        ...


class TextPrediction(Protocol):
    """A predictor of a text without a drafter: from its request's prediction, or from earlier parts
    of the text."""

    prior: tuple[float, float]  # as `Costs.prior`

    def after(self, text: list[int], most: int) -> list[int]:
        """At most so many tokens that may follow the new tokens `text`."""
        ...


class Ending(Protocol):
    """An end of a text other than an id."""

    def read(self, token: int) -> str | None:
        """The text goes on by this token: why it ends with it, None where it does not.
        ControlError where that cannot be said."""
        ...

    def close(self) -> str | None:
        """The same where the text ends anyway, for what could not be read before."""
        ...


class Seen(NamedTuple):
    """The logits that a step drew its tokens from."""

    raw: Tensor  # [n, V], the target's own
    shaped: Tensor  # [n, V], as the row's controls leave them


class RowState(Enum):
    """Where a row is on its way."""

    WAITING = auto()  # to join a batch, for the first time or again
    PREFILLING = auto()
    RUNNING = auto()  # all but its last token is in the target's cache
    FINISHED = auto()


@dataclass(slots=True)
class Row:
    """A request on its way: `tokens` is prompt and new tokens; all but the last `pending` are in
    the target's cache."""

    request: Request
    tokens: list[int]
    records: list[StepRecord] = field(default_factory=list[StepRecord])
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None  # the id, string or criterion that stopped it
    error: RefusedError | None = None
    controls: RowControls | None = None
    endings: list[Ending] = field(default_factory=list[Ending])
    logprobs: list[Logprobs] = field(default_factory=list[Logprobs])
    prompt_logprobs: list[Logprobs] = field(default_factory=list[Logprobs])
    seen: list[Seen] | None = None  # of every step, where somebody asks for it: [] to begin with
    prefill_seconds: float = 0.0
    draft_prefill_seconds: float = 0.0
    encoder_seconds: float = 0.0  # of the target's prefill
    draft_encoder_seconds: float = 0.0  # of the drafter's
    first_seconds: float = 0.0
    read_seconds: float = 0.0  # until the drafter, too, had read the prompt
    seconds: float = 0.0
    pending: int = 1
    in_batch: bool = False
    cached: int = 0  # tokens of the prompt that had been read for other rows
    predicted_output: TextPrediction | None = None
    plain: bool = False  # draft tokens have spoilt its logits: it makes none any more
    doubted: int = 0  # its length when its draft's logits were last invalid, and it was read anew
    grade: int = 0  # of its next draft tokens (`drafters.base.Grades`)
    trusts: bool = True  # its predicted output, where that says something, and not its draft
    began: float = 0.0  # when it first joined, by `perf_counter`

    @property
    def state(self) -> RowState:
        """Where the row is on its way."""
        if self.finish_reason is not None:
            return RowState.FINISHED
        if not self.in_batch:
            return RowState.WAITING
        return RowState.RUNNING if self.pending == 1 else RowState.PREFILLING

    def require(self, number: int) -> None:
        """Raise the error that the row failed with; `number`: of the row, for the message."""
        if self.error is not None:
            raise type(self.error)(f"row {number}: {self.error}")

    @classmethod
    def of(cls, request: Request) -> Row:
        """A fresh row."""
        expected = Prediction(request.prediction) if request.prediction else None
        return cls(request, list(request.prompt), predicted_output=expected)

    @property
    def new_tokens(self) -> list[int]:
        return self.tokens[len(self.request.prompt) :]

    @property
    def unread(self) -> list[int]:
        """The tokens that the target has not read."""
        return self.tokens[len(self.tokens) - self.pending :]

    @property
    def room(self) -> int:
        """New tokens still allowed."""
        return self.request.limit - (len(self.tokens) - len(self.request.prompt))

    def predicted(self, most: int) -> list[int]:
        """At most so many tokens that are predicted to come next."""
        return (
            []
            if self.predicted_output is None
            else self.predicted_output.after(self.new_tokens, most)
        )

    def forced(self, most: int) -> list[int]:
        """At most so many tokens that its grammar leaves no choice about."""
        return self.controls.forced([])[:most] if self.controls is not None and most else []

    @property
    def reports(self) -> bool:
        """True where the logits of its tokens are to be reported."""
        return self.seen is not None or self.request.params.logprobs is not None

    @property
    def telling(self) -> bool:
        """True where logprobs of its prompt are still to come."""
        wanted = self.request.params.prompt_logprobs is not None
        return wanted and self.untold > 0

    @property
    def untold(self) -> int:
        """The number of its prompt's tokens that have no logprob yet."""
        return len(self.request.prompt) - 1 - len(self.prompt_logprobs)

    @property
    def visible(self) -> list[int]:
        """New tokens without the id that stopped the row, unless it is to be included."""
        stopped = isinstance(self.stop_reason, int) and not self.request.params.include_stop_string
        return self.new_tokens[:-1] if stopped else self.new_tokens

    def commit(self, tokens: list[int]) -> list[int]:
        """Append `tokens` up to one that ends the text, or to the limit; returns the appended."""
        before = len(self.tokens)
        for token in tokens[: self.room]:
            if self.finish_reason is not None:
                break
            self.tokens.append(token)
            self._read(token)
        new = self.tokens[before:]
        if self.controls is not None:
            self.controls.commit(new)
        if self.finish_reason is None and self.room == 0:
            self.finish_reason = "length"
        if self.finish_reason is not None:
            self.close()
        return new

    def _read(self, token: int) -> None:
        """End the text where this token ends it."""
        stops = token in self.request.eos and not self._passes(token)
        if not stops or self.request.params.include_stop_string:
            for ending in self.endings:
                try:
                    reason = ending.read(token)
                except ControlError as error:
                    self.finish_reason, self.error = "error", error
                    continue  # the others read it too
                if reason is not None:
                    self._stop(reason)
        if stops:
            self._stop(token)

    def _passes(self, token: int) -> bool:
        """Tell whether the last token is a stop string that min_new_tokens lets pass."""
        count = len(self.tokens) - len(self.request.prompt)
        least = self.request.params.min_new_tokens or 0
        return token in self.request.late_eos and count <= least

    def _stop(self, reason: int | str) -> None:
        if self.error is None:
            self.finish_reason, self.stop_reason = "stop", reason

    def take_back(self, tokens: int, records: int, logprobs: int) -> None:
        """Undo a step that was broken off: keep so many of each. Nothing can follow, as controls
        and endings have read on."""
        del self.tokens[tokens:], self.records[records:], self.logprobs[logprobs:]
        self.finish_reason = self.stop_reason = self.error = None

    def fail(self, error: RefusedError) -> None:
        """The row ends here; other rows go on."""
        self.finish_reason, self.error = "error", error
        self.close()

    def close(self) -> None:
        """Nothing follows: what could not be read before is final."""
        for ending in self.endings:
            if (reason := ending.close()) is not None:
                self._stop(reason)


class Steady(NamedTuple):
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
    def steady(self) -> Steady:
        """Tokens, seconds and records after the first step, which also reads the prompt's end, and
        without the drafter's reading of the prompt.

        All of the steps where there is only one.
        """
        tokens, seconds = len(self.tokens), self.stats.seconds
        if len(self.steps) < 2:
            return Steady(tokens, seconds, self.steps)
        first = len(self.steps[0].kept)
        return Steady(tokens - first, seconds - self.stats.read_seconds, self.steps[1:])

    def __repr__(self) -> str:
        """In a line; `steps` and `stats` have the rest."""
        rates = {"alpha": self.stats.alpha, "tokens_per_call": self.stats.tokens_per_call}
        parts = [f", {name}={rate:.2f}" for name, rate in rates.items() if rate is not None]
        name, value = ("tokens", self.tokens) if self.text is None else ("text", self.text)
        return (
            f"Completion({name}={shown(value)}, {len(self.tokens)} tokens, "
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


def stats(row: Row, runtime: str, draft_runtime: str) -> Stats:
    """Sum up a row's records."""
    records = row.records
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
        tokens_per_call=len(row.new_tokens) / len(records) if records else None,
        seconds=row.seconds,
        prefill_seconds=row.prefill_seconds,
        first_seconds=row.first_seconds,
        runtime=runtime,
        draft_runtime=draft_runtime,
        cached_tokens=row.cached,
        bias=sum(sum(r.biases) for r in records) / max(1, len(row.new_tokens)),
        draft_prefill_seconds=row.draft_prefill_seconds,
        encoder_seconds=row.encoder_seconds,
        draft_encoder_seconds=row.draft_encoder_seconds,
        read_seconds=row.read_seconds,
    )


def uninterrupted(rows: list[Completion]) -> list[Completion]:
    """Return `rows`. Raises KeyboardInterrupt where one was interrupted: its times and its text
    mean nothing."""
    if any(row.finish_reason == "interrupted" for row in rows):
        raise KeyboardInterrupt
    return rows
