"""Fields of requests, with OpenAI's names, or vLLM's names for options that OpenAI's API lacks. An
unsupported field is refused with an error that names the field; the error for an unknown field
suggests the supported field with the most similar name."""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, create_model, model_validator
from pydantic_core import PydanticCustomError

from foretoken.errors import format_value
from foretoken.sampling import checks
from foretoken.sampling.params import SAMPLING_OPTIONS, Controls, SamplingParams
from foretoken.server.api import unsupported
from foretoken.server.api.errors import BadRequestError
from foretoken.server.process.messages import GenerateRequest, Prompt, ReplyFacts
from foretoken.text.messages import MEDIA_PART_KEYS
from foretoken.text.replies.calls import FunctionSignature
from foretoken.text.replies.grammar import ReplyRequirements

FiniteFloat = Annotated[float, Field(strict=True, allow_inf_nan=False)]
StrictInt = Annotated[int, Field(strict=True)]
StrictBool = Annotated[bool, Field(strict=True)]
MAX_N, MAX_LOGPROBS, MAX_STOP_STRINGS = 128, 20, 16
MAX_GAMMA = 32  # other sequences of the batch wait while draft tokens are generated
MAX_GRAMMAR_CHARACTERS, MAX_CHOICES = 50_000, 1000  # larger grammars compile too slowly
MAX_TOOLS, MAX_TOOL_CALLS, MAX_MESSAGES = 128, 128, 2048  # as OpenAI's
MAX_METADATA_ENTRIES = 16  # as OpenAI's
MAX_CONTENT_PARTS, MAX_PROMPTS = 2048, 2048
MAX_VARIABLES_CHARACTERS = 200_000  # characters of a template's variables, and of all tools
MAX_STOP_CHARACTERS = 1024  # of all stop strings together; each step looks for their prefixes
MAX_BAD_WORDS, MAX_BAD_WORDS_CHARACTERS = 128, 10_000  # the first limit is vLLM's
# As vLLM's
MAX_ENTRIES_BY_FIELD = {"allowed_token_ids": 1024, "logit_bias": 1024, "stop_token_ids": 128}


class StrictModel(BaseModel):
    """Base of all JSON objects in requests. Unknown fields are refused."""

    model_config = ConfigDict(extra="forbid")

    @model_validator(mode="before")
    @classmethod
    def check_known_fields(cls, body: Any) -> Any:
        """Refuse unknown fields. An unknown field whose value requests nothing, such as null, is
        dropped instead."""
        if not isinstance(body, dict):
            return body
        fields = {field.alias or name for name, field in cls.model_fields.items()}
        for name, value in body.items():
            if name not in fields and (message := cls.explain_refusal(name, value, fields)):
                raise make_field_error(name, message)
        return {name: value for name, value in body.items() if name in fields}

    @classmethod
    def explain_refusal(cls, name: str, value: Any, fields: set[str]) -> str | None:
        """Return why a field that is not among the supported `fields` is refused; None if the field
        can be dropped because its value requests nothing."""
        return unsupported.explain_unknown(name, fields)


def make_field_error(field: str, message: str) -> PydanticCustomError:
    """Return the error that a pydantic validator raises for one field of a JSON object."""
    return PydanticCustomError("unknown", "{message}", {"message": message, "field": field})


class Speculation(StrictModel):
    """Speculation options of one request. They do not change the output's distribution, except for
    a lenience below 1."""

    gamma: StrictInt | None = Field(
        None,
        ge=0,
        le=MAX_GAMMA,
        description="draft tokens per target call; 0: plain decoding; null: automatic",
    )
    drafter: StrictBool = Field(True, description="false: plain decoding")
    rule: Literal["block", "speculative", "coupled"] | None = None
    lenience: FiniteFloat | None = Field(None, gt=0, le=1)
    steps: StrictBool = Field(False, description="return every step in the answer")


class StreamOptions(StrictModel):
    include_usage: StrictBool = False
    continuous_usage_stats: StrictBool = Field(
        False, description="as in vLLM: report the usage so far in every chunk"
    )
    include_obfuscation: Literal[False] | None = None  # not supported


