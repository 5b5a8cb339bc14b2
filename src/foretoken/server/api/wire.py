"""Fields of requests, in OpenAI's names and in vLLM's for what those lack. A field that is not
honoured is refused by name; an unknown one gets the nearest that is known."""

from __future__ import annotations

import re
import secrets
from collections.abc import Iterator, Mapping, Sequence
from difflib import get_close_matches
from typing import Annotated, Any, ClassVar, Literal, TypeVar, get_args

from pydantic import BaseModel, ConfigDict, Field, ValidationError, create_model

from foretoken.errors import mismatch
from foretoken.sampling import checks
from foretoken.sampling.params import OPTIONS, Controls
from foretoken.server.api.errors import BadRequestError
from foretoken.server.process.messages import GenerateRequest, Prompt

Number = Annotated[float, Field(strict=True, allow_inf_nan=False)]
Whole = Annotated[int, Field(strict=True)]
Flag = Annotated[bool, Field(strict=True)]
MOST_N, MOST_LOGPROBS, MOST_STOPS = 128, 20, 16
MOST_GAMMA = 32  # others wait for its drafts
MOST_GRAMMAR, MOST_CHOICES = 50_000, 1000  # compiling more stalls those who wait

# Fields of OpenAI's that no value but these is honoured of, and why.
NEUTRAL: dict[str, tuple[tuple[Any, ...], str]] = {
    "audio": ((None,), "this server makes text only"),
    "modalities": ((None, ["text"]), "this server makes text only"),
    "function_call": ((None, "none"), "give tools, and read the text that the template makes"),
    "functions": ((None, []), "give tools instead"),
    "moderation": ((None,), "there is no moderation here"),
    "prediction": ((None,), "predicted outputs are for completions and chats"),
    "reasoning_effort": ((None,), "give chat_template_kwargs, as the model's template names it"),
    "verbosity": ((None, "medium"), "give chat_template_kwargs, as the model's template names it"),
    "service_tier": ((None, "auto", "default"), "there is one tier; give priority"),
    "store": ((None, False), "nothing is stored"),
    "metadata": ((None, {}), "nothing is stored, so nothing can be found by metadata"),
    "web_search_options": ((None,), "nothing in a request reaches another host"),
    "suffix": ((None, ""), "texts are continued, not filled in"),
    "skip_special_tokens": ((None, True), "special tokens are never part of a text"),
    "prompt_cache_options": ((None,), "give cache_salt to keep a prefix apart"),
    "prompt_cache_retention": ((None, "in_memory"), "prefixes are kept in memory alone"),
    "chat_template": ((None,), "a template is a program; give the server --chat-template"),
    "conversation": ((None,), "nothing is stored; send the whole conversation"),
    "previous_response_id": ((None,), "nothing is stored; send the whole conversation"),
    "prompt": ((None,), "no prompts are stored; send messages"),
    "reasoning": ((None,), "give /v1/chat/completions chat_template_kwargs for the template"),
    "max_tool_calls": ((None,), "no tools are called here"),
    "context_management": ((None,), "nothing is left out of a conversation here"),
    "access_programs": ((None,), "there are no programs here"),
    "background_options": ((None,), "answers are written while the client waits"),
    "image": ((None,), "this server makes text only"),
    "stream_obfuscation": ((None, False), "events are as long as they are"),
}
# Names of fields elsewhere, and what they are called here, by endpoint.
ELSEWHERE = {
    "max_tokens": ("max_output_tokens",),
    "max_completion_tokens": ("max_tokens", "max_output_tokens"),
    "max_output_tokens": ("max_completion_tokens", "max_tokens"),
    "response_format": ("text", "structured_outputs"),
    "text": ("response_format", "structured_outputs"),
    "guided_json": ("structured_outputs",),
    "guided_regex": ("structured_outputs",),
    "guided_choice": ("structured_outputs",),
    "guided_grammar": ("structured_outputs",),
}
# Fields that say who asks or where: one engine serves all, so there is nothing to do for them.
NOTED = frozenset(("user", "safety_identifier", "prompt_cache_key"))


class Sets:
    """Annotation of a field: the engine's options that it sets, where these have other names."""

    def __init__(self, *options: str) -> None:
        self.options = options


