"""Arguments of an engine's process, and messages on the pipe between it and the HTTP process: plain
data."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal, TypeGuard

from foretoken.records import PartialOutput, Stats, StepRecord
from foretoken.sampling.params import Controls
from foretoken.server.options import LogOptions
from foretoken.text import messages as chat_messages
from foretoken.text.replies.grammar import ReplyRequirements

Query = Literal["tokenize", "detokenize", "speculation"]
Prompt = str | list[int] | list[dict[str, Any]]  # a text, ids, or messages
RefusalKind = Literal["input", "length", "busy", "refused", "failed", "dead"]


def is_chat(prompt: Prompt) -> TypeGuard[list[dict[str, Any]]]:
    """Return whether a prompt is messages."""
    return isinstance(prompt, list) and bool(prompt) and isinstance(prompt[0], dict)


def holds_media(prompt: Prompt) -> bool:
    """Return whether a prompt is messages with pictures or sounds among their parts."""
    return is_chat(prompt) and chat_messages.has_media(prompt)


@dataclass(frozen=True, slots=True)
class EngineSetup:
    """Arguments of an engine's process: those of `foretoken.load` and of `Engine`."""

    target: str | None
    draft: str | None
    loading: dict[str, Any] = field(default_factory=dict[str, Any])
    engine: dict[str, Any] = field(default_factory=dict[str, Any])
    log_options: LogOptions = LogOptions()
    costs: bytes | None = None  # pickled costs of steps, if they were measured elsewhere
    adapters: tuple[str, ...] = ()  # of engines that start later: checked before this one loads
    chat_template: str | None = None  # None: the model's own
    tool_parser: str = "auto"
    max_pixels: int = 25_000_000  # of an image
    max_seconds: int = 3600  # of audio


@dataclass(frozen=True, slots=True)
class GenerateRequest:
    """Request for one output: arguments of `Engine.add`, in plain data."""

    prompt: Prompt
    controls: Controls = field(default_factory=Controls)  # fields of SamplingParams
    seed: tuple[int, int] = (0, 0)
    gamma: int | None = None  # draft tokens per target call; None: automatic
    rule: str | None = None  # None: the engine's, as of lenience
    lenience: float | None = None
    cache_salt: str = ""
    priority: int = 0
    prediction: str | None = None
    chat_template: str | None = None  # None: the model's own
    chat_template_kwargs: dict[str, Any] | None = None
    default_new_tokens: int | None = None  # without max_new_tokens; None: the context
    begun: PartialOutput | None = None  # the output so far of an engine that died
    show_steps: bool = False  # return the text of each token of the steps
    echo: bool = False  # return the prompt
    reply_requirements: ReplyRequirements | None = (
        None  # of a reply that is read for thoughts and calls
    )
    thinking_budget: int | None = None
    return_prompt_ids: bool = False
    bad_words: tuple[str, ...] = ()  # strings that are not generated

    @property
    def is_constrained(self) -> bool:
        """True if its output may have to follow a grammar."""
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
    prompt: str | None = None  # text before it
    temperature: float = 0.0
    gamma: int | None = None
    words: bool = False  # return when each was said


AnyRequest = GenerateRequest | TranscribeRequest


@dataclass(frozen=True, slots=True)
class Add:
    """A request, under an id that no other has had."""

    id: int
    request: AnyRequest


@dataclass(frozen=True, slots=True)
class Abort:
    """The end of a request whose client has left."""

    id: int


@dataclass(frozen=True, slots=True)
class Ask:
    """A question that takes no step."""

    id: int
    name: Query
    arguments: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Stop:
    """The end of the engine's process."""


@dataclass(frozen=True, slots=True)
class ReplyFacts:
    """Format of a model's replies: the tokenizer's own response template, or a format of
    `text.replies`, which is also that of forced calls."""

    format: str
    is_known: bool = False  # the chat template uses it
    thinks: bool = False
    template: dict[str, Any] | None = None


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """Facts of the models that an engine has loaded, sent once it is ready."""

    target: str
    draft: str | None
    context: int | None  # tokens of prompt and output at most; None without a limit
    vocab_size: int
    chat: bool  # the tokenizer has a chat template
    text: bool  # there is a tokenizer
    runtime: str
    draft_runtime: str | None
    dtype: str
    replies: ReplyFacts
    media: tuple[str, ...]  # kinds of parts of messages other than text
    transcribes: bool
    suggested: dict[str, Any]  # temperature, top_p, top_k of the generation config, or None
    max_rows: int
    pid: int
    costs: bytes  # of steps, pickled: for other engines, as only these import torch


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
    """End of a request or question that is invalid or failed; `option`: the argument of the engine
    that it is about, if any."""

    id: int
    kind: RefusalKind
    message: str
    option: str | None = None


@dataclass(frozen=True, slots=True)
class TranscriptDelta:
    """New text of a transcription; "": it still runs."""

    id: int
    text: str


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """A token, its logprob, and the most probable ones there: text, bytes, logprob, id. `text`: its
    name, as `TokenSpelling` has it."""

    text: str
    bytes: bytes
    logprob: float
    top: list[tuple[str, bytes, float, int]]
    id: int
    rank: int
    offset: int  # characters before it, of an echoed prompt and the output


@dataclass(frozen=True, slots=True)
class Accepted:
    """First message about a request, once the engine has it. `echo`: the prompt's text, and
    `first_prompt_token` its first token, if they are returned; `tail`: its end, special tokens
    included, if the reply is parsed; `prompt_ids`: its ids, if they are returned."""

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
    """Output of a request in a step. `texts`: the text that each token added."""

    id: int
    texts: list[str]
    tokens: list[int]
    logprobs: list[TokenLogprob] | None
    steps: list[StepRecord]  # most often one
    done: Done | None = None
    token_texts: dict[int, str] | None = None  # text of each token of the steps, with show_steps

    @property
    def text(self) -> str:
        return "".join(self.texts)


@dataclass(frozen=True, slots=True)
class StepOutputs:
    """Outputs of a step and failures in it; the numbers of running and waiting requests after it,
    and of preemptions since the process began."""

    parts: list[StepOutput | Refusal]
    running: int
    waiting: int
    preempted: int


ToEngine = Add | Abort | Ask | Stop
FromEngine = ModelInfo | LoadFailed | Accepted | TranscriptDelta | Reply | Refusal | StepOutputs
