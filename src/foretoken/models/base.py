"""A model, as the step knows it: it scores blocks of new tokens for rows of different lengths.

A row's length is the number of its tokens in the cache. Rows are numbered by their place in the
batch. A backend derives from `Model`, which has four methods and `lengths` to write and a default
for all others, and lists in its `capabilities` which of the others it has.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor

from foretoken.errors import InputError
from foretoken.media.inputs import Media
from foretoken.models.hidden_states import HiddenStates
from foretoken.models.row_slots import list_remaining_rows

Blocks = list[list[int]] | Tensor


def count_block_tokens(blocks: Blocks, need: list[int]) -> list[int]:
    """Return how many tokens each row gains."""
    return need if isinstance(blocks, Tensor) else [len(block) for block in blocks]


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


class TextDraft(NamedTuple):
    """Draft tokens of a model of another vocabulary, in the target's ids."""

    draft_tokens: list[list[int]]
    num_forward_passes: int  # runs that it took


class SharedKV(NamedTuple):
    """Keys and values of one layer, `[B, heads, slots, dim]`."""

    keys: Tensor
    values: Tensor


@dataclass(frozen=True, slots=True)
class Capabilities:
    """The optional abilities of a model; a backend declares its own once, as a class attribute.

    Attributes:
        tensors: Blocks may be a tensor, whose tokens the host does not know.
        batch_invariant: Logits are a function of the sequence, to the bit, whatever is scored with
            a token and in whatever pieces.
        media: Prompts may come with images and audio (`joining_media`, `find_media_problem`).
        prefix_cache: Prefixes of sequences that have left serve others (`set_prefix_caching`,
            `set_salt`, `known`, `num_cached_tokens`).
        memory: It says what its rows take (`memory`).
        hidden: It shows what its output layer reads (`hidden`).
        taps: It can show hidden states of all tokens (`taps`, `expose_hidden_states`,
            `take_hidden_states`).
        shared_kv: A draft may read its keys and values (`shared_kv`, `lengths`).
        target_rows: It runs over the rows of its `target`, whose cache it reads and adds to: what
            the target has prefilled it need not (`lengths`).
        chain: It makes all draft tokens of a step in one call (`chain`).
        text: It has another vocabulary, and may draft by the text that it writes
            (`drafts_from_text`, `draft_from_text`).
    """

    tensors: bool = False
    batch_invariant: bool = False
    media: bool = False
    prefix_cache: bool = False
    memory: bool = False
    hidden: bool = False
    taps: bool = False
    shared_kv: bool = False
    target_rows: bool = False
    chain: bool = False
    text: bool = False


class Component:
    """A model, a drafter, or a network within one.

    Attributes:
        capabilities: The optional abilities that it has.
        runtime: Name of what it runs on, for reports.
        model: Transformers' network, where torch runs it; a drafter's model.
        holds: Models and drafters within it, none of which may stand in two places.
        identity: A string that its speed follows from; None: unknown.
        has_own_speed: True if its speed does not follow from its `model`.
        reads_target: True if it runs on the states or rows of its `target`.
        encoder_seconds: How long its encoder has run since it was made; on a device, until the
            work was handed over.
    """

    capabilities: Capabilities = Capabilities()
    runtime: str
    model: Any = None
    holds: tuple[object, ...] = ()
    identity: str | None = None
    has_own_speed: bool = False
    reads_target: bool = False
    target: Any = None
    encoder_seconds: float = 0.0

    def clear(self) -> None:
        """Drop all rows, also those that a run has left which was broken off."""

    def memory(self, lengths: list[int], sources: list[int]) -> int:
        """Return the bytes of keys and values, at most, of rows of so many tokens and their sources
        of so many, which the encoder of an encoder-decoder has read."""
        return 0

    def reserve(self, num_bytes: int) -> None:
        """Take so many bytes for rows at once, where it can."""

    def set_prefix_caching(self, enabled: bool) -> None:
        """Keep sequences that leave from now on for others, or forget them all.

        Args:
            enabled: True to keep, False to forget.
        """

    def set_salt(self, salt: str) -> None:
        """Let the rows that join next share only with rows of the same salt.

        Args:
            salt: The salt.
        """


class Scorer(Component, ABC):
    """The target as a step needs it, with its rows present already."""

    vocab_size: int  # rows of the output layer, padding included
    device: torch.device = torch.device("cpu")
    padding: int = 0  # positions that the last pass computed beside the blocks

    @abstractmethod
    def score(self, blocks: Blocks, need: list[int]) -> Tensor:
        """Append block b to row b, for all rows, in one run; a block may be empty.

        A tensor `[B, W]` on the model's device is padded on the right with any ids: block b is the
        first need[b] tokens of row b.

        Returns logits `[B, max(need), V]`, valid until the next run: in row b those of the last
        need[b] tokens of its block, then finite padding.
        """

    @abstractmethod
    def set_lengths(self, lengths: list[int]) -> None:
        """Keep this many tokens of each row: commit and rollback in one. No length may grow."""


