"""Convert the engine's events, and the errors of requests, to messages for the HTTP process."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from itertools import repeat

from foretoken.engine.engine import Event
from foretoken.errors import BusyError, ControlError, ForetokenError, InputError, to_one_line
from foretoken.request import Completion
from foretoken.sampling.logprobs import Logprobs
from foretoken.server.process.messages import (
    Done,
    Refusal,
    RefusalKind,
    StepOutput,
    TokenLogprob,
)
from foretoken.server.process.preparation import EngineRequest, TooLongError
from foretoken.text.decoding import TokenSpelling

MIN_LOGPROB = -9999.0  # for tokens of probability 0, as in OpenAI's API: JSON has no -inf
REFUSAL_KIND_BY_ERROR: list[tuple[type[Exception], RefusalKind]] = [  # the first match is used
    (TooLongError, "length"),
    (BusyError, "busy"),
    (InputError, "input"),
    (ForetokenError, "refused"),
]
log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class OutputConverter:
    """Converts the engine's events to messages. `spelling`: the text of the model's tokens; `eos`:
    the ids of the model's EOS tokens."""

    spelling: TokenSpelling
    eos: frozenset[int]

    def convert(self, event: Event, request: EngineRequest) -> StepOutput | Refusal:
        """Return the message that reports an event of `request`; a Refusal if the event is an
        error."""
        if event.error is not None:
            kind = "refused" if isinstance(event.error, ControlError) else "failed"
            return Refusal(event.id, kind, to_one_line(event.error), event.error.option)
        token_texts = None
        if request.show_steps:
            tokens = (
                token for step in event.steps for token in (*step.new_tokens, *step.draft_tokens)
            )
            token_texts = {token: self.spelling.to_text(token) for token in tokens}
        echoed = len(request.accepted.echo)
        offsets = [echoed + piece.offset for piece in event.pieces]
        return StepOutput(
            event.id,
            [piece.text for piece in event.pieces] or [""] * len(event.tokens),
            event.tokens,
            self._convert_logprobs(event.logprobs, offsets),
            event.steps,
            None if event.completion is None else self._build_done(event.completion, request),
            token_texts,
        )

    def _build_done(self, completion: Completion, request: EngineRequest) -> Done:
        stop = completion.stop_reason
        return Done(
            completion.finish_reason,
            None if stop in self.eos else stop,  # as in vLLM, an EOS token is not a stop_reason
            completion.stats,
            self._convert_logprobs(completion.prompt_logprobs, request.offsets[1:]),
        )

    def _convert_logprobs(
        self, logprobs: list[Logprobs] | None, offsets: list[int]
    ) -> list[TokenLogprob] | None:
        """Convert the logprobs of tokens; None remains None. `offsets`: the offset of each token in
        characters, or [] if offsets are not reported."""
        if logprobs is None:
            return None
        word = self.spelling.spell

        def convert(each: Logprobs, offset: int) -> TokenLogprob:
            top = [(*word(token), max(MIN_LOGPROB, logprob), token) for token, logprob in each.top]
            own = (*word(each.token), max(MIN_LOGPROB, each.logprob))
            return TokenLogprob(*own, top, each.token, each.rank, offset)

        return [convert(*pair) for pair in zip(logprobs, offsets or repeat(0), strict=False)]


def to_refusal(id: int, error: Exception) -> Refusal:
    """Return the Refusal of a request that failed with `error`. Log the error if it is a bug, that
    is, not a ForetokenError."""
    kind = _classify(error)
    busy = "the queue is full; send the request again later"
    message = busy if kind == "busy" else to_one_line(error)
    return Refusal(id, kind, message, getattr(error, "option", None))


def _classify(error: Exception) -> RefusalKind:
    for each, kind in REFUSAL_KIND_BY_ERROR:
        if isinstance(error, each):
            return kind
    log.error("a request failed", exc_info=error)
    return "failed"
