"""The arguments of an engine's process, and the messages that it exchanges with the HTTP process
over a pipe. Arguments and messages are plain data, which can be pickled without torch."""

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
    """Arguments of an engine's process.

    Attributes:
        target: The target, as for `foretoken.load`.
        draft: The draft, as for `foretoken.load`.
        loading: Other keyword arguments of `foretoken.load`.
        engine: Keyword arguments of `Engine`.
        log_options: Logging of the process.
        costs: Costs of steps that another engine measured, pickled; None: measure them.
        adapters: Adapters of engines that start later; checked before the models load.
        chat_template: Jinja template; None: the model's own.
        tool_parser: Name of the format of replies, or "auto".
        max_pixels: Maximum pixels of an image.
        max_seconds: Maximum seconds of an audio file.
    """

    target: str | None
    draft: str | None
    loading: dict[str, Any] = field(default_factory=dict[str, Any])
    engine: dict[str, Any] = field(default_factory=dict[str, Any])
    log_options: LogOptions = LogOptions()
    costs: bytes | None = None
    adapters: tuple[str, ...] = ()
    chat_template: str | None = None
    tool_parser: str = "auto"
    max_pixels: int = 25_000_000
    max_seconds: int = 3600


@dataclass(frozen=True, slots=True)
class GenerateRequest:
    """Request for one output. `RequestPreparer` converts it to arguments of `Engine.add`."""

    prompt: Prompt
    controls: Controls = field(default_factory=Controls)  # fields of SamplingParams
    seed: tuple[int, int] = (0, 0)
    gamma: int | None = None  # draft tokens per target call; None: automatic
    rule: str | None = None  # None: the engine's rule
    lenience: float | None = None  # None: the engine's lenience
    cache_salt: str = ""
    priority: int = 0
    prediction: str | None = None
    chat_template: str | None = None  # None: the model's own template
    chat_template_kwargs: dict[str, Any] | None = None
    # Maximum new tokens if max_new_tokens is not set; None: up to the context length
    default_new_tokens: int | None = None
    begun: PartialOutput | None = None  # output to continue, from an engine that has died
    show_steps: bool = False  # also report the text of each token of the steps
    echo: bool = False  # also report the prompt as a string
    reply_requirements: ReplyRequirements | None = None  # None: the reply is not parsed
    thinking_budget: int | None = None
    return_prompt_ids: bool = False
    bad_words: tuple[str, ...] = ()  # strings that must not be generated

    @property
    def is_constrained(self) -> bool:
        """Return whether a grammar may have to be compiled for the request: the request has a
        constraint, or functions that the reply may call."""
        return bool(
            self.controls.get("structured")
            or (self.reply_requirements and self.reply_requirements.functions)
        )


@dataclass(frozen=True, slots=True)
class TranscribeRequest:
    """Request to transcribe an audio file. The fields are arguments of
    `speech.transcription.transcribe`, except `audio`: the bytes of the file."""

    audio: bytes
    language: str | None = None
    translate: bool = False
    prompt: str | None = None  # text that precedes the audio
    temperature: float = 0.0
    gamma: int | None = None
    words: bool = False  # return the timestamps of words


AnyRequest = GenerateRequest | TranscribeRequest


@dataclass(frozen=True, slots=True)
class Add:
    """Message to the engine: start a request, with an id that is not in use."""

    id: int
    request: AnyRequest


@dataclass(frozen=True, slots=True)
class Abort:
    """Message to the engine: abort a request, as its client has disconnected."""

    id: int


@dataclass(frozen=True, slots=True)
class Ask:
    """Message to the engine: answer a query. `name`: the method of `Queries` that answers."""

    id: int
    name: Query
    arguments: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Stop:
    """Message to the engine: end the process."""


@dataclass(frozen=True, slots=True)
class ReplyFacts:
    """Format of a model's replies. Replies that must contain calls, and all replies without a
    `template` of the tokenizer, are parsed in `format`; other replies are parsed by `template`."""

    format: str  # name of a format in `text.replies`
    is_known: bool = False  # whether the chat template uses `format`; if not, it is a default
    thinks: bool = False  # whether the chat template supports reasoning
    template: dict[str, Any] | None = None


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """Message from the engine that it is ready, with a description of its models."""

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
    media: tuple[str, ...]  # supported media in messages: "image", "audio"
    transcribes: bool
    suggested: dict[str, Any]  # temperature, top_p, top_k of the generation config, or None
    max_rows: int
    pid: int
    costs: bytes  # costs of steps, for other engines; pickled, as the HTTP process lacks torch


@dataclass(frozen=True, slots=True)
class LoadFailed:
    """Message from the engine: the models cannot be loaded (`message`), so the process ends."""

    message: str


@dataclass(frozen=True, slots=True)
class Reply:
    """Message from the engine: the answer to an `Ask`, or a finished transcription."""

    id: int
    value: Any


@dataclass(frozen=True, slots=True)
class Refusal:
    """Message from the engine: a request or query is refused or has failed. `option`: the engine's
    argument that caused the refusal, if any."""

    id: int
    kind: RefusalKind
    message: str
    option: str | None = None


@dataclass(frozen=True, slots=True)
class TranscriptDelta:
    """Message from the engine: new text of a transcription, or "" to report that it still runs."""

    id: int
    text: str


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """A token with its logprob, and the most probable tokens at its position."""

    text: str  # the token's text, as `TokenSpelling` returns it
    bytes: bytes
    logprob: float
    top: list[tuple[str, bytes, float, int]]  # text, bytes, logprob, id
    id: int
    rank: int
    offset: int  # number of characters before the token, in the echoed prompt and the output


@dataclass(frozen=True, slots=True)
class Accepted:
    """Message from the engine that it has accepted a request, sent before the request's outputs."""

    id: int
    prompt_tokens: int  # length of the prompt
    echo: str = ""  # the prompt as a string, if the request has `echo`
    first_prompt_token: tuple[TokenLogprob, ...] = ()  # with `echo`; this token has no logprob
    tail: str = ""  # the decoded end of the prompt with special tokens, if the reply is parsed
    prompt_ids: list[int] | None = None  # if the request has `return_prompt_ids`


@dataclass(frozen=True, slots=True)
class Done:
    """The end of an output, in its last `StepOutput`."""

    reason: str  # "stop" or "length"
    stop: int | str | None  # stop token or stop string; None: an EOS token or a limit
    stats: Stats
    prompt_logprobs: list[TokenLogprob] | None


@dataclass(frozen=True, slots=True)
class StepOutput:
    """The new output of one request after a step."""

    id: int
    texts: list[str]  # text that each token adds to the output
    tokens: list[int]
    logprobs: list[TokenLogprob] | None
    steps: list[StepRecord]  # usually one
    done: Done | None = None  # None: the output is unfinished
    token_texts: dict[int, str] | None = None  # with show_steps: text of each token of the steps

    @property
    def text(self) -> str:
        return "".join(self.texts)


@dataclass(frozen=True, slots=True)
class StepOutputs:
    """Message from the engine: the outputs and failures of a step, and current counts."""

    parts: list[StepOutput | Refusal]
    running: int  # number of running requests after the step
    waiting: int  # number of waiting requests after the step
    preempted: int  # number of preemptions since the process started


ToEngine = Add | Abort | Ask | Stop
FromEngine = ModelInfo | LoadFailed | Accepted | TranscriptDelta | Reply | Refusal | StepOutputs
