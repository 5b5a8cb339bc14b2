"""Sources of answers for `foretoken chat`: the protocol, and a model in this process.

A local model runs in an engine of one row, which keeps the prefix of a conversation where the
backend can. Knows nothing of terminals, and nothing of servers (`remote`).
"""

from __future__ import annotations

from collections.abc import Generator, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from time import perf_counter
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from foretoken.cli import answer, prompts
from foretoken.cli.messages import Template
from foretoken.cli.prompts import Line
from foretoken.errors import ForetokenError, InputError
from foretoken.sampling.params import SamplingParams
from foretoken.text import chat
from foretoken.text.decoding import Stream

if TYPE_CHECKING:
    from foretoken.records import StepRecord
    from foretoken.serving.engine import Engine, Event
    from foretoken.speculator import Speculator

PLAIN = "plain"  # no draft token stood at this place
UNBOUNDED = 4096  # new tokens of an answer, for a model without a context limit

Prompt = str | list[dict[str, Any]]  # text to continue, or messages


class TextError(ForetokenError):
    """One text failed; the next may not."""


class ReplyToken(NamedTuple):
    """A token as it is spelled after those before it, and the fate of its draft token."""

    text: str
    fate: str  # accepted, corrected, bonus, plain


class ReplyPart(NamedTuple):
    """New text of a reply, and the tokens of the steps since the last part.

    Tokens may be ahead of the text, some of which is held back for a stop string.
    """

    text: str
    tokens: list[ReplyToken]


@dataclass(slots=True)
class ChatReply:
    """A reply so far: its text and counts of its steps."""

    text: str = ""
    tokens: int = 0
    calls: int = 0  # target forwards; 0 where the source does not say
    drafted: int = 0
    accepted: int = 0
    overlaps: list[float] = field(default_factory=list[float])
    bias: float = 0.0  # summed over the tokens
    seconds: float = 0.0
    finish_reason: str | None = None  # None: broken off


class ChatSource(Protocol):
    """A model in this process, or one of a server."""

    @property
    def name(self) -> str:
        """Name of the target, and of the draft."""
        ...

    @property
    def runtime(self) -> str:
        """Backend of both; "" where the source does not say."""
        ...

    @property
    def colours(self) -> bool:
        """True if the source reports the fate of each draft token."""
        ...

    def require(self, options: Mapping[str, Any]) -> None:
        """Raise InputError or RefusedError for options that the source cannot honour."""
        ...

    def parts(
        self, prompt: Prompt, options: Mapping[str, Any], number: int, reply: ChatReply
    ) -> Generator[ReplyPart]:
        """Answer a prompt part by part, counting in `reply`; closing it early drops the text.

        number: prompts before this one. Raises TextError if the text fails.
        """
        ...


@dataclass(frozen=True, slots=True)
class LocalModel:
    """A Speculator and its engine. `template` makes prompts of messages; all texts share `seed`."""

    spec: Speculator
    engine: Engine
    template: Template
    gamma: int | None
    seed: int

    @property
    def name(self) -> str:
        return f"{self.spec.target_name}, {self.spec.draft_name}"

    @property
    def runtime(self) -> str:
        return f"{self.spec.target.runtime}, draft {self.spec.drafter.runtime}"

    @property
    def colours(self) -> bool:
        return True

    def require(self, options: Mapping[str, Any]) -> None:
        from foretoken.controls.own import require  # late: torch

        require(SamplingParams(**options), self.spec.target, self.spec.tokenizer is not None)

    def parts(
        self, prompt: Prompt, options: Mapping[str, Any], number: int, reply: ChatReply
    ) -> Generator[ReplyPart]:
        start = perf_counter()
        ids, spec = self._ids(prompt), self.spec
        room = (
            {} if isinstance(prompt, str) else {"max_new_tokens": spec.target.context or UNBOUNDED}
        )
        params = SamplingParams(**{**room, **options})
        spec.tell_suggested([params])
        behind = [] if spec.target.encoder_decoder else ids
        stream = Stream(spec.tokenizer, behind) if spec.tokenizer else None
        id = self.engine.add(ids, params, gamma=self.gamma, seed=(self.seed, number))
        try:
            while reply.finish_reason is None:
                for event in self.engine.step():
                    text = answer.piece(event.text, event.tokens, reply.tokens)
                    tokens = [token for step in event.steps for token in _tokens(step, stream)]
                    _count(event, reply)
                    reply.seconds = perf_counter() - start
                    yield ReplyPart(text, tokens)
                    if event.completion is not None and event.completion.error is not None:
                        raise TextError(event.completion.error)
        finally:
            if reply.finish_reason is None:
                self.engine.abort(id)

    def _ids(self, prompt: Prompt) -> list[int]:
        if isinstance(prompt, str):
            return self.spec.inputs.ids(prompts.for_model(Line(prompt), self.spec))
        return chat.ids(prompt, self.spec.tokenizer, *self.template)


@contextmanager
def local(
    spec: Speculator,
    template: Template,
    *,
    messages: bool,
    gamma: int | None,
    seed: int,
    rule: str,
    lenience: float,
) -> Iterator[LocalModel]:
    """Open a Speculator as a source.

    messages: prompts are conversations, each beginning as the last one did. Raises InputError
    where no template makes a prompt of them.
    """
    from foretoken.serving.engine import Engine  # late: torch

    if messages:
        _require_template(spec, template)
    with Engine(spec, 1, prefix_cache=messages, rule=rule, lenience=lenience) as engine:
        yield LocalModel(spec, engine, template, gamma, seed)


def _require_template(spec: Speculator, template: Template) -> None:
    if template.text is None and not getattr(spec.tokenizer, "chat_template", None):
        raise InputError(
            f"{spec.target_name} has no chat template, which makes a prompt of messages; give "
            "--chat-template FILE, or continue plain text: foretoken chat --raw"
        )


def _count(event: Event, reply: ChatReply) -> None:
    reply.tokens += len(event.tokens)
    reply.finish_reason = event.finish_reason
    for step in event.steps:
        reply.calls += 1
        reply.drafted += step.drafted
        reply.accepted += step.accepted
        reply.overlaps += step.overlaps
        reply.bias += sum(step.biases)


def _tokens(step: StepRecord, stream: Stream | None) -> Iterator[ReplyToken]:
    """Spell the tokens that a step committed."""
    for i, token in enumerate(step.kept):
        yield ReplyToken(stream.add([token]) if stream else str(token), _fate(step, i))


def _fate(step: StepRecord, i: int) -> str:
    if i < step.accepted:
        return "accepted"
    if not step.drafted:
        return PLAIN
    return "corrected" if step.accepted < step.drafted else "bonus"
