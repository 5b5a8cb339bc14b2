"""A model, as the step knows it: it scores blocks of new tokens for rows of different lengths.

A row's length is the number of its tokens in the cache. Rows are numbered by their place in the
batch.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor

from foretoken.errors import InputError
from foretoken.media.inputs import Media
from foretoken.models.shown import Known

Blocks = list[list[int]] | Tensor


def counts_of(blocks: Blocks, need: list[int]) -> list[int]:
    """Return how many tokens each row gains."""
    return need if isinstance(blocks, Tensor) else [len(block) for block in blocks]


class Scorer(Protocol):
    """The target as a step needs it, with its rows present already."""

    vocab_size: int  # rows of the output layer, padding included
    device: torch.device
    takes_tensors: bool  # blocks may be a tensor, whose tokens the host does not know

    @property
    def padding(self) -> int:
        """Positions that the last pass computed beside the blocks."""
        ...

    def score(self, blocks: Blocks, need: list[int]) -> Tensor:
        """Append block b to row b, for all rows, in one run; a block may be empty.

        A tensor `[B, W]` on the model's device is padded on the right with any ids: block b is the
        first need[b] tokens of row b.

        Returns logits `[B, max(need), V]`, valid until the next run: in row b those of the last
        need[b] tokens of its block, then finite padding.
        """
        ...

    def set_lengths(self, lengths: list[int]) -> None:
        """Keep this many tokens of each row: commit and rollback in one. No length may grow."""
        ...


class Model(Scorer, Protocol):
    """A target or a draft."""

    context: int | None  # tokens a row can hold; None: no limit
    encoder_decoder: bool
    source_context: int | None  # tokens the encoder can read; None: no limit, or no encoder
    source_vocab_size: int | None  # ids the encoder knows; None: no encoder
    runtime: str  # what it runs on, for reports
    computed: str  # the dtype of its arithmetic: "float32", "bfloat16", "int8", ...

    def start(self, prompts: list[list[int]], sources: list[list[int]] | None = None) -> None:
        """Rows join behind those present, with all of `prompts`, which may be empty, in the cache.

        `sources`: what the encoder reads, once; None for decoder-only models.
        """
        ...

    def permute(self, rows: list[int]) -> None:
        """Row b becomes what row rows[b] was; rows may be repeated or left out."""
        ...

    def leave(self, rows: list[int]) -> None:
        """These rows are finished; those behind move up."""
        ...


def require_model(value: object) -> None:
    """Raise InputError for anything else, such as the Speculator that holds a model."""
    if isinstance(value, type) or not hasattr(value, "score"):
        raise InputError(f"{value!r:.60} is no model; give that of a Speculator: load(...).target")


@runtime_checkable
class Switches(Model, Protocol):
    """A model that reads a text of more than `context` tokens in another way, all of it: a row that
    outgrows `context` has to join again."""

    longest: int | None  # tokens that a row can hold that joins as a long one

    @property
    def long(self) -> list[bool]:
        """Which rows joined as long ones."""
        ...

    def beyond(self, on: bool) -> None:
        """The rows that join next hold more than `context` tokens, the one to come included."""
        ...


@runtime_checkable
class Rewinds(Model, Protocol):
    """A model whose rows may go back only so far, not behind where they began with what is kept of
    another text, or to their beginning."""

    @property
    def rewind(self) -> int | None:
        """Tokens; None: to any length."""
        ...


@runtime_checkable
class ReadsPrompts(Model, Protocol):
    """A model whose logits depend on where the prompt of a text ends, as those under guidance."""

    def prompted(self, lengths: list[int]) -> None:
        """The rows that join next have prompts of so many tokens, whatever they join with; 0: up to
        the first token whose logits are asked for."""
        ...


@runtime_checkable
class ReadsMedia(Model, Protocol):
    """A model that reads media with prompts. With media a row joins with all of its prompt; an
    encoder then reads the media instead of a source."""

    attached: list[Media | None]  # of the rows that join next; []: none has any
    needs_media: bool  # its encoder reads no ids: a source only stands for media, to be measured by

    def objection(self, media: Media) -> str | None:
        """Say why the model cannot read these, or None; tried on the first ones of their kind."""
        ...


def longest(model: Model) -> int | None:
    """Tokens that a row can come to hold, if it joins again where it has to; None: no limit."""
    return model.longest if isinstance(model, Switches) else model.context


@runtime_checkable
class Keeps(Protocol):
    """A model, or a drafter without one, that can keep texts that have left for others."""

    def remember(self, on: bool) -> None:
        """Keep it from now on, or forget it all."""
        ...

    def salted(self, salt: str) -> None:
        """The rows that join next share only with rows of the same salt."""
        ...


class TokenChoice(NamedTuple):
    """The way to a token from a draft's logits: the most probable one, or one drawn by its number
    after temperature, top-k, top-p and min-p."""

    V: int  # the target's ids
    ids: Tensor | None = None  # [Vd], those that the draft's outputs stand for; None: the same
    filters: tuple[float, int, float, float] | None = None  # None: the most probable
    numbers: Tensor | None = None  # [G, B], in [0, 1)


class ChainedTokens(NamedTuple):
    """A draft's tokens; entries past a row's own mean nothing."""

    tokens: Tensor  # [B, G], the target's ids
    tops: Tensor  # [B, G], the largest logits: NaN and infinities show in them
    q: Tensor | None  # [B, G, V], the distributions that they were drawn from
    masses: Tensor  # [B, G], float64, those of the distributions


@runtime_checkable
class Chains(Model, Protocol):
    """A model that makes a draft's tokens in one call."""

    def chain(
        self,
        blocks: list[list[int]],
        budget: list[int],
        choice: TokenChoice,
        embeddings: Tensor | None = None,
    ) -> ChainedTokens:
        """Read blocks as `score` does, and make up to budget[b] tokens after row b's: each one is
        read in turn, as by `score`, but the last.

        embeddings: those that a decoder of pairs reads, `[V, E]`; None for others.
        """
        ...


