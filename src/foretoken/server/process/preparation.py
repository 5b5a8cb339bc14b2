"""Convert clients' requests to arguments of `Engine.add`: render chat templates, encode prompts and
media, compile grammars, and check limits."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

from foretoken.controls.grammar import find_schema_problem
from foretoken.errors import InputError, name_option_in_errors
from foretoken.media.inputs import Media
from foretoken.sampling.checks import as_structured
from foretoken.sampling.params import Controls
from foretoken.server.process.messages import (
    Accepted,
    GenerateRequest,
    Prompt,
    TokenLogprob,
    holds_media,
    is_chat,
)
from foretoken.server.process.replies import ReplyPreparer
from foretoken.server.process.sandbox import GrammarSandbox, MediaSandbox
from foretoken.speculator import Speculator
from foretoken.text.chat import get_sampling_rate
from foretoken.text.decoding import TokenSpelling, count_offsets, decode
from foretoken.text.messages import get_parts

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# Fields of a request that are arguments of `Engine.add`
ENGINE_ARGUMENTS = ("seed", "gamma", "rule", "lenience", "cache_salt", "priority", "begun")
MAX_TOKEN_CHARACTERS = 128  # characters per token in ordinary text
DEFAULT_NEW_TOKENS = 4096  # for a model without a context


@dataclass(slots=True)
class EngineRequest:
    """A request that was added to the engine, with the data needed to report its outputs."""

    accepted: Accepted  # the message to send before the first output
    show_steps: bool
    offsets: list[int]  # of the prompt's tokens, in characters, if the prompt is echoed
    accepted_sent: bool = False


@dataclass(frozen=True, slots=True)
class RequestPreparer:
    """Converts requests to one target into arguments of `Engine.add`."""

    spec: Speculator
    prompts: PromptEncoder
    replies: ReplyPreparer
    spelling: TokenSpelling
    sandbox: GrammarSandbox

    def prepare(self, id: int, request: GenerateRequest) -> tuple[EngineRequest, dict[str, Any]]:
        """Return the worker's record of a request, and the request's keyword arguments for
        `Engine.add`. Raises ForetokenError if the request is invalid."""
        with name_option_in_errors("prompt"):
            messages, variables = (
                self.replies.build_messages(request),
                self.replies.get_template_variables(request),
            )
            prompt = self.prompts.encode(messages, request.chat_template, variables)
        ids, requested = get_ids(prompt), request.controls.get("max_new_tokens")
        limit = self.prompts.limit_new_tokens(len(ids), requested, request.default_new_tokens)
        prediction = None
        if request.prediction is not None:
            with name_option_in_errors("prediction"):
                prediction = self.prompts.encode_prediction(request.prediction)
        accepted, offsets = self._build_acceptance(id, request, ids)
        return EngineRequest(accepted, request.show_steps, offsets), {
            "prompt": prompt,
            "id": id,
            "prediction": prediction,
            **{name: getattr(request, name) for name in ENGINE_ARGUMENTS},
            **self._build_controls(request, accepted.tail),
            "max_new_tokens": limit,
        }

    def _build_acceptance(
        self, id: int, request: GenerateRequest, ids: list[int]
    ) -> tuple[Accepted, list[int]]:
        """Return the `Accepted` message of a request, and the offset of each prompt token in the
        echoed prompt, or [] if no offsets are reported."""
        tail = "" if request.reply_requirements is None else self.replies.decode_tail(ids)
        reported_ids = ids if request.return_prompt_ids else None
        if not request.echo:
            return Accepted(id, len(ids), tail=tail, prompt_ids=reported_ids), []
        prompt, tokenizer = request.prompt, self.spec.tokenizer
        if tokenizer is None:
            raise InputError("echo needs a tokenizer, but there is none; leave out echo")
        if not isinstance(prompt, str):
            prompt = decode(tokenizer, ids)
        logprobs = request.controls.get("prompt_logprobs") is not None
        offsets = count_offsets(tokenizer, ids, prompt) if logprobs else []
        first = TokenLogprob(*self.spelling.spell(ids[0]), 0.0, [], ids[0], 1, 0)
        return Accepted(id, len(ids), prompt, (first,), tail, reported_ids), offsets

    def _build_controls(self, request: GenerateRequest, tail: str) -> Controls:
        """Return the sampling options of a request, completed by the options that the reply's
        format requires. Raises InputError if the grammar takes too long to compile."""
        controls = request.controls
        if request.reply_requirements is not None:
            controls = controls | self.replies.build_controls(request, tail)
        if request.bad_words:
            with name_option_in_errors("bad_words"):
                controls = controls | self._ban_words(request.bad_words)
        if structure := controls.get("structured"):
            with name_option_in_errors("structured"):
                self.sandbox.require(as_structured("structured", structure))
        return controls

    def _ban_words(self, words: tuple[str, ...]) -> Controls:
        """Return the sampling option `bad_words_ids` that bans words: the token ids of each word,
        with and without a leading space."""
        if self.spec.tokenizer is None:
            raise InputError("bad_words needs a tokenizer, but there is none; leave out bad_words")
        spelled = [
            self.spec.inputs.tokenize_prediction(lead + text)
            for text in words
            for lead in ("", " ")
        ]
        return {"bad_words_ids": [ids for ids in dict.fromkeys(spelled) if ids]}


def blame_function(request: GenerateRequest, error: Exception) -> Exception:
    """Return `error`, or, if the grammar for calls does not compile, a clearer InputError that
    names the function with the unsupported parameters."""
    if getattr(error, "option", None) != "structured" or request.reply_requirements is None:
        return error
    for function in request.reply_requirements.functions:
        if function.parameters and (reason := find_schema_problem(json.dumps(function.parameters))):
            problem = f"the parameters of the function {function.name!r} are not supported"
            return InputError(f"{problem}: {reason}; correct the parameters").with_option("tools")
    return error


class TooLongError(InputError):
    """The prompt and the requested new tokens together, or a prediction, exceed the context
    length."""


class PromptEncoder:
    """Encodes prompts for one target. Raises TooLongError for a prompt that exceeds the context
    length `context`; None: no limit."""

    def __init__(self, spec: Speculator, context: int | None, media: MediaSandbox) -> None:
        self.spec, self.context, self.media = spec, context, media
        self.max_token_characters = compute_max_token_characters(spec.tokenizer)

    def encode(
        self, prompt: Prompt, template: str | None, variables: dict[str, Any] | None
    ) -> list[int] | Media:
        """Return the token ids of a prompt; for messages with images or audio, a Media of the ids
        and the encoder's inputs.

        Args:
            prompt: A string, ids, or messages, which a chat template renders.
            template: The chat template; None: the tokenizer's own.
            variables: Variables for the chat template.
        """
        self._require_short(prompt, "prompt")
        if holds_media(prompt):
            prompt = [self._decode_media(i, turn) for i, turn in enumerate(cast(Any, prompt))]
            return cast(
                Any, self.spec.inputs.list_prompts(cast(Any, prompt), template, variables)[0]
            )
        if not (isinstance(prompt, list) and prompt and isinstance(prompt[0], int)):
            (prompt,) = cast(
                Any, self.spec.inputs.list_prompts(cast(Any, prompt), template, variables)
            )
        return self.spec.inputs.encode_prompt(cast(Any, prompt))

    def encode_prediction(self, text: str) -> list[int]:
        """Return the token ids of a predicted output. Raises TooLongError if they exceed the
        context length."""
        self._require_short(text, "prediction")
        ids = list(self.spec.inputs.tokenize_prediction(text))
        self._require_fit(ids, "prediction")
        return ids

    def limit_new_tokens(
        self, prompt_tokens: int, requested: int | None, default: int | None
    ) -> int:
        """Return the maximum number of new tokens: `requested`, or, if it is None, the rest of the
        context, at most `default`. Raises TooLongError if prompt and new tokens exceed the context
        length."""
        context = self.context
        if context is not None and prompt_tokens + (requested or 1) > context:
            and_requested = f" and max_tokens is {requested}" if requested else ""
            fits = prompt_tokens < context
            remedy = "ask for fewer tokens" if fits else "shorten the prompt"
            raise TooLongError(
                f"the prompt has {prompt_tokens} tokens{and_requested}, but the context length is "
                f"{context}; {remedy}"
            ).with_option("max_new_tokens" if fits else "prompt")
        if requested is not None:
            return requested
        room = DEFAULT_NEW_TOKENS if context is None else context - prompt_tokens
        return room if default is None else min(room, default)

    def _require_short(self, prompt: Prompt, name: str) -> None:
        """Raise TooLongError if a prompt has too many characters for the context length: tokenizing
        some MB to count the tokens would take seconds."""
        if isinstance(prompt, list) and not is_chat(prompt):
            self._require_fit(prompt, name)
            return
        size = sum(map(_count_characters, prompt)) if is_chat(prompt) else len(prompt)
        if self.context is not None and size > self.max_token_characters * self.context:
            raise TooLongError(
                f"the {name} has {size} characters, which exceed the context length of "
                f"{self.context} tokens; shorten the {name}"
            )

    def _require_fit(self, ids: list[Any], name: str) -> None:
        if self.context is not None and len(ids) > self.context:
            problem = f"the {name} has {len(ids)} tokens, but the context length is {self.context}"
            raise TooLongError(f"{problem}; shorten the {name}")

    def _decode_media(self, i: int, message: dict[str, Any]) -> dict[str, Any]:
        """Return message `i` with the bytes of its images and audio decoded to arrays."""
        assert self.spec.processor is not None  # else the server refuses media
        sampling_rate = get_sampling_rate(self.spec.processor())

        def decode(j: int, part: Mapping[str, Any]) -> dict[str, Any]:
            kind, place = part["type"], f"message {i}, part {j}"
            if kind == "image":
                return {"type": kind, kind: self.media.decode_image(part[kind], place)}
            if kind == "audio":
                return {
                    "type": kind,
                    kind: self.media.decode_audio(part[kind], sampling_rate, place),
                }
            return dict(part)

        parts = [decode(j, part) for j, part in enumerate(get_parts(message))]
        return message | {"content": parts or message.get("content")}


def get_ids(prompt: list[int] | Media) -> list[int]:
    """Return the ids of an encoded prompt."""
    return prompt if isinstance(prompt, list) else prompt.ids


def _count_characters(message: dict[str, Any]) -> int:
    parts = get_parts(message)
    texts = [part.get("text") for part in parts] if parts else [message.get("content")]
    return sum(len(text or "") for text in texts)


def compute_max_token_characters(tokenizer: PreTrainedTokenizerBase | None) -> int:
    """Return an upper bound on the characters per token of a prompt. A byte-level tokenizer drops
    no characters, so the bound is the length of its longest token. Another tokenizer may drop
    characters, so the bound is at least MAX_TOKEN_CHARACTERS, which ordinary text does not
    reach."""
    longest = max(map(len, tokenizer.get_vocab()), default=1) if tokenizer is not None else 1
    backend: Any = getattr(tokenizer, "backend_tokenizer", None)
    added: Any = getattr(tokenizer, "added_tokens_decoder", {}).values()
    drops_characters = (
        backend is None
        or backend.normalizer is not None
        or "ByteLevel" not in str(backend.pre_tokenizer)
        or any(token.lstrip or token.rstrip for token in added)
    )
    return max(MAX_TOKEN_CHARACTERS, longest) if drops_characters else longest
