"""Messages on the pipe between the HTTP process and the engine's process: plain data."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, TypeGuard

from foretoken.records import Begun, Stats, StepRecord
from foretoken.sampling.params import Controls
from foretoken.text import chat
from foretoken.text.replies.grammar import Wish

Prompt = str | list[int] | list[dict[str, Any]]  # a text, ids, or messages
Kind = Literal["input", "length", "busy", "refused", "failed", "dead"]


def is_chat(prompt: Prompt) -> TypeGuard[list[dict[str, Any]]]:
    """Return whether a prompt is messages."""
    return isinstance(prompt, list) and bool(prompt) and isinstance(prompt[0], dict)


def holds_media(prompt: Prompt) -> bool:
    """Return whether a prompt is messages with pictures or sounds among their parts."""
    return is_chat(prompt) and chat.holds_media(prompt)


@dataclass(frozen=True, slots=True)
class GenerateRequest:
    """Request for one text: what `Engine.add` takes, in plain data."""

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
    most_tokens: int | None = None  # new ones where no max_new_tokens is set; None: the context
    begun: Begun | None = None  # what an engine that died has written
    show_steps: bool = False  # whether texts of the steps' tokens are told
    echo: bool = False  # whether the prompt is told again
    wish: Wish | None = None  # of a reply that is read for thoughts and calls
    thinking_budget: int | None = None
    tell_ids: bool = False  # of the prompt
    bad_words: tuple[str, ...] = ()  # texts that are not written

    @property
    def constrained(self) -> bool:
        """True where its text may have to follow a grammar."""
        return bool(self.controls.get("structured") or (self.wish and self.wish.functions))


@dataclass(frozen=True, slots=True)
class Add:
    """A request, under an id that no other has had."""

    id: int
    request: GenerateRequest


@dataclass(frozen=True, slots=True)
class TranscribeRequest:
    """Request to write down a sound."""

    audio: bytes  # of a file
    language: str | None = None
    translate: bool = False
    prompt: str | None = None  # text before it
    temperature: float = 0.0
    gamma: int | None = None
    words: bool = False  # whether to tell when each was said


@dataclass(frozen=True, slots=True)
class Transcribe:
    """A sound to be written down, under an id that no other request has had."""

    id: int
    request: TranscribeRequest


@dataclass(frozen=True, slots=True)
class Abort:
    """A request that nobody waits for any more."""

    id: int


@dataclass(frozen=True, slots=True)
class Ask:
    """A question that no step answers: "tokenize", "detokenize" or "speculation"."""

    id: int
    name: str
    arguments: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Stop:
    """The end."""


@dataclass(frozen=True, slots=True)
class ReplyFacts:
    """The way in which a model's replies are read: by the tokenizer's own response template, or in
    a format of `text.replies`, which is also that of forced calls."""

    format: str
    known: bool = False  # whether the chat template writes it
    thinks: bool = False
    template: dict[str, Any] | None = None


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """Facts of the models that an engine has loaded."""

    target: str
    draft: str | None
    context: int | None  # tokens of a text at most; None without a limit
    vocab_size: int
    chat: bool  # whether the tokenizer has a chat template
    text: bool  # whether there is a tokenizer
    runtime: str
    draft_runtime: str | None
    dtype: str
    replies: ReplyFacts
    media: tuple[str, ...]  # kinds of parts of messages that it reads beside text
    transcribes: bool
    suggested: dict[str, Any]  # temperature, top_p, top_k of the generation config, or None
    max_rows: int
    pid: int
    costs: bytes  # of steps, pickled: for other engines, and read only where torch is


@dataclass(frozen=True, slots=True)
class Ready:
    """The models are loaded."""

    info: ModelInfo


@dataclass(frozen=True, slots=True)
class Failed:
    """The models cannot be loaded."""

    message: str


@dataclass(frozen=True, slots=True)
class Reply:
    """Answer to an `Ask`."""

    id: int
    value: Any


@dataclass(frozen=True, slots=True)
class Refusal:
    """End of an `Add` or an `Ask` that is not honoured, or of a request that failed; `option`: the
    argument of the engine that it is about, if one is."""

    id: int
    kind: Kind
    message: str
    option: str | None = None


@dataclass(frozen=True, slots=True)
class Heard:
    """New text of a sound; "": it is being listened to."""

    id: int
    text: str


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """A token of a text, how likely it was, and the likeliest there: text, bytes, logprob, id.
    `text`: its name, as `Spelling` has it."""

    text: str
    bytes: bytes
    logprob: float
    top: list[tuple[str, bytes, float, int]]
    id: int
    rank: int
    offset: int  # characters before it, of an echoed prompt and the text


@dataclass(frozen=True, slots=True)
class Accepted:
    """Word that the engine has a request: comes before anything else about it. `echo`: the prompt's
    text, and `first` its first token, where it is told again; `tail`: its end, special tokens
    included, where the reply is read; `ids`: its ids, where they are told."""

    id: int
    prompt_tokens: int
    echo: str = ""
    first: tuple[TokenLogprob, ...] = ()
    tail: str = ""
    ids: list[int] | None = None


class Pace(NamedTuple):
    """Time of a text behind its first step, which reads the prompt, and what it depends on."""

    tokens: int
    seconds: float
    length: int  # tokens that prompt and text may have
    rows: int  # that shared its steps


@dataclass(frozen=True, slots=True)
class Done:
    """End of a text, and what it cost; `pace` is None where it cannot be compared."""

    reason: str  # "stop" or "length"
    stop: int | str | None
    stats: Stats
    prompt_logprobs: list[TokenLogprob] | None
    pace: Pace | None = None


@dataclass(frozen=True, slots=True)
class StepOutput:
    """Addition of a step to a text. `texts`: what each of the tokens added."""

    id: int
    texts: list[str]
    tokens: list[int]
    logprobs: list[TokenLogprob] | None
    steps: list[StepRecord]  # most often one
    done: Done | None = None
    words: dict[int, str] | None = None  # texts of the steps' tokens, for a request that shows them

    @property
    def text(self) -> str:
        return "".join(self.texts)


@dataclass(frozen=True, slots=True)
class StepOutputs:
    """Additions of a step to all texts; how many run and wait after it, and how often one was
    preempted since the process began."""

    parts: list[StepOutput]
    running: int
    waiting: int
    preempted: int


ToEngine = Add | Transcribe | Abort | Ask | Stop
FromEngine = Ready | Failed | Accepted | Heard | Reply | Refusal | StepOutputs