class StructuredOutputs(StrictModel):
    """A constraint on the output in vLLM's format: exactly one field may be given. `grammar` is in
    Lark's syntax."""

    json_schema: dict[str, Any] | bool | str | None = Field(None, alias="json")
    regex: str | None = None
    choice: list[str] | None = Field(None, max_length=MAX_CHOICES)
    lark: str | None = Field(None, alias="grammar")


class Body(StrictModel):
    """Base of the request bodies of all endpoints."""

    model: str | None = None

    # Name of an engine option -> the fields that set it, if their names differ
    option_fields: ClassVar[dict[str, tuple[str, ...]]] = {}

    @classmethod
    def explain_refusal(cls, name: str, value: Any, fields: set[str]) -> str | None:
        """Return why a field is refused; None if accepted. Unlike in nested objects, a known but
        unsupported field, such as `store`, is accepted if its value requests nothing."""
        return unsupported.explain_refusal(name, value, fields)

    @model_validator(mode="before")
    @classmethod
    def check_json(cls, body: Any) -> Any:
        """Refuse a body with values that JSON or UTF-8 cannot represent, such as NaN and lone
        surrogates. The check is skipped if a list is too long, as the body is refused anyway."""
        if isinstance(body, dict) and any(cls._is_too_long(*item) for item in body.items()):
            return body
        try:
            json.dumps(body, ensure_ascii=False, allow_nan=False).encode()
        except TypeError:  # a value is bytes: a form's file, or a body that is not sent as JSON
            pass
        except (ValueError, RecursionError) as error:
            raise BadRequestError(f"the body is not valid JSON: {error}"[:200]) from None
        return body

    @classmethod
    def _is_too_long(cls, name: str, value: Any) -> bool:
        field = cls.model_fields.get(name)
        if field is None or not isinstance(value, list | dict):
            return False
        return any(len(value) > getattr(m, "max_length", len(value)) for m in field.metadata)

    def find_field(self, option: str) -> str | None:
        """Return the field of this request that sets an engine option, for error messages; None if
        no field does. A location after the option's name is preserved: "prompt[0].role" may become
        "messages[0].role"."""
        name, place = re.fullmatch(r"(\w+)(.*)", option).groups()  # pyright: ignore
        fields = self.option_fields.get(name) or [
            f for f in (name,) if f in type(self).model_fields
        ]
        given = [f for f in fields if getattr(self, f.split(".")[0]) is not None]
        return f"{(given or fields)[0]}{place}" if fields else None


def require_small(value: Any, param: str, max_characters: int = MAX_GRAMMAR_CHARACTERS) -> Any:
    """Return `value`. Raises BadRequestError if, as a string, it has more than `max_characters`
    characters. The default is the limit for grammars: longer grammars compile too slowly."""
    if len(str(value)) > max_characters:
        raise BadRequestError(
            f"{param} is longer than {max_characters} characters; shorten {param}", param
        )
    return value


def require_short(strings: Sequence[str] | None, param: str, max_characters: int) -> None:
    """Raise BadRequestError if the strings together have more than `max_characters` characters."""
    size = sum(map(len, strings or ()))
    if size > max_characters:
        message = f"{param} has {size} characters in all, at most {max_characters} are allowed"
        raise BadRequestError(f"{message}; shorten {param}", param)


# The check of a sampling option -> the pydantic type of its field in requests
FIELD_TYPES: dict[Any, Any] = {
    checks.Number: FiniteFloat,
    checks.Count: StrictInt,
    checks.Choice: str,
    checks.as_id: StrictInt,
    checks.as_flag: StrictBool,
    checks.as_strings: Annotated[
        list[str],
        BeforeValidator(
            lambda value: [value] if isinstance(value, str) else value,
            json_schema_input_type=str | list[str],
        ),
        Field(max_length=MAX_STOP_STRINGS),
    ],
    checks.as_ids: list[StrictInt],
    checks.as_sequences: list[list[StrictInt]],
    checks.as_logit_bias: dict[str, FiniteFloat],
}
# Options with the same name at all endpoints; the name of max_new_tokens depends on the endpoint
SAMPLING_DEFAULTS = {each.name: each.default for each in fields(SamplingParams)}
SHARED_FIELDS = {
    name: each.api.name
    for name, each in SAMPLING_OPTIONS.items()
    if each.api and name != "max_new_tokens"
}


