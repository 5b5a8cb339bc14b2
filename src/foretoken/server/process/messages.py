"""What goes through the pipe between HTTP process and engine process: plain data."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

Kind = Literal["input", "length", "busy", "refused", "failed", "dead"]


@dataclass(frozen=True, slots=True)
class Add:
    """A request: one text. `options`: keywords of `Engine.add`; without "max_new_tokens" the text
    may fill the context, or get "most_tokens"."""

    id: int
    prompt: str | list[int] | list[dict[str, Any]]
    options: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Abort:
    """A request that nobody waits for any more."""

    id: int


@dataclass(frozen=True, slots=True)
class Ask:
    """A question that no step answers: "tokenize", "detokenize", "speculation", and
    "ledger", what that is made from."""

    id: int
    name: str
    arguments: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Stop:
    """The end."""


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
    suggested: dict[
        str, Any
    ]  # temperature, top_p, top_k of the generation config, where it has them
    max_rows: int
    pid: int
    costs: bytes  # of steps, pickled: for other engines, and read only where torch is


@dataclass(frozen=True, slots=True)
class Ready:
    """The models are loaded."""

    info: ModelInfo


@dataclass(frozen=True, slots=True)
class Failed:
    """They cannot be."""

    message: str


@dataclass(frozen=True, slots=True)
class Reply:
    """To an `Ask`, or how many tokens the prompt of an `Add` has."""

    id: int
    value: Any


@dataclass(frozen=True, slots=True)
class Refusal:
    """An `Add` or an `Ask` that is not honoured, or a request that failed on its way; `option`: the
    argument of the engine that it is about, if one is."""

    id: int
    kind: Kind
    message: str
    option: str | None = None


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """A token of a text, how likely it was, and the likeliest there: text, bytes, logprob, id."""

    text: str
    bytes: bytes
    logprob: float
    top: list[tuple[str, bytes, float, int]]
    id: int
    rank: int


@dataclass(frozen=True, slots=True)
class Done:
    """How a text ended, and what it took."""

    reason: str  # "stop" or "length"
    stop: int | str | None
    stats: dict[str, Any]
    prompt_logprobs: list[TokenLogprob] | None


@dataclass(frozen=True, slots=True)
class StepOutput:
    """What a step added to a text."""

    id: int
    text: str
    tokens: list[int]
    logprobs: list[TokenLogprob] | None
    steps: list[dict[str, Any]]
    done: Done | None


@dataclass(frozen=True, slots=True)
class StepOutputs:
    """What a step added to all texts, how many run and wait behind it, and how often one had to
    give up its place since the process began."""

    parts: list[StepOutput]
    running: int
    waiting: int
    preempted: int


ToEngine = Add | Abort | Ask | Stop
FromEngine = Ready | Failed | Reply | Refusal | StepOutputs
