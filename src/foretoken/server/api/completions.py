"""POST /v1/completions: texts or token ids in, their continuations out."""

from __future__ import annotations

from collections import defaultdict
from itertools import takewhile
from typing import Annotated, Any, ClassVar

from pydantic import Discriminator, Field, Tag

from foretoken.server.api import answers
from foretoken.server.api.errors import BadRequestError
from foretoken.server.api.wire import (
    MOST_LOGPROBS,
    MOST_PROMPTS,
    ApiRequest,
    Flag,
    Predicting,
    Whole,
)
from foretoken.server.process.generation import GeneratedText
from foretoken.server.process.messages import StepOutput, TokenLogprob


def _kind(prompt: Any) -> str:
    """Return the tag of a prompt's kind by its first part: trying every kind on all parts takes
    seconds. `_kind` of `errors` drops tags, which hold a colon, from the place of an error."""
    first = prompt[0] if isinstance(prompt, list) and prompt else None
    if isinstance(first, str | list):
        return "prompt:texts" if isinstance(first, str) else "prompt:lists"
    return "prompt:ids" if isinstance(prompt, list) else "prompt:text"


Several = Field(max_length=MOST_PROMPTS)
PromptField = Annotated[
    Annotated[str, Tag("prompt:text")]
    | Annotated[list[str], Several, Tag("prompt:texts")]
    | Annotated[list[Whole], Tag("prompt:ids")]
    | Annotated[list[list[Whole]], Several, Tag("prompt:lists")],
    Discriminator(_kind),
]


class Text(Predicting):
    """Request to continue texts."""

    prompt: PromptField
    max_tokens: Whole | None = Field(16, ge=0)
    logprobs: Whole | None = Field(None, ge=0, le=MOST_LOGPROBS)
    echo: Flag | None = None

    sets: ClassVar[dict[str, tuple[str, ...]]] = {
        **ApiRequest.sets,
        "max_new_tokens": ("max_tokens",),
        "prompt_logprobs": ("logprobs", "prompt_logprobs"),
    }

    @property
    def prompts(self) -> list[str | list[int]]:
        prompt: Any = self.prompt
        several = isinstance(prompt, list) and bool(prompt) and not isinstance(prompt[0], int)
        prompts = prompt if several else [prompt]
        if [] in prompts:
            raise BadRequestError("prompt is empty; give a text or ids", "prompt")
        return prompts

    @property
    def max_new_tokens(self) -> int | None:
        return None if self.max_tokens is None else max(1, self.max_tokens)

    @property
    def reported(self) -> int | None:
        return self.logprobs

    @property
    def reported_of_prompt(self) -> int | None:
        return self.logprobs if self.echo and self.logprobs is not None else self.prompt_logprobs

    @property
    def echoes(self) -> bool:
        return bool(self.echo)

    def require(self) -> None:
        super().require()
        if self.max_tokens == 0 and (self.stream or not self.echo):
            message = "max_tokens is 0, which goes with echo and without stream; give 1 or more"
            raise BadRequestError(message, "max_tokens")
        if self.echo and self.logprobs is not None:
            others = {"stream": self.stream, "prompt_logprobs": self.prompt_logprobs is not None}
            for name, asked in others.items():
                if asked:
                    raise BadRequestError(f"echo with logprobs does not go with {name}", name)


class TextAnswer(answers.ChoicesAnswer[Text]):
    """Answer of continuations, each after the echo of its prompt."""

    prefix = "cmpl"
    kinds = ("text_completion", "text_completion")

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._waiting = defaultdict[int, list[TokenLogprob]](list)  # for text that is held back

    def body(self) -> dict[str, Any]:
        if self.asked.max_tokens == 0:  # what the engine wrote to read the prompt
            for text in self.texts:
                text.text, text.tokens, text.logprobs = "", [], []
        return super().body()

    def choice(self, i: int, text: GeneratedText) -> dict[str, Any]:
        whole, asked = text.accepted.echo + text.text, self.asked
        prompt = (text.done and text.done.prompt_logprobs) or []
        choice: dict[str, Any] = {"text": whole}
        if asked.return_token_ids:
            choice["prompt_token_ids"] = text.accepted.prompt_ids
        if asked.prompt_logprobs is not None:
            choice["prompt_logprobs"] = answers.by_id(prompt)
        if asked.logprobs is None:
            return choice
        tokens = [*text.accepted.first, *prompt, *text.logprobs] if asked.echo else text.logprobs
        logprobs = _logprobs(tokens, asked.logprobs, len(whole))
        for key in ("token_logprobs", "top_logprobs") if text.accepted.first else ():
            if logprobs[key]:
                logprobs[key][0] = None  # nothing is known of a prompt's first token
        return choice | {"logprobs": logprobs}

    def beginning(self, text: GeneratedText) -> dict[str, Any] | None:
        if self.asked.return_token_ids:
            return {"text": text.accepted.echo, "prompt_token_ids": text.accepted.prompt_ids}
        return {"text": text.accepted.echo} if text.accepted.echo else None

    def delta(self, i: int, part: StepOutput) -> dict[str, Any]:
        if self.asked.logprobs is None:
            return {"text": part.text}
        end = len(self.texts[i].accepted.echo) + len(self.texts[i].text)
        tokens = self._waiting[i] + (part.logprobs or [])
        if part.done is None:  # what is held back may be cut, and its tokens stand at the end then
            tokens, self._waiting[i] = _split_at(tokens, end)
        return {"text": part.text, "logprobs": _logprobs(tokens, self.asked.logprobs, end)}


def _split_at(
    tokens: list[TokenLogprob], end: int
) -> tuple[list[TokenLogprob], list[TokenLogprob]]:
    """The tokens that begin before `end`, and the others."""
    before = list(takewhile(lambda each: each.offset < end, tokens))
    return before, tokens[len(before) :]


def _logprobs(tokens: list[TokenLogprob], count: int, end: int) -> dict[str, Any]:
    """`end`: of the text; tokens of a stop string that is cut off stand there."""
    return {
        "tokens": [each.text for each in tokens],
        "token_logprobs": [each.logprob for each in tokens],
        "top_logprobs": [_name_logprobs(each) for each in tokens] if count else None,
        "text_offset": [min(each.offset, end) for each in tokens],
    }


def _name_logprobs(token: TokenLogprob) -> dict[str, float]:
    """The logprobs of the token itself and of the most probable ones: by name, and one that has the
    name of another by its id, as in vLLM."""
    names, logprobs = {token.id: token.text}, {token.text: token.logprob}
    for name, _, logprob, id in token.top:
        if id not in names:
            names[id] = f"token_id:{id}" if name in logprobs else name
            logprobs[names[id]] = logprob
    return logprobs