def _make_field(name: str) -> Any:
    """Return the pydantic field (type and default) of a sampling option. The type and range are
    derived from the option's check."""
    option = SAMPLING_OPTIONS[name]
    kind = FIELD_TYPES.get(option.check) or FIELD_TYPES.get(type(option.check))
    if kind is None:
        raise TypeError(f"{name} has a check of an unknown kind: add a type for it to FIELD_TYPES")
    if kind is StrictBool:
        return StrictBool, Field(SAMPLING_DEFAULTS[name], description=option.help)
    assert option.api
    bounds: dict[str, Any] = {**getattr(option.check, "bounds", {}), **option.api.bounds}
    if option.api.name in MAX_ENTRIES_BY_FIELD:
        bounds["max_length"] = MAX_ENTRIES_BY_FIELD[option.api.name]
    return kind | None, Field(None, description=option.help, **bounds)


SamplingFields: Any = create_model(
    "SamplingFields",
    __base__=Body,
    **{field: _make_field(name) for name, field in SHARED_FIELDS.items()},
)


class ApiRequest(SamplingFields):
    """Fields that all endpoints that generate text have in common. Subclasses add fields of one
    endpoint, and properties that return field values under the names of engine options."""

    stream: StrictBool | None = None
    stream_options: StreamOptions | None = None
    seed: StrictInt | None = None
    return_token_ids: StrictBool = False
    structured_outputs: StructuredOutputs | None = None
    bad_words: list[Annotated[str, Field(min_length=1)]] | None = Field(
        None, max_length=MAX_BAD_WORDS, description="strings that must not be generated"
    )
    cache_salt: str = ""
    priority: StrictInt = 0
    speculation: Speculation = Speculation()  # pyright: ignore[reportCallIssue]

    uses_chat_template: ClassVar[bool] = False  # whether a chat template renders the prompt
    option_fields: ClassVar[dict[str, tuple[str, ...]]] = {
        "structured": ("structured_outputs",),
        **{name: (f"speculation.{name}",) for name in ("gamma", "rule", "lenience")},
        **{name: (field,) for name, field in SHARED_FIELDS.items()},
    }

    @model_validator(mode="after")
    def check_consistency(self) -> ApiRequest:
        self.require()
        return self

    @property
    def prompts(self) -> Sequence[Prompt]:
        """Return the prompts; `n` outputs are generated for each prompt."""
        raise NotImplementedError

    @property
    def max_new_tokens(self) -> int | None:
        """Return the maximum number of new tokens of an output; None: up to the context length."""
        raise NotImplementedError

    @property
    def num_logprobs(self) -> int | None:
        """Return the number of most probable tokens reported at each position; None: no
        logprobs."""
        raise NotImplementedError

    @property
    def num_prompt_logprobs(self) -> int | None:
        return self.prompt_logprobs

    @property
    def returns_prompt(self) -> bool:
        """Return whether the answer contains the prompt."""
        return False

    @property
    def predicted_output(self) -> str | None:
        """Return the output that the client expects, which is used as draft; None if not given."""
        return None

    @property
    def template_variables(self) -> dict[str, Any] | None:
        """Return the variables for the chat template; None if there are no variables."""
        return None

    def require(self) -> None:
        """Raise BadRequestError for fields that contradict one another or are too long."""
        require_short(self.stop, "stop", MAX_STOP_CHARACTERS)
        require_short(self.bad_words, "bad_words", MAX_BAD_WORDS_CHARACTERS)
        if self.stream and self.prompt_logprobs is not None:
            raise BadRequestError(
                "streams have no prompt_logprobs; leave out one of the two", "prompt_logprobs"
            )
        if self.speculation.gamma and not self.speculation.drafter:
            raise BadRequestError(
                f"speculation.gamma is {self.speculation.gamma} and speculation.drafter is "
                "false; leave out one of the two",
                "speculation.gamma",
            )
        if self.stream_options is not None and not self.stream:
            raise BadRequestError("stream_options needs stream: true", "stream_options")
        limit, min_tokens = self.max_new_tokens, self.min_tokens
        if limit is not None and min_tokens is not None and min_tokens > limit:
            message = f"min_tokens is {min_tokens}, above the limit of {limit}; lower min_tokens"
            raise BadRequestError(message, "min_tokens")

    def get_reply_requirements(self, facts: ReplyFacts | None) -> ReplyRequirements | None:
        """Return the functions that the reply may or must call; None if the reply is not to be
        parsed into reasoning and calls. `facts`: the format of the model's replies."""
        return None

    def to_engine(
        self, prompt: Prompt, suggested: Mapping[str, Any], facts: ReplyFacts | None = None
    ) -> GenerateRequest:
        """Return the engine's request for one output of a prompt.

        Args:
            prompt: One of `prompts`.
            suggested: Values of the model's generation config, used for fields that are not set.
            facts: The format of the model's replies.

        Raises:
            BadRequestError: Fields contradict one another or are too long.
        """
        return GenerateRequest(
            prompt,
            self._build_controls(suggested),
            seed=(secrets.randbits(62) if self.seed is None else self.seed % 2**63, 0),
            gamma=self.speculation.gamma if self.speculation.drafter else 0,
            rule=self.speculation.rule,
            lenience=self.speculation.lenience,
            cache_salt=self.cache_salt,
            priority=self.priority,
            prediction=self.predicted_output,
            chat_template_kwargs=self.template_variables,
            show_steps=self.speculation.steps,
            echo=self.returns_prompt,
            return_prompt_ids=self.return_token_ids,
            bad_words=tuple(self.bad_words or ()),
            reply_requirements=self.get_reply_requirements(facts),
            thinking_budget=self.thinking_token_budget if self.uses_chat_template else None,
        )

    def _build_controls(self, suggested: Mapping[str, Any]) -> Controls:
        options: dict[str, Any] = {
            name: getattr(self, field) for name, field in SHARED_FIELDS.items()
        }
        del options["num_return_sequences"]  # the engine gets one request per output
        for name, neutral in (("temperature", 1.0), ("top_p", 1.0), ("top_k", 0)):
            given = (options[name], suggested.get(name), neutral)
            options[name] = next(value for value in given if value is not None)
        options |= {
            "top_k": max(0, options["top_k"]),
            "stop_strings": self.stop or None,
            "max_new_tokens": self.max_new_tokens,
            "logprobs": self.num_logprobs,
            "prompt_logprobs": self.num_prompt_logprobs,
            "structured": self._build_structured(),
        }
        controls: Any = {
            n: v
            for n, v in options.items()
            if v is not None and (v is not SAMPLING_DEFAULTS[n] or not isinstance(v, bool))
        }
        return controls

    @property
    def text_format(self) -> tuple[str, Any, str]:
        """Return the requested type of the output ("text", "json_object" or "json_schema"), its
        JSON schema or None, and the request's field that sets type and schema."""
        return "text", None, ""

    def _build_structured(self) -> dict[str, Any] | None:
        kind, schema, field = self.text_format
        grammars = self.structured_outputs.model_dump() if self.structured_outputs else {}
        grammars = {kind: grammar for kind, grammar in grammars.items() if grammar is not None}
        if len(grammars) > 1:
            raise BadRequestError(
                "structured_outputs has several grammars; give one grammar", "structured_outputs"
            )
        if kind == "text":
            return require_small(grammars, "structured_outputs") or None
        if grammars:
            problem = f"{field} and structured_outputs are both given; leave out one of the two"
            raise BadRequestError(problem, field)
        if kind == "json_schema" and schema is None:
            raise BadRequestError(f"{field} has no schema; give a schema", field)
        return {
            "json_schema": {"type": "object"} if schema is None else require_small(schema, field)
        }


