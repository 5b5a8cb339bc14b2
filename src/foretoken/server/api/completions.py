"""POST /v1/completions: continues one or more prompts, given as strings or token ids."""

from __future__ import annotations

from collections import defaultdict
from itertools import takewhile
from typing import Annotated, Any, ClassVar

from pydantic import Discriminator, Field, Tag

from foretoken.server.api import answers
from foretoken.server.api.errors import BadRequestError
from foretoken.server.api.protocol import (
    MAX_LOGPROBS,
    MAX_PROMPTS,
    ApiRequest,
    PredictionRequest,
    StrictBool,
    StrictInt,
)
from foretoken.server.process.generation import GeneratedOutput
from foretoken.server.process.messages import StepOutput, TokenLogprob


def _get_prompt_tag(prompt: Any) -> str:
    """Return the tag of the type of the `prompt` field. Only the first item of a list is checked:
    pydantic would validate all items against every type, which takes seconds for a long list. The
    tags contain a colon so that `errors` can leave them out of an error's location."""
    first = prompt[0] if isinstance(prompt, list) and prompt else None
    if isinstance(first, str | list):
        return "prompt:texts" if isinstance(first, str) else "prompt:lists"
    return "prompt:ids" if isinstance(prompt, list) else "prompt:text"


MAX_PROMPTS_FIELD = Field(max_length=MAX_PROMPTS)
PromptField = Annotated[
    Annotated[str, Tag("prompt:text")]
    | Annotated[list[str], MAX_PROMPTS_FIELD, Tag("prompt:texts")]
    | Annotated[list[StrictInt], Tag("prompt:ids")]
    | Annotated[list[list[StrictInt]], MAX_PROMPTS_FIELD, Tag("prompt:lists")],
    Discriminator(_get_prompt_tag),
]


class CompletionRequest(PredictionRequest):
    """Request to continue one or more prompts."""

    prompt: PromptField
    max_tokens: StrictInt | None = Field(16, ge=0)
    logprobs: StrictInt | None = Field(None, ge=0, le=MAX_LOGPROBS)
    echo: StrictBool | None = None

    option_fields: ClassVar[dict[str, tuple[str, ...]]] = {
        **ApiRequest.option_fields,
        "max_new_tokens": ("max_tokens",),
        "prompt_logprobs": ("logprobs", "prompt_logprobs"),
    }

    @property
    def prompts(self) -> list[str | list[int]]:
        prompt: Any = self.prompt
        has_several = isinstance(prompt, list) and bool(prompt) and not isinstance(prompt[0], int)
        prompts = prompt if has_several else [prompt]
        if [] in prompts:
            raise BadRequestError("prompt is empty; give a string or a list of ids", "prompt")
        return prompts

    @property
    def max_new_tokens(self) -> int | None:
        return None if self.max_tokens is None else max(1, self.max_tokens)

    @property
    def num_logprobs(self) -> int | None:
        return self.logprobs

    @property
    def num_prompt_logprobs(self) -> int | None:
        return self.logprobs if self.echo and self.logprobs is not None else self.prompt_logprobs

    @property
    def returns_prompt(self) -> bool:
        return bool(self.echo)

    def require(self) -> None:
        super().require()
        if self.max_tokens == 0 and (self.stream or not self.echo):
            message = "max_tokens is 0, which needs echo: true without stream; give 1 or more"
            raise BadRequestError(message, "max_tokens")
        if self.echo and self.logprobs is not None:
            others = {"stream": self.stream, "prompt_logprobs": self.prompt_logprobs is not None}
            for name, is_given in others.items():
                if is_given:
                    raise BadRequestError(
                        f"echo with logprobs does not support {name}; leave out {name}", name
                    )


class CompletionAnswer(answers.ChoicesAnswer[CompletionRequest]):
    """Answer to a completion request. With `echo`, the text of a choice is the prompt and the
    output."""

    id_prefix = "cmpl"
    object_names = ("text_completion", "text_completion")

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        # For each output: logprobs of text that is held back because it may begin a stop string
        self._held_back = defaultdict[int, list[TokenLogprob]](list)

    def build_body(self) -> dict[str, Any]:
        if self.request.max_tokens == 0:  # drop the token that the engine had to generate
            for output in self.outputs:
                output.text, output.tokens, output.logprobs = "", [], []
        return super().build_body()

    def build_choice(self, i: int, output: GeneratedOutput) -> dict[str, Any]:
        text, request = output.accepted.echo + output.text, self.request
        prompt = (output.done and output.done.prompt_logprobs) or []
        choice: dict[str, Any] = {"text": text}
        if request.return_token_ids:
            choice["prompt_token_ids"] = output.accepted.prompt_ids
        if request.prompt_logprobs is not None:
            choice["prompt_logprobs"] = answers.format_prompt_logprobs(prompt)
        if request.logprobs is None:
            return choice
        tokens = (
            [*output.accepted.first_prompt_token, *prompt, *output.logprobs]
            if request.echo
            else output.logprobs
        )
        logprobs = _format_logprobs(tokens, request.logprobs, len(text))
        for key in ("token_logprobs", "top_logprobs") if output.accepted.first_prompt_token else ():
            if logprobs[key]:
                logprobs[key][0] = None  # a prompt's first token has no probability
        return choice | {"logprobs": logprobs}

    def build_first_delta(self, output: GeneratedOutput) -> dict[str, Any] | None:
        if self.request.return_token_ids:
            return {"text": output.accepted.echo, "prompt_token_ids": output.accepted.prompt_ids}
        return {"text": output.accepted.echo} if output.accepted.echo else None

    def build_delta(self, i: int, part: StepOutput) -> dict[str, Any]:
        if self.request.logprobs is None:
            return {"text": part.text}
        end = len(self.outputs[i].accepted.echo) + len(self.outputs[i].text)
        tokens = self._held_back[i] + (part.logprobs or [])
        # Held-back text may still be cut off; at the end, tokens of this text get the offset `end`
        if part.done is None:
            tokens, self._held_back[i] = _split_at(tokens, end)
        return {"text": part.text, "logprobs": _format_logprobs(tokens, self.request.logprobs, end)}


def _split_at(
    tokens: list[TokenLogprob], end: int
) -> tuple[list[TokenLogprob], list[TokenLogprob]]:
    """Split tokens into those that begin before the character offset `end` and the rest."""
    before = list(takewhile(lambda each: each.offset < end, tokens))
    return before, tokens[len(before) :]


def _format_logprobs(tokens: list[TokenLogprob], count: int, end: int) -> dict[str, Any]:
    """Return the `logprobs` object of a completion's choice.

    Args:
        tokens: The tokens of the choice or chunk.
        count: Number of most probable tokens that the request asks for; 0: no `top_logprobs`.
        end: Length of the text in characters, and the maximum offset. Tokens of a stop string that
            is not in the text get this offset.
    """
    return {
        "tokens": [each.text for each in tokens],
        "token_logprobs": [each.logprob for each in tokens],
        "top_logprobs": [_name_logprobs(each) for each in tokens] if count else None,
        "text_offset": [min(each.offset, end) for each in tokens],
    }


def _name_logprobs(token: TokenLogprob) -> dict[str, float]:
    """Return the logprobs of a token and of the most probable tokens at its position, keyed by the
    tokens' text. If two tokens have the same text, the key of the second token is "token_id:" and
    its id, as in vLLM."""
    names, logprobs = {token.id: token.text}, {token.text: token.logprob}
    for name, _, logprob, id in token.top:
        if id not in names:
            names[id] = f"token_id:{id}" if name in logprobs else name
            logprobs[names[id]] = logprob
    return logprobs
