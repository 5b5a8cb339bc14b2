"""Requests of clients as arguments of `Engine.add`: prompts are encoded, grammars compiled, limits
checked."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from foretoken.controls.grammar import objection
from foretoken.errors import InputError, about
from foretoken.sampling.checks import as_structured
from foretoken.sampling.params import Controls
from foretoken.server.process.grammar_sandbox import GrammarSandbox
from foretoken.server.process.messages import Accepted, GenerateRequest, TokenLogprob
from foretoken.server.process.prompts import PromptReader, ids_of
from foretoken.server.process.replies import Replies
from foretoken.speculator import Speculator
from foretoken.text.decoding import Spelling, count_offsets, decode


@dataclass(slots=True)
class EngineRequest:
    """A request that the engine has, and how its outputs are reported."""

    accepted: Accepted
    show_steps: bool
    offsets: list[int]  # of the prompt's tokens, if it is echoed
    accepted_sent: bool = False


@dataclass(frozen=True, slots=True)
class RequestPreparer:
    """Preparation of requests to one target."""

    spec: Speculator
    prompts: PromptReader
    replies: Replies
    spelling: Spelling
    sandbox: GrammarSandbox

    def prepare(self, id: int, request: GenerateRequest) -> tuple[EngineRequest, dict[str, Any]]:
        """Return a request as the worker tracks it, and its arguments of `Engine.add`. Raises
        ForetokenError."""
        with about("prompt"):
            messages, variables = self.replies.messages(request), self.replies.variables(request)
            prompt = self.prompts.encode(messages, request.chat_template, variables)
        ids, asked = ids_of(prompt), request.controls.get("max_new_tokens")
        limit = self.prompts.limit_new_tokens(len(ids), asked, request.default_new_tokens)
        prediction = None
        if request.prediction is not None:
            with about("prediction"):
                prediction = self.prompts.encode_prediction(request.prediction)
        accepted, offsets = self._accept(id, request, ids)
        return EngineRequest(accepted, request.show_steps, offsets), {
            "prompt": prompt,
            "id": id,
            "prediction": prediction,
            **{name: getattr(request, name) for name in SAME},
            **self._controls(request, accepted.tail),
            "max_new_tokens": limit,
        }

    def _accept(
        self, id: int, request: GenerateRequest, ids: list[int]
    ) -> tuple[Accepted, list[int]]:
        """Return the acceptance of a request, and its prompt's offsets in the echo."""
        tail = "" if request.wish is None else self.replies.tail(ids)
        reported_ids = ids if request.return_prompt_ids else None
        if not request.echo:
            return Accepted(id, len(ids), tail=tail, prompt_ids=reported_ids), []
        prompt, tokenizer = request.prompt, self.spec.tokenizer
        if tokenizer is None:
            raise InputError("echo needs a tokenizer, and the model has none; leave it out")
        if not isinstance(prompt, str):
            prompt = decode(tokenizer, ids)
        logprobs = request.controls.get("prompt_logprobs") is not None
        offsets = count_offsets(tokenizer, ids, prompt) if logprobs else []
        first = TokenLogprob(*self.spelling.word(ids[0]), 0.0, [], ids[0], 1, 0)
        return Accepted(id, len(ids), prompt, (first,), tail, reported_ids), offsets

    def _controls(self, request: GenerateRequest, tail: str) -> Controls:
        """Return the request's controls and those of its reply, once its grammar has compiled."""
        controls = request.controls
        if request.wish is not None:
            controls = controls | self.replies.controls(request, tail)
        if request.bad_words:
            with about("bad_words"):
                controls = controls | self._ban(request.bad_words)
        if structure := controls.get("structured"):
            with about("structured"):
                self.sandbox.require(as_structured("structured", structure))
        return controls

    def _ban(self, texts: tuple[str, ...]) -> Controls:
        """Ban the ids of texts, as they begin a text and as they follow a space."""
        if self.spec.tokenizer is None:
            raise InputError("bad_words needs a tokenizer, and the model has none; leave it out")
        spelled = [self.spec.inputs.prediction(lead + text) for text in texts for lead in ("", " ")]
        return {"bad_words_ids": [ids for ids in dict.fromkeys(spelled) if ids]}


# Fields of a request that are arguments of `Engine.add`
SAME = ("seed", "gamma", "rule", "lenience", "cache_salt", "priority", "begun")


def blame_function(request: GenerateRequest, error: Exception) -> Exception:
    """Return the error, or if the grammar of calls does not compile one that names the function
    whose parameters cannot be followed."""
    if getattr(error, "option", None) != "structured" or request.wish is None:
        return error
    for function in request.wish.functions:
        if function.parameters and (reason := objection(json.dumps(function.parameters))):
            problem = f"the parameters of the function {function.name!r} cannot be followed"
            return InputError(f"{problem}: {reason}; correct them").about("tools")
    return error
