"""Generates the replies of `foretoken chat` with a model in this process. The engine has batch size
1 and, if the backend supports it, a prefix cache. Import this module late: it imports torch."""

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
from foretoken.errors import InputError, get_base_name
from foretoken.loading.target import TargetInfo
from foretoken.records import StepRecord
from foretoken.sampling.params import SamplingParams
from foretoken.speculator import Speculator
from foretoken.text.decoding import IncrementalDetokenizer


@dataclass(frozen=True, slots=True)
class LocalModel:
    """Source of chat replies: a Speculator and its engine. `template` renders messages; the random
    key of a reply is (`seed`, number of earlier prompts)."""

    spec: Speculator
    engine: Engine
    template: ChatTemplate
    gamma: int | None
    seed: int

    @property
    def name(self) -> str:
        return ", ".join(map(get_base_name, (self.spec.target_name, self.spec.draft_name)))

    def get_default_options(self, *, messages: bool) -> dict[str, Any]:
        """Return the default sampling options of a reply: in a conversation (`messages`), the
        model's generation config and a limit of new tokens; for plain text, none."""
        return {**self.spec.suggested, "max_new_tokens": DEFAULT_ANSWER_TOKENS} if messages else {}

    def get_plain_seconds(self, options: Mapping[str, Any]) -> float | None:
        """Return the seconds per token of plain decoding after a short prompt, as measured for the
        closest sampling params; None if they were not measured. `options`: all options of the
        reply, defaults included."""
        costs = self.gamma is None and self.spec.costing.find_nearest(SamplingParams(**options))
        return costs[0].step_seconds(0) if costs else None

    def require(self, options: Mapping[str, Any]) -> None:
        """Raise InputError or RefusedError for sampling options that the model does not support."""
        require_supported_params(
            SamplingParams(**options), self.spec.target, self.spec.tokenizer is not None
        )

    def stream_reply(
        self, prompt: ChatPrompt, options: Mapping[str, Any], number: int, reply: ChatReply
    ) -> Generator[ReplyPart]:
        """Yield the reply to a prompt in parts as it is generated, and update the counts in
        `reply`. Closing the generator aborts the request.

        `number`: the number of earlier prompts in the session, for the random key. Raises
        ReplyError if generation fails.
        """
        spec, messages = self.spec, not isinstance(prompt, str)
        line = PromptLine(prompt) if isinstance(prompt, str) else PromptLine("", messages=[*prompt])
        ids = spec.inputs.encode_prompt(self.template.make_prompt(line, spec))
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
    """Raise InputError if the target has no tokenizer, or if neither the user nor the target
    provides a chat template."""
    problem = f"{get_base_name(target.name)} has no"
    if target.tokenizer is None:
        raise InputError(
            f"{problem} tokenizer, so it takes token ids only; give --tokenizer, a folder or hub id"
        )
    if template.text is None and not getattr(target.tokenizer, "chat_template", None):
        raise InputError(
            f"{problem} chat template to make a prompt from messages; give --chat-template "
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
    """Create an engine, yield a LocalModel that uses the engine, and close the engine at the end.

    `messages`: whether prompts are conversations; if so, earlier turns stay in a prefix cache.
    """
    with Engine(spec, 1, prefix_cache=messages, rule=rule, lenience=lenience) as engine:
        yield LocalModel(spec, engine, template, gamma, seed)


def _spell_tokens(step: StepRecord, stream: IncrementalDetokenizer | None) -> Iterator[ReplyToken]:
    """Yield the tokens that a step committed, each with its text and its source: an accepted draft
    token, or the target's own token."""
    own_fate = "corrected" if step.drafted else "plain"
    for i, token in enumerate(step.new_tokens):
        spelled = stream.add([token]) if stream else str(token)
        yield ReplyToken(spelled, "accepted" if i < step.accepted else own_fate)