def require_one_generation_prompt(request: Any) -> None:
    """Raise BadRequestError if a request explicitly sets both `continue_final_message` and
    `add_generation_prompt` to true."""
    opens_new = (
        request.add_generation_prompt and "add_generation_prompt" in request.model_fields_set
    )
    if opens_new and request.continue_final_message:
        problem = "continue_final_message and add_generation_prompt are both true"
        raise BadRequestError(f"{problem}; leave out one of the two", "continue_final_message")


class TextPart(StrictModel):
    type: Literal["text"]
    text: str


def _require_few_parts(content: Any) -> Any:
    if isinstance(content, list) and len(content) > MAX_CONTENT_PARTS:
        raise ValueError(f"the list has {len(content)} parts; give at most {MAX_CONTENT_PARTS}")
    return content


class PredictionField(StrictModel):
    """The output that the client expects."""

    type: Literal["content"]
    content: Annotated[str | list[TextPart], BeforeValidator(_require_few_parts)]


class PredictionRequest(ApiRequest):
    """Fields that only chat completions and completions have."""

    prediction: PredictionField | None = None

    @property
    def predicted_output(self) -> str | None:
        content = self.prediction.content if self.prediction else ""
        return (content if isinstance(content, str) else "".join(p.text for p in content)) or None


PartKind = Literal[
    "text", "input_text", "output_text", "refusal", "image_url", "input_image", "input_audio"
]
PARTS_REMEDY = "give text, an image (image_url, input_image) or audio (input_audio)"