class Wire(BaseModel):
    """A part of a request: only fields that are known here."""

    model_config = ConfigDict(extra="forbid")

    def param(self, option: str) -> str | None:
        """Return the field of this request that sets an option of the engine; a place within it, as
        in "prompt[0].role", stays."""
        name, place, rest = re.fullmatch(r"(\w+)(\[?)(.*)", option).groups()  # pyright: ignore
        fields = list(_setting(type(self), name))
        fields = fields or [name for name in (name,) if name in type(self).model_fields]
        asked = [f for f in fields if getattr(self, f.split(".")[0]) is not None]
        return f"{(asked or fields)[0]}{place}{rest}" if fields else None


def _setting(kind: type[Wire], option: str) -> Iterator[str]:
    """Fields that set an option of the engine, those of parts included."""
    for name, field in kind.model_fields.items():
        if any(isinstance(each, Sets) and option in each.options for each in field.metadata):
            yield name
        if part := _part(kind, (name,)):
            yield from (f"{name}.{each}" for each in _setting(part, option))


T = TypeVar("T", bound=Wire)


class Speculation(Wire):
    """Options of speculation for one request; its text stays in the target's distribution while
    lenience is 1."""

    gamma: Annotated[Whole | None, Sets("gamma")] = Field(
        None, ge=0, le=MOST_GAMMA, description="guesses per target call; null: automatic"
    )
    drafter: Flag = Field(True, description="false: plain decoding")
    rule: Annotated[Literal["block", "speculative", "coupled"] | None, Sets("rule")] = None
    lenience: Annotated[Number | None, Sets("lenience")] = Field(None, gt=0, le=1)
    steps: Flag = Field(False, description="tell of every step in the answer")
    metrics: Literal["summary", "detailed"] | None = Field(
        None, description="vLLM's metrics of the request, in the answer"
    )


class StreamOptions(Wire):
    include_usage: Flag = False
    continuous_usage_stats: Flag = False  # vLLM's: with every chunk of text, so far
    include_obfuscation: Flag | None = None


# Kinds of sampling options, as a request has them
KINDS: dict[Any, Any] = {
    checks.Number: Number,
    checks.Count: Whole,
    checks.Choice: str,
    checks.as_id: Whole,
    checks.as_flag: Flag,
    checks.as_strings: str | list[str],
    checks.as_ids: list[Whole],
    checks.as_sequences: list[list[Whole]],
    checks.as_logit_bias: dict[str, Number],
}
# Options that all endpoints name alike; how long a text may be has a name and default for each
SHARED = {
    name: each.api.name for name, each in OPTIONS.items() if each.api and name != "max_new_tokens"
}


def _field(name: str) -> Any:
    """The field of a sampling option: its type and range follow from its check."""
    option = OPTIONS[name]
    kind = KINDS.get(option.check) or KINDS[type(option.check)]
    if kind is Flag:
        return Annotated[Flag, Sets(name)], Field(False, description=option.help)
    assert option.api
    bounds: dict[str, Any] = {**getattr(option.check, "bounds", {}), **option.api.bounds}
    return Annotated[kind | None, Sets(name)], Field(None, description=option.help, **bounds)


Sampled: Any = create_model(
    "Sampled", __base__=Wire, **{field: _field(name) for name, field in SHARED.items()}
)


