"""Answers for `foretoken chat` by a model in this process, in an engine of one row, which keeps the
prefix of a conversation where the backend can. Imported late: it imports torch.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from foretoken.cli import completion_output
from foretoken.cli.option import DEFAULT_ANSWER_TOKENS
from foretoken.cli.prompts import ChatTemplate, PromptLine
from foretoken.cli.reply import ChatPrompt, ChatReply, ReplyError, ReplyPart, ReplyToken
from foretoken.controls.custom import require_supported_params
from foretoken.engine.engine import Engine
from foretoken.errors import InputError, base_name
from foretoken.loading.target import TargetInfo
from foretoken.records import StepRecord
from foretoken.sampling.params import SamplingParams
from foretoken.speculator import Speculator
from foretoken.text.decoding import IncrementalDetokenizer


@dataclass(frozen=True, slots=True)
class LocalModel:
    """A Speculator and its engine. `template` makes prompts of messages; all texts share `seed`."""

    spec: Speculator
    engine: Engine
    template: ChatTemplate
    gamma: int | None
    seed: int

    @property
    def name(self) -> str:
        return ", ".join(map(base_name, (self.spec.target_name, self.spec.draft_name)))

    def get_default_options(self, *, messages: bool) -> dict[str, Any]:
        """Return the options of texts for which none are given: of answers the sampling that the
        model's generation config asks for, and a limit."""
        return {**self.spec.suggested, "max_new_tokens": DEFAULT_ANSWER_TOKENS} if messages else {}

    def get_plain_seconds(self, options: Mapping[str, Any]) -> float | None:
        """Return what a token takes by plain decoding, after a short prompt; None if it has not
        been measured. `options`: all of them, defaults included."""
        costs = self.gamma is None and self.spec.costing.find_nearest(SamplingParams(**options))
        return costs[0].step_seconds(0) if costs else None

    def require(self, options: Mapping[str, Any]) -> None:
        """Raise InputError or RefusedError for options that the model cannot honour."""
        require_supported_params(
            SamplingParams(**options), self.spec.target, self.spec.tokenizer is not None
        )

    def stream_reply(
        self, prompt: ChatPrompt, options: Mapping[str, Any], number: int, reply: ChatReply
    ) -> Generator[ReplyPart]:
        """Answer a prompt part by part, counting in `reply`; closing it early drops the text.

        number: prompts before this one. Raises TextError if the text fails.
        """
        spec, messages = self.spec, not isinstance(prompt, str)
        line = PromptLine(prompt) if isinstance(prompt, str) else PromptLine("", messages=[*prompt])
        ids = spec.inputs.ids(self.template.make_prompt(line, spec))
        params = SamplingParams(**{**self.get_default_options(messages=messages), **options})
        if not messages:
            spec.warn_about_suggested([params])
        context_ids = [] if spec.target.encoder_decoder else ids
        stream = IncrementalDetokenizer(spec.tokenizer, context_ids) if spec.tokenizer else None
        id = self.engine.add(ids, params, gamma=self.gamma, seed=(self.seed, number))
        try:
            while reply.finish_reason is None:
                for event in self.engine.step():
                    text = completion_output.format_piece(event.text, event.tokens, reply.tokens)
                    reply.tokens += len(event.tokens)
                    reply.finish_reason = event.finish_reason
                    reply.num_forwards += len(event.steps)
                    reply.overlaps += [each for step in event.steps for each in step.overlaps]
                    reply.bias += sum(each for step in event.steps for each in step.biases)
                    tokens = [
                        token for step in event.steps for token in _spell_tokens(step, stream)
                    ]
                    yield ReplyPart(text, tokens)
                    if event.completion is not None and event.completion.error is not None:
                        raise ReplyError(event.completion.error)
        finally:
            if reply.finish_reason is None:
                self.engine.abort(id)


def require_template(template: ChatTemplate, target: TargetInfo) -> None:
    """Raise InputError for a target and a template that make no prompts of messages."""
    problem = f"{base_name(target.name)} has no"
    if target.tokenizer is None:
        raise InputError(
            f"{problem} tokenizer, so it reads ids alone; give --tokenizer, a folder or hub id"
        )
    if template.text is None and not getattr(target.tokenizer, "chat_template", None):
        raise InputError(
            f"{problem} chat template, which makes a prompt of messages; give --chat-template "
            "FILE, or continue plain text: foretoken chat --raw; or talk with a chat model: "
            "foretoken chat smollm2"
        )


@contextmanager
def open_local_model(
    spec: Speculator,
    template: ChatTemplate,
    *,
    messages: bool,
    gamma: int | None,
    seed: int,
    rule: str,
    lenience: float,
) -> Iterator[LocalModel]:
    """Open a Speculator as a source.

    messages: prompts are conversations, each beginning as the last one did.
    """
    with Engine(spec, 1, prefix_cache=messages, rule=rule, lenience=lenience) as engine:
        yield LocalModel(spec, engine, template, gamma, seed)


def _spell_tokens(step: StepRecord, stream: IncrementalDetokenizer | None) -> Iterator[ReplyToken]:
    """Spell the tokens that a step committed."""
    own_fate = "corrected" if step.drafted else "plain"
    for i, token in enumerate(step.new_tokens):
        spelled = stream.add([token]) if stream else str(token)
        yield ReplyToken(spelled, "accepted" if i < step.accepted else own_fate)