class Model(Scorer):
    """A target or a draft: what every model must do, and defaults of what some can."""

    context: int | None = None  # tokens a row can hold; None: no limit
    encoder_decoder: bool = False
    source_context: int | None = None  # tokens the encoder can read; None: no limit, or no encoder
    source_vocab_size: int | None = None  # ids the encoder knows; None: no encoder
    compute_dtype: str  # the dtype of its arithmetic: "float32", "bfloat16", "int8", ...
    # tokens that a row may go back by, not to its beginning and not behind where it began with a
    # cached prefix; None: to any length
    max_rewind: int | None = None
    taps: tuple[int, ...] = ()  # where its states are shown (`models.stock.taps`); (): nowhere
    joining_media: list[Media | None]  # media of the rows that join next; []: none has any
    needs_media: bool = False  # its encoder reads no ids: a source stands for media, by its length
    # states `[n, H]` by a source's ids, which its very encoder made in somebody else's run
    shared_encoder_states: dict[tuple[int, ...], Tensor] | None = None
    num_cached_tokens: list[
        int
    ]  # how many tokens of each row that joined last were in the prefix cache

    @abstractmethod
    def start(self, prompts: list[list[int]], sources: list[list[int]] | None = None) -> None:
        """Rows join behind those present, with all of `prompts`, which may be empty, in the cache.

        `sources`: what the encoder reads, once; None for decoder-only models.
        """

    @abstractmethod
    def permute(self, rows: list[int]) -> None:
        """Row b becomes what row rows[b] was; rows may be repeated or left out."""

    def leave(self, rows: list[int]) -> None:
        """These rows are finished; those behind move up."""
        self.permute(list_remaining_rows(len(self.lengths), rows))

    def clear(self) -> None:
        self.permute([])

    # Sequences longer than `context`, which some models encode in another way

    _max_context: int | None = None
    _long_context = False  # whether the rows that join next are long ones

    @property
    def max_context(self) -> int | None:
        """Return how many tokens a row can come to hold, if it joins again where it outgrows
        `context`; None: no limit."""
        return self._max_context or self.context

    @property
    def long(self) -> list[bool]:
        """Which rows joined as long ones, where `max_context` is more than `context`."""
        raise NotImplementedError

    def compute_max_lengths(self, long: list[bool]) -> list[int | None]:
        """Return how many tokens rows can hold, of which these join as long ones."""
        return [self.max_context if each else self.context for each in long]

    def set_long_context(self, enabled: bool) -> None:
        """The rows that join next hold more than `context` tokens, the one to come included."""
        self._long_context = enabled

    # What rows join with

    def set_prompt_lengths(self, lengths: list[int]) -> None:
        """The rows that join next have prompts of so many tokens, whatever they join with; 0: up to
        the first token whose logits are asked for. For models whose logits depend on it."""

    def find_media_problem(self, media: Media) -> str | None:
        """Say why the model cannot read these, or None; tried on the first ones of their kind. A
        row with media joins with all of its prompt; an encoder then reads them as its source."""
        return "it reads ids only"

    @cached_property
    def encoder_key(self) -> str | None:
        """The name of its encoder, for media that keep what it made of them; None: has none."""
        return None

    def count_cached_tokens(self, prompt: list[int]) -> int:
        """Return how many of a prompt's first tokens are in the prefix cache."""
        return 0

    # What drafts read of a target

    @property
    def lengths(self) -> list[int]:
        """Tokens of every row."""
        raise NotImplementedError

    @property
    def hidden(self) -> Tensor:
        """`[B, max(need), H]`, at the positions of the last score's logits; valid until the next
        run."""
        assert self._hidden is not None, "no output layer has run"
        return self._hidden

    _hidden: Tensor | None = None

    def tap(self, taps: tuple[int, ...]) -> None:
        """Be able to show the states at these taps. Raises RefusedError where there are none."""
        raise NotImplementedError

    def expose_hidden_states(self, known: Callable[[list[int]], int] | None) -> None:
        """Keep the states at the `taps` from now on, until they are taken; a row that joins shares
        no more of other sequences' tokens than `known` says, which show none. None: keep none. The
        model has no rows."""

    def take_hidden_states(self) -> list[HiddenStates | None]:
        """Take what was kept: the states of each row's tokens that were read, and not taken back,
        since the call before. None: of no token."""
        raise NotImplementedError

    def shared_kv(self, kind: str, rows: list[int], first: int) -> SharedKV:
        """Return keys and values of the last layer of a kind ("full_attention",
        "sliding_attention") that keeps any, for these rows and from slot `first` on, valid until
        the next run. A row's own slots end at its length; what is behind them means nothing."""
        raise NotImplementedError

    # What a draft does beside scoring

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
        raise NotImplementedError

    def drafts_from_text(self, *, greedy: bool) -> bool:
        """Tell whether to draft by its text rather than by its distribution, where all rows take
        the target's likeliest token, or where some do not."""
        return False

    def draft_from_text(self, blocks: list[list[int]], counts: list[int]) -> TextDraft:
        """Append block b to row b, for all rows, and say what follows: at most counts[b] tokens,
        which depend on the row's text alone. They are not appended."""
        raise NotImplementedError


class HiddenStateDraftModel(Model):
    """A decoder of pairs, whose tokens come with a state each; its `hidden` takes the place of the
    next one's."""

    @abstractmethod
    def project_states(self, states: Tensor) -> Tensor:
        """Return the target's states, `[N, W]`, as the model reads them, `[N, H]`."""

    @abstractmethod
    def set_next_pairs(self, pairs: Tensor, counts: list[int]) -> None:
        """Let the next `score` read `[sum(counts), E + H]`: embeddings, and states behind them."""

    def set_draft_pairs(self, tokens: list[int], states: Tensor, embeddings: Tensor) -> None:
        """Let the next `chain` read the embeddings of these tokens, of a table `[V, E]`, and with
        each the target's states, `[N, W]`."""
        raise NotImplementedError


def require_model(value: object) -> None:
    """Raise InputError for anything else, such as the Speculator that holds a model."""
    if not isinstance(value, Model):
        raise InputError(f"{value!r:.60} is no model; give that of a Speculator: load(...).target")
