"""Answers from models in this process, through an engine of one row: what was read of a
conversation need not be read again, where the runtime can keep it."""

from __future__ import annotations

from collections.abc import Generator, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from time import perf_counter
from typing import TYPE_CHECKING, Any

from foretoken.cli import answer, prompts
from foretoken.cli.messages import Template
from foretoken.cli.prompts import Line
from foretoken.cli.reply import PLAIN, Part, Prompt, Reply, TextError, Token
from foretoken.errors import InputError
from foretoken.sampling.params import SamplingParams
from foretoken.text import chat
from foretoken.text.decoding import Stream

if TYPE_CHECKING:
    from foretoken.request import StepRecord
    from foretoken.serving.engine import Engine, Event
    from foretoken.speculator import Speculator

UNBOUNDED = 4096  # new tokens of an answer, for a model without a context


@dataclass(frozen=True, slots=True)
class Local:
    """A Speculator and its engine. `template`: what makes prompts of messages; `seed`: of all
    texts."""

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
        from foretoken.speculator import runtime  # late: torch

        return f"{self.spec.target.runtime}, draft {runtime(self.spec.drafter)}"

    @property
    def colours(self) -> bool:
        return True

    def require(self, wishes: Mapping[str, Any]) -> None:
        from foretoken.controls.required import require  # late: torch

        require(SamplingParams(**wishes), self.spec.target, self.spec.tokenizer is not None)

    def parts(
        self, prompt: Prompt, wishes: Mapping[str, Any], number: int, reply: Reply
    ) -> Generator[Part]:
        start = perf_counter()
        ids, spec = self._ids(prompt), self.spec
        room = (
            {} if isinstance(prompt, str) else {"max_new_tokens": spec.target.context or UNBOUNDED}
        )
        params = SamplingParams(**{**room, **wishes})
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
                    yield Part(text, tokens)
                    if event.completion is not None and event.completion.error is not None:
                        raise TextError(event.completion.error)
        finally:
            if reply.finish_reason is None:
                self.engine.abort(id)

    def _ids(self, prompt: Prompt) -> list[int]:
        if isinstance(prompt, str):
            return self.spec.ids(prompts.for_model(Line(prompt), self.spec))
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
) -> Iterator[Local]:
    """A Speculator as a source. `messages`: whether prompts are conversations, each of which begins
    as the last one did; InputError where nothing makes a prompt of them."""
    from foretoken.serving.engine import Engine  # late: torch

    if messages:
        _require_template(spec, template)
    with Engine(spec, 1, prefix_cache=messages, rule=rule, lenience=lenience) as engine:
        yield Local(spec, engine, template, gamma, seed)


def _require_template(spec: Speculator, template: Template) -> None:
    if template.text is None and not getattr(spec.tokenizer, "chat_template", None):
        raise InputError(
            f"{spec.target_name} has no chat template, which makes a prompt of messages; give "
            "--chat-template FILE, or continue plain text: foretoken complete"
        )


def _count(event: Event, reply: Reply) -> None:
    reply.tokens += len(event.tokens)
    reply.finish_reason = event.finish_reason
    for step in event.steps:
        reply.calls += 1
        reply.drafted += step.drafted
        reply.accepted += step.accepted
        reply.overlaps += step.overlaps
        reply.bias += sum(step.biases)


def _tokens(step: StepRecord, stream: Stream | None) -> Iterator[Token]:
    """What a step kept, as it is spelled."""
    for i, token in enumerate(step.kept):
        yield Token(stream.add([token]) if stream else str(token), _fate(step, i))


def _fate(step: StepRecord, i: int) -> str:
    if i < step.accepted:
        return "accepted"
    if not step.drafted:
        return PLAIN
    return "corrected" if step.accepted < step.drafted else "bonus"
