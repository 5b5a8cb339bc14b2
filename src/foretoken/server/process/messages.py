"""Arguments of an engine's process, and messages on the pipe between it and the HTTP process. All
are plain data."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal, TypeGuard

from foretoken.records import PartialOutput, Stats, StepRecord
from foretoken.sampling.params import Controls
from foretoken.server.options import LogOptions
from foretoken.text import messages as chat_messages
from foretoken.text.replies.grammar import ReplyRequirements

Query = Literal["tokenize", "detokenize", "speculation"]
Prompt = str | list[int] | list[dict[str, Any]]  # a string, ids, or messages
RefusalKind = Literal["input", "length", "busy", "refused", "failed", "dead"]


def is_chat(prompt: Prompt) -> TypeGuard[list[dict[str, Any]]]:
    """Return whether a prompt is a list of messages."""
    return isinstance(prompt, list) and bool(prompt) and isinstance(prompt[0], dict)


def holds_media(prompt: Prompt) -> bool:
    """Return whether a prompt is a list of messages with images or audio."""
    return is_chat(prompt) and chat_messages.has_media(prompt)


@dataclass(frozen=True, slots=True)
class EngineSetup:
    """Arguments of an engine's process: those of `foretoken.load` and `Engine`, and of requests."""

    target: str | None
    draft: str | None
    loading: dict[str, Any] = field(default_factory=dict[str, Any])
    engine: dict[str, Any] = field(default_factory=dict[str, Any])
    log_options: LogOptions = LogOptions()
    costs: bytes | None = None  # pickled costs of steps, if measured by another engine
    adapters: tuple[str, ...] = ()  # of engines that start later; checked before this one loads
    chat_template: str | None = None  # None: the model's own
    tool_parser: str = "auto"
    max_pixels: int = 25_000_000  # of an image
    max_seconds: int = 3600  # of audio


@dataclass(frozen=True, slots=True)
class GenerateRequest:
    """Request for one output: arguments of `Engine.add`, as plain data."""

    prompt: Prompt
    controls: Controls = field(default_factory=Controls)  # fields of SamplingParams
    seed: tuple[int, int] = (0, 0)
    gamma: int | None = None  # draft tokens per target call; None: automatic
    rule: str | None = None  # None: the engine's
    lenience: float | None = None  # None: the engine's
    cache_salt: str = ""
    priority: int = 0
    prediction: str | None = None
    chat_template: str | None = None  # None: the model's own
    chat_template_kwargs: dict[str, Any] | None = None
    default_new_tokens: int | None = None  # if max_new_tokens is not set; None: up to the context
    begun: PartialOutput | None = None  # output so far, from an engine that died
    show_steps: bool = False  # return the text of each token of the steps
    echo: bool = False  # return the prompt
    reply_requirements: ReplyRequirements | None = None  # None: reply is not parsed
    thinking_budget: int | None = None
    return_prompt_ids: bool = False
    bad_words: tuple[str, ...] = ()  # strings that must not be generated

    @property
    def is_constrained(self) -> bool:
        """Return whether the output may have to follow a grammar."""
        return bool(
            self.controls.get("structured")
            or (self.reply_requirements and self.reply_requirements.functions)
        )


@dataclass(frozen=True, slots=True)
class TranscribeRequest:
    """Request to transcribe an audio file: arguments of `transcribe`."""

    audio: bytes
    language: str | None = None
    translate: bool = False
    prompt: str | None = None  # preceding text
    temperature: float = 0.0
    gamma: int | None = None
    words: bool = False  # return the timestamps of words


AnyRequest = GenerateRequest | TranscribeRequest


@dataclass(frozen=True, slots=True)
class Add:
    """Submits a request under an unused id."""

    id: int
    request: AnyRequest


@dataclass(frozen=True, slots=True)
class Abort:
    """Aborts a request whose client has disconnected."""

    id: int


@dataclass(frozen=True, slots=True)
class Ask:
    """A query, which takes no step."""

    id: int
    name: Query
    arguments: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Stop:
    """Ends the engine's process."""


@dataclass(frozen=True, slots=True)
class ReplyFacts:
    """Format of a model's replies: the tokenizer's own response template, or else a format of
    `text.replies`. Required calls always use that format."""

    format: str
    is_known: bool = False  # whether the chat template uses `format`; else it is the default
    thinks: bool = False  # whether the chat template has reasoning
    template: dict[str, Any] | None = None


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """Facts about an engine's models, sent once it is ready."""

    target: str
    draft: str | None
    context: int | None  # maximum tokens of prompt and output; None: no limit
    vocab_size: int
    chat: bool  # the tokenizer has a chat template
    text: bool  # the model has a tokenizer
    runtime: str
    draft_runtime: str | None
    dtype: str
    replies: ReplyFacts
    media: tuple[str, ...]  # supported parts of messages besides text
    transcribes: bool
    suggested: dict[str, Any]  # temperature, top_p, top_k of the generation config, or None
    max_rows: int
    pid: int
    costs: bytes  # costs of steps, for other engines; pickled, as the HTTP process lacks torch


@dataclass(frozen=True, slots=True)
class LoadFailed:
    """The models cannot be loaded."""

    message: str


@dataclass(frozen=True, slots=True)
class Reply:
    """Answer to an `Ask`, or a finished transcription."""

    id: int
    value: Any


@dataclass(frozen=True, slots=True)
class Refusal:
    """Refusal or failure of a request or query; `option`: the engine's argument that caused it, if
    any."""

    id: int
    kind: RefusalKind
    message: str
    option: str | None = None


@dataclass(frozen=True, slots=True)
class TranscriptDelta:
    """New text of a transcription; "" shows that it still runs."""

    id: int
    text: str


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """A token, its logprob and rank, and the most probable tokens at its position, as (name, bytes,
    logprob, id). `text`: its name, as `TokenSpelling` returns it."""

    text: str
    bytes: bytes
    logprob: float
    top: list[tuple[str, bytes, float, int]]
    id: int
    rank: int
    offset: int  # characters before it, in the echoed prompt and the output


@dataclass(frozen=True, slots=True)
class Accepted:
    """First message about a request: the engine accepted it. If requested: `echo`, the prompt as a
    string; `first_prompt_token`; `prompt_ids`. If the reply is parsed: `tail`, the end of the
    prompt, with special tokens."""

    id: int
    prompt_tokens: int
    echo: str = ""
    first_prompt_token: tuple[TokenLogprob, ...] = ()
    tail: str = ""
    prompt_ids: list[int] | None = None


@dataclass(frozen=True, slots=True)
class Done:
    """End of an output."""

    reason: str  # "stop" or "length"
    stop: int | str | None
    stats: Stats
    prompt_logprobs: list[TokenLogprob] | None


@dataclass(frozen=True, slots=True)
class StepOutput:
    """Output of a request in a step. `texts`: the text that each token adds."""

    id: int
    texts: list[str]
    tokens: list[int]
    logprobs: list[TokenLogprob] | None
    steps: list[StepRecord]  # usually one
    done: Done | None = None
    token_texts: dict[int, str] | None = None  # text of each token of the steps, with show_steps

    @property
    def text(self) -> str:
        return "".join(self.texts)


@dataclass(frozen=True, slots=True)
class StepOutputs:
    """Outputs and failures of a step; the numbers of running and waiting requests after it, and of
    preemptions since the process started."""

    parts: list[StepOutput | Refusal]
    running: int
    waiting: int
    preempted: int


ToEngine = Add | Abort | Ask | Stop
FromEngine = ModelInfo | LoadFailed | Accepted | TranscriptDelta | Reply | Refusal | StepOutputs