class ApiRequest(Sampled):
    """Fields of every endpoint that writes text. Each endpoint says how fields of its own set the
    engine's options."""

    model: str | None = None
    stream: Flag | None = None
    stream_options: StreamOptions | None = None
    seed: Whole | None = None
    return_token_ids: Flag = False
    structured_outputs: Annotated[dict[str, Any] | None, Sets("structured")] = None
    cache_salt: str = ""
    priority: Whole = 0
    speculation: Speculation = Speculation()  # pyright: ignore[reportCallIssue]

    template_field: ClassVar[str | None] = None  # what the chat template reads; None: nothing

    @property
    def prompts(self) -> Sequence[Prompt]:
        """The prompts, of each of which `candidates` texts are written."""
        raise NotImplementedError

    @property
    def candidates(self) -> int:
        return self.n or 1

    @property
    def max_new_tokens(self) -> int | None:
        """New tokens of a text at most; None: as many as there is room for."""
        raise NotImplementedError

    @property
    def reported(self) -> int | None:
        """The number of the likeliest tokens reported at each place; None: no logprobs."""
        raise NotImplementedError

    @property
    def reported_of_prompt(self) -> int | None:
        return self.prompt_logprobs

    @property
    def predicted(self) -> str | None:
        """The text that the client expects."""
        return None

    @property
    def variables(self) -> dict[str, Any] | None:
        """Variables of the chat template."""
        return None

    def require(self) -> None:
        """Raise BadRequestError for fields that contradict one another."""
        if self.stream and self.prompt_logprobs is not None:
            raise BadRequestError("prompt_logprobs does not go with stream", "prompt_logprobs")
        if self.stream_options is not None and not self.stream:
            raise BadRequestError("stream_options goes with stream: true", "stream_options")
        if self.stream_options is not None and self.stream_options.include_obfuscation:
            raise BadRequestError(
                "include_obfuscation is not supported: events are as long as they are",
                "stream_options.include_obfuscation",
            )
        if len(self._stops) > MOST_STOPS or not all(self._stops):
            raise BadRequestError(f"give 1 to {MOST_STOPS} stop strings, none empty", "stop")
        if self.speculation.gamma and not self.speculation.drafter:
            raise BadRequestError(
                f"speculation.gamma is {self.speculation.gamma} and speculation.drafter false; "
                "leave one out",
                "speculation.gamma",
            )
        limit, least = self.max_new_tokens, self.min_tokens
        if limit is not None and least is not None and least > limit:
            message = f"min_tokens is {least}, above the {limit} new tokens asked for; lower it"
            raise BadRequestError(message, "min_tokens")

    def to_engine(self, prompt: Prompt, suggested: Mapping[str, Any]) -> GenerateRequest:
        """Return the engine's request for a text of this prompt. `suggested`: values of the
        generation config for what is left out. Raises BadRequestError."""
        self.require()
        speculation = self.speculation
        return GenerateRequest(
            prompt,
            self._controls(suggested),
            seed=(secrets.randbits(62) if self.seed is None else self.seed % 2**63, 0),
            gamma=speculation.gamma if speculation.drafter else 0,
            rule=speculation.rule,
            lenience=speculation.lenience,
            cache_salt=self.cache_salt,
            priority=self.priority,
            prediction=self.predicted,
            chat_template_kwargs=self.variables,
            show_steps=speculation.steps,
        )

    def _controls(self, suggested: Mapping[str, Any]) -> Controls:
        options: dict[str, Any] = {name: getattr(self, field) for name, field in SHARED.items()}
        del options["num_return_sequences"]  # a request of its own for each text
        for name, neutral in (("temperature", 1.0), ("top_p", 1.0), ("top_k", 0)):
            options[name] = _first(options[name], suggested.get(name), neutral)
        options |= {
            "top_k": max(0, options["top_k"]),
            "logit_bias": self._biases(),
            "stop_strings": self._stops or None,
            "max_new_tokens": self.max_new_tokens,
            "logprobs": self.reported,
            "prompt_logprobs": self.reported_of_prompt,
            "structured": self._structured(),
        }
        controls: Any = {n: v for n, v in options.items() if v is not None and v is not False}
        return controls

    @property
    def _stops(self) -> list[str]:
        return [self.stop] if isinstance(self.stop, str) else self.stop or []

    def _biases(self) -> dict[int, float] | None:
        if not self.logit_bias:
            return None
        for token in self.logit_bias:
            if not re.fullmatch("[0-9]{1,18}", token):
                message = f"logit_bias maps token ids to numbers; {token[:40]!r} is no id"
                raise BadRequestError(message, "logit_bias")
        return {int(token): bias for token, bias in self.logit_bias.items()}

    def _structured(self) -> dict[str, Any] | None:
        structures = {k: v for k, v in (self.structured_outputs or {}).items() if v is not None}
        if not structures:
            return None
        names = {"json": "json_schema", "regex": "regex", "choice": "choice", "grammar": "lark"}
        unknown = [name[:60] for name in structures if name not in names]
        if unknown or len(structures) > 1:
            content = f"unknown {unknown[0]!r}" if unknown else ", ".join(structures)
            raise BadRequestError(
                f"structured_outputs holds {content}; give one of {', '.join(names)}",
                "structured_outputs",
            )
        name, value = next(iter(structures.items()))
        if name == "choice" and not isinstance(value, list):
            raise BadRequestError(
                "structured_outputs.choice must be a list of texts", "structured_outputs"
            )
        size = len(str(value))
        if size > MOST_GRAMMAR or (isinstance(value, list) and len(value) > MOST_CHOICES):
            raise BadRequestError(
                f"structured_outputs.{name} has {size} characters; at most {MOST_GRAMMAR} go, and "
                f"{MOST_CHOICES} choices",
                "structured_outputs",
            )
        return {names[name]: value}