def _normalize_content(content: Any) -> Any:
    """Return the content of a message in the format of chat templates: a list of parts if the
    message has images or audio, otherwise one string."""
    if not isinstance(content, list):
        return content
    parts = [_normalize_part(part) for part in _require_few_parts(content)]
    if any(part["type"] in MEDIA_PART_KEYS for part in parts):
        return parts
    return "".join(part["text"] for part in parts)


def _normalize_part(part: Any) -> dict[str, Any]:
    """Return a part of a message in the format of chat templates. An image remains a URL and audio
    remains base64; `MediaLoader` loads them later."""
    match part:
        case {"type": "text" | "input_text" | "output_text", "text": str(text)}:
            return {"type": "text", "text": text}
        case {"type": "refusal", "refusal": str(text)}:
            return {"type": "text", "text": text}
        case {"type": "image_url", "image_url": {"url": str(url), **more}}:
            pass
        case {"type": "input_image", "image_url": str(url), **more}:
            pass
        case {"type": "input_audio", "input_audio": {"data": str(data)}}:
            return {"type": "audio", "audio": data}
        case _:
            raise ValueError(f"a part is {format_value(part)}; {PARTS_REMEDY}")
    if more.get("detail") not in (None, "auto"):
        problem = f"an image has the detail {format_value(more['detail'])}, which is not supported"
        raise ValueError(f"{problem}; leave out detail")
    return {"type": "image", "image": url}


class ContentPart(BaseModel, extra="allow"):
    """A part of a message, for the OpenAPI document only."""

    type: PartKind
    text: str | None = None
    refusal: str | None = None
    image_url: str | dict[str, Any] | None = None
    input_audio: dict[str, Any] | None = None


Content = Annotated[
    str | list[dict[str, Any]],
    BeforeValidator(_normalize_content, json_schema_input_type=str | list[ContentPart]),
]


class Function(BaseModel, extra="allow"):
    """A function that a model may call."""

    name: Annotated[str, Field(pattern=r"^[\w.:-]{1,128}$")]
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: StrictBool | None = None


class Tool(BaseModel, extra="allow", json_schema_extra={"required": ["type"]}):
    """A tool in the format of chat templates, with the function's fields in `function`. The format
    of /v1/responses, with the function's fields in the tool itself, is accepted too."""

    type: Literal["function"]
    function: Function

    @model_validator(mode="before")
    @classmethod
    def nest_function(cls, tool: Any) -> Any:
        if not isinstance(tool, dict) or "function" in tool:
            return tool
        function = {name: value for name, value in tool.items() if name != "type"}
        return {name: tool[name] for name in ("type",) if name in tool} | {"function": function}


class FunctionName(StrictModel):
    name: str


