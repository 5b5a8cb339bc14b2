"""Answer queries that need no step of the engine: tokenization, costs of speculation, and a
description of the models."""

from __future__ import annotations

import logging
import os
import pickle
from dataclasses import dataclass
from typing import Any

from foretoken.engine.engine import Engine
from foretoken.errors import InputError, get_base_name, name_option_in_errors
from foretoken.server.process.messages import ModelInfo, Prompt
from foretoken.server.process.preparation import PromptEncoder, get_ids
from foretoken.server.process.replies import ReplyPreparer
from foretoken.speculator import Speculator
from foretoken.speech.transcription import can_transcribe
from foretoken.text.chat import get_media_kinds
from foretoken.text.decoding import TokenSpelling, decode
from foretoken.theory import steps_factor

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Queries:
    """Answers queries about one Speculator. Each public method answers the `Ask` messages whose
    `name` is the method's name."""

    spec: Speculator
    prompts: PromptEncoder
    replies: ReplyPreparer
    spelling: TokenSpelling

    def tokenize(
        self,
        prompt: Prompt,
        template: str | None,
        chat_template_kwargs: dict[str, Any] | None,
        *,
        texts: bool,
    ) -> dict[str, Any]:
        """Return {"tokens": ids} of a prompt; with `texts` also "token_strs", the text of each
        token. Raises InputError if the prompt is invalid."""
        if (chat_template_kwargs or {}).get("tools") and not self.replies.offers_tools:
            problem = "the chat template supports no tools (in chats, a system message lists them)"
            raise InputError(f"{problem}; leave out tools").with_option("tools")
        with name_option_in_errors("prompt"):
            ids = get_ids(self.prompts.encode(prompt, template, chat_template_kwargs))
        return {"tokens": ids} | ({"token_strs": [*map(self.spelling.name, ids)]} if texts else {})

    def detokenize(self, tokens: list[int]) -> str:
        """Return the text of token ids. Raises InputError if an id is invalid or the model has no
        tokenizer."""
        with name_option_in_errors("tokens"):
            ids = self.spec.inputs.encode_prompt(tokens)
        if self.spec.tokenizer is None:
            raise InputError("the model has no tokenizer to decode ids; decode the ids yourself")
        return decode(self.spec.tokenizer, ids)

    def speculation(self, alpha: float | None, made: dict[int, int]) -> dict[str, Any]:
        """Return the costs c and v of steps at batch size 1, for the sampling params measured last,
        and the speed-up predicted from these costs. Values are None if unknown.

        Args:
            alpha: Acceptance rate measured so far; None: unknown.
            made: Number of draft tokens in a step -> number of such steps.
        """
        costs = self.spec.costing.find_single_costs()
        if costs is None:
            return {"c": None, "v": None, "predicted_speedup": None}
        predicted = None
        if alpha is not None and any(made.values()):
            predicted = steps_factor(min(1.0, alpha), made, costs.c, v=costs.v)
        table = [(n, costs.v(n)) for n, _ in costs.score]
        return {"c": costs.c, "v": table, "predicted_speedup": predicted}


def describe_models(spec: Speculator, engine: Engine, replies: ReplyPreparer) -> ModelInfo:
    """Return the description of an engine's models for the HTTP process."""
    tokenizer, drafts = spec.tokenizer, spec.costing.drafts
    return ModelInfo(
        target=get_base_name(spec.target_name),
        draft=get_base_name(spec.draft_name) if drafts else None,
        context=engine.max_length,
        vocab_size=spec.target.vocab_size,
        chat=bool(getattr(tokenizer, "chat_template", None)),
        text=tokenizer is not None,
        runtime=spec.target.runtime,
        draft_runtime=spec.drafter.runtime if drafts else None,
        dtype=spec.target.compute_dtype,
        replies=replies.facts,
        media=_media_kinds(spec),
        transcribes=can_transcribe(spec),
        suggested={name: spec.suggested.get(name) for name in ("temperature", "top_p", "top_k")},
        max_rows=engine.max_rows,
        pid=os.getpid(),
        costs=pickle.dumps(spec.costing.measured),
    )


def _media_kinds(spec: Speculator) -> tuple[str, ...]:
    if spec.processor is None or not spec.target.capabilities.media:
        return ()
    try:
        return get_media_kinds(spec.processor())
    except InputError as error:  # a library that the processor needs is not installed
        log.warning("images and audio are not supported: %s", error)
        return ()