def small(schema: Any, param: str) -> Any:
    """A schema that is soon compiled."""
    if len(str(schema)) > MOST_GRAMMAR:
        raise BadRequestError(f"the schema is longer than {MOST_GRAMMAR} characters", param)
    return schema


class TextPart(Wire):
    type: Literal["text"]
    text: str


class PredictedOutput(Wire):
    """The text that the client expects."""

    type: Literal["content"]
    content: str | list[TextPart]

    @property
    def text(self) -> str:
        content = self.content
        return content if isinstance(content, str) else "".join(part.text for part in content)


class Predicting(ApiRequest):
    """Fields that chats and completions have beside."""

    prediction: PredictedOutput | None = None

    @property
    def predicted(self) -> str | None:
        return (self.prediction.text or None) if self.prediction else None


class Tokenize(Wire):
    """POST /tokenize: a text, or messages through the chat template."""

    model: str | None = None
    prompt: Annotated[str | None, Sets("prompt")] = None
    messages: Annotated[list[dict[str, Any]] | None, Sets("prompt")] = None
    chat_template_kwargs: dict[str, Any] | None = None
    return_token_strs: Flag = False


class Detokenize(Wire):
    """POST /detokenize."""

    model: str | None = None
    tokens: list[Whole]


def read(kind: type[T], body: Any) -> T:
    """A request of this kind. BadRequestError for what is unknown, refused or of another type."""
    if not isinstance(body, dict):
        raise BadRequestError("the body must be a JSON object")
    fields = {field.alias or name for name, field in kind.model_fields.items()}
    for name, value in body.items():
        if name in fields or name in NOTED:
            continue
        if name not in NEUTRAL:
            raise BadRequestError(f"{_unknown(name, fields)}", name)
        honoured, why = NEUTRAL[name]
        if not any(value == each and type(value) is type(each) for each in honoured):
            raise BadRequestError(f"{name} is not supported: {why}", name)
    values = {name: value for name, value in body.items() if name in fields}
    try:
        return kind.model_validate(values)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        place = ".".join(str(part) for part in first["loc"] if not _internal(part))
        message = mismatch(first)
        if first["type"] == "extra_forbidden" and (part := _part(kind, first["loc"][:-1])):
            message = _unknown(str(first["loc"][-1]), set(part.model_fields))
        raise BadRequestError(f"{place}: {message}", place) from None


def _unknown(name: str, fields: set[str]) -> str:
    elsewhere = [here for here in ELSEWHERE.get(name, ()) if here in fields]
    near = elsewhere or get_close_matches(name, sorted(fields | NOTED), 1, 0.8)
    remedy = f"did you mean {near[0]}?" if near else f"known are {', '.join(sorted(fields))}"
    return f"unknown field {name[:60]!r}; {remedy}"


def _part(kind: type[Wire], place: tuple[Any, ...]) -> type[Wire] | None:
    """The kind of request that stands at a place of another."""
    for name in place:
        field = kind.model_fields.get(name) if isinstance(name, str) else None
        kinds = () if field is None else (field.annotation, *get_args(field.annotation))
        parts = [each for each in kinds if isinstance(each, type) and issubclass(each, Wire)]
        if len(parts) != 1:
            return None
        kind = parts[0]
    return kind


def _internal(part: Any) -> bool:
    """Tell whether a part of a place is pydantic's name for one kind of several."""
    return isinstance(part, str) and ("[" in part or part in ("str", "int", "bool"))


def _first(*values: Any) -> Any:
    return next((value for value in values if value is not None), None)