@runtime_checkable
class Remembers(Model, Keeps, Protocol):
    """A model that can keep what it has read of texts, for others that begin alike."""

    recalled: list[int]  # how many tokens of each row that joined last were not read

    def known(self, prompt: list[int]) -> int:
        """Return how many of a prompt's first tokens need not be read."""
        ...


@runtime_checkable
class Encodes(Model, Protocol):
    """A model with an encoder, which says how long it has run."""

    encoder_seconds: float  # since the model was made; on a device, until its work was handed over


@runtime_checkable
class BatchInvariant(Protocol):
    """A model that knows whether its logits are a function of the text, to the bit, whatever is
    read with a token and in whatever pieces."""

    @property
    def batch_invariant(self) -> bool: ...


@runtime_checkable
class Sized(Protocol):
    """A model, or a part of a drafter, that says what its rows take."""

    def memory(self, lengths: list[int], sources: list[int]) -> int:
        """Bytes of keys and values, at most, of rows of so many tokens and their sources of so
        many, which the encoder of an encoder-decoder has read."""
        ...


@runtime_checkable
class Reserves(Sized, Protocol):
    """One that can take the memory for its rows at once."""

    def reserve(self, total: int) -> None:
        """So many bytes."""
        ...


@runtime_checkable
class Shares(Model, Protocol):
    """A model over the rows of another, whose keys and values it reads: what its `target` has read
    it need not read."""

    target: Model

    @property
    def lengths(self) -> list[int]:
        """Tokens of every row in place: what the target has read, and draft tokens behind it."""
        ...


class Written(NamedTuple):
    """Draft tokens of a model of another vocabulary, in the target's ids."""

    guesses: list[list[int]]
    calls: int  # runs that it took


@runtime_checkable
class Writes(Model, Protocol):
    """A model of another vocabulary, whose text may be guessed by."""

    def writes(self, *, greedy: bool) -> bool:
        """Tell whether to draft by its text rather than by its distribution, where all rows take
        the target's likeliest token, or where some do not."""
        ...

    def write(self, blocks: list[list[int]], counts: list[int]) -> Written:
        """Append block b to row b, for all rows, and say what follows: at most counts[b] tokens,
        which depend on the row's text alone. They are not appended."""
        ...


@runtime_checkable
class Shows(Model, Protocol):
    """A model that shows hidden states of all tokens that its rows read."""

    taps: tuple[int, ...]  # which (`models.stock.taps`), one behind another; (): none

    def show(self, known: Callable[[list[int]], int] | None) -> None:
        """Keep the states from now on, until they are taken; a row that joins shares no more of
        other texts' tokens than `known` says, which show none. None: keep none. The model has no
        rows."""
        ...

    def shown(self) -> list[Known | None]:
        """Take what was kept: the states of each row's tokens that were read, and not taken back,
        since the call before. None: of no token."""
        ...


class LentKeys(NamedTuple):
    """Keys and values of one layer, `[B, heads, slots, dim]`."""

    keys: Tensor
    values: Tensor


@runtime_checkable
class LendsKeys(Shows, Protocol):
    """A model whose keys and values a draft may read, which has none of its own."""

    @property
    def lengths(self) -> list[int]:
        """Tokens of every row."""
        ...

    def lent(self, kind: str, rows: list[int], first: int) -> LentKeys:
        """Return those of the last layer of a kind ("full_attention", "sliding_attention") that
        keeps any, for these rows and from slot `first` on, valid until the next run. A row's own
        slots end at its length; what is behind them means nothing."""
        ...


class OpenModel(Model, Protocol):
    """A model that also shows what its output layer reads."""

    @property
    def hidden(self) -> Tensor:
        """`[B, max(need), H]`, at the positions of the last score's logits; valid until the next
        run."""
        ...