class NamedTool(StrictModel):
    """A `tool_choice` that names the function that must be called. The name is in `function`; the
    format of /v1/responses, with `name` at the top level, is accepted too."""

    type: Literal["function"]
    function: FunctionName

    @model_validator(mode="before")
    @classmethod
    def nest_function(cls, choice: Any) -> Any:
        if isinstance(choice, dict) and "name" in choice and "function" not in choice:
            return {k: v for k, v in choice.items() if k != "name"} | {
                "function": {"name": choice["name"]}
            }
        return choice


class TemplatedRequest(ApiRequest):
    """Fields that the endpoints with a chat template have in common."""

    tools: list[Tool] | None = Field(None, max_length=MAX_TOOLS)
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    parallel_tool_calls: StrictBool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    thinking_token_budget: StrictInt | None = Field(
        None, ge=0, description="maximum number of reasoning tokens"
    )

    uses_chat_template: ClassVar[bool] = True

    @property
    def offered_tools(self) -> list[Tool]:
        """Return the tools that the model may call: `tools`, or [] if `tool_choice` is "none"."""
        return [] if self.tool_choice == "none" else self.tools or []

    @property
    def requires_calls(self) -> bool:
        """Return whether the reply must consist of function calls, without text."""
        return self.tool_choice == "required" or isinstance(self.tool_choice, NamedTool)

    @property
    def effort(self) -> str | None:
        """Return the requested reasoning effort; None: the template's default."""
        return None

    @property
    def template_settings(self) -> dict[str, Any]:
        """Return the template variables that the request sets in other fields than
        `chat_template_kwargs`, such as `tools`."""
        offered = [tool.model_dump(exclude_unset=True) for tool in self.offered_tools]
        tools: dict[str, Any] = {"tools": offered} if offered else {}
        return tools | ({} if self.effort is None else {"reasoning_effort": self.effort})

    @property
    def template_variables(self) -> dict[str, Any] | None:
        return {**(self.chat_template_kwargs or {}), **self.template_settings} or None

    def require(self) -> None:
        given = self.chat_template_kwargs or {}
        for name, value in self.template_settings.items():
            if name in given and given[name] != value:
                problem = f"chat_template_kwargs and another field give different values of {name}"
                raise BadRequestError(f"{problem}; remove one value", "chat_template_kwargs")
        if self.requires_calls and self.structured_outputs is not None:
            problem = "structured_outputs constrains text, but tool_choice requires calls"
            raise BadRequestError(f"{problem}; leave out one of the two", "structured_outputs")
        choice, names = self.tool_choice, [tool.function.name for tool in self.tools or ()]
        if choice not in (None, "none") and not names:
            raise BadRequestError("tool_choice needs tools; give tools", "tool_choice")
        if isinstance(choice, NamedTool) and choice.function.name not in names:
            known = ", ".join(map(repr, names))
            problem = f"tool_choice is {choice.function.name!r}, not in tools; give one of {known}"
            raise BadRequestError(problem[:300], "tool_choice")
        require_small(self.chat_template_kwargs, "chat_template_kwargs", MAX_VARIABLES_CHARACTERS)
        require_small(
            [tool.model_dump() for tool in self.tools or ()], "tools", MAX_VARIABLES_CHARACTERS
        )
        for i, tool in enumerate(self.tools or ()):
            place, parameters = f"tools[{i}].function.parameters", tool.function.parameters
            require_small(parameters, place)
            if (kind := (parameters or {}).get("type", "object")) != "object":
                raise BadRequestError(
                    f"{place} has the type {format_value(kind)}; give the type 'object'", place
                )
        super().require()

    def get_reply_requirements(self, facts: ReplyFacts | None) -> ReplyRequirements | None:
        choice, functions = self.tool_choice, [tool.function for tool in self.offered_tools]
        if isinstance(choice, NamedTool):
            functions = [each for each in functions if each.name == choice.function.name]
        budget = self.thinking_token_budget is not None
        if facts is None or not (functions or facts.thinks or facts.template or budget):
            return None
        return ReplyRequirements(
            tuple(FunctionSignature(f.name, f.parameters, f.description) for f in functions),
            required=self.requires_calls,
            parallel=self.parallel_tool_calls is not False and not isinstance(choice, NamedTool),
        )
