"""The interface of a target or draft model: it scores blocks of new tokens for a batch of
sequences.

A sequence's length is the number of its tokens in the cache; its row is its index in the batch. A
backend derives from `Model`, implements `start`, `score`, `set_lengths`, `permute` and `lengths`,
and lists in `capabilities` which optional methods it implements.
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
    """Return the number of tokens in each block."""
    return need if isinstance(blocks, Tensor) else [len(block) for block in blocks]


class TokenChoice(NamedTuple):
    """Selects a draft token from logits: the argmax, or a sample after temperature, top-k, top-p
    and min-p."""

    V: int  # the target's vocabulary size
    ids: Tensor | None = None  # [Vd], the target id of each draft logit; None: the same ids
    filters: tuple[float, int, float, float] | None = None  # None: argmax
    numbers: Tensor | None = None  # [G, B], uniform random numbers in [0, 1)


class ChainedTokens(NamedTuple):
    """The draft tokens of one `chain` call; entries after a sequence's last are undefined."""

    tokens: Tensor  # [B, G], the target's ids
    tops: Tensor  # [B, G], the largest logit at each token; non-finite if any logit is
    q: Tensor | None  # [B, G, V], the distributions that the tokens were drawn from
    masses: Tensor  # [B, G], float64, the sums of these distributions


class TextDraft(NamedTuple):
    """Draft tokens of a model with another vocabulary, in the target's ids."""

    draft_tokens: list[list[int]]
    num_forward_passes: int


class SharedKV(NamedTuple):
    """Keys and values of one layer, `[B, heads, positions, dim]`."""

    keys: Tensor
    values: Tensor


@dataclass(frozen=True, slots=True)
class Capabilities:
    """The optional abilities of a model; a backend declares its own once, as a class attribute.

    Attributes:
        tensors: Blocks may be a tensor on the device, so that the host need not know the tokens.
        batch_invariant: Logits depend on the sequence alone, bit for bit, not on the batch or on
            how the sequence is split into blocks.
        media: Prompts may contain images and audio (`joining_media`, `find_media_problem`).
        prefix_cache: Sequences that have left are cached, so that later ones reuse a common prefix
            (`set_prefix_caching`, `set_salt`, `count_cached_tokens`, `num_cached_tokens`).
        memory: It reports the bytes that its sequences take (`compute_cache_bytes`).
        hidden: It returns the input of its output layer (`hidden`).
        taps: It can return hidden states of all tokens (`taps`, `expose_hidden_states`,
            `take_hidden_states`).
        shared_kv: A drafter may read its keys and values (`get_shared_kv`, `lengths`).
        target_rows: It runs over the sequences of its `target`, in the target's own KV cache, and
            need not prefill a prompt that the target has prefilled (`lengths`).
        chain: It makes all draft tokens of a step in one call (`chain`).
        text: It has another vocabulary, and may draft by generating a string
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
        runtime: Name of its backend, for reports.
        model: The transformers network, if torch runs it; for a drafter, its model.
        holds: Models and drafters within it; one object may be part of only one of them.
        identity: A string that determines its speed; None: unknown.
        has_own_speed: True if its `model` does not determine its speed.
        reads_target: True if it reads hidden states or the KV cache of its `target`.
        encoder_seconds: Total run time of its encoder; on a device, until the kernels are launched.
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
        """Remove all sequences, also those that an aborted run has left."""

    def compute_cache_bytes(self, lengths: list[int], sources: list[int]) -> int:
        """Return the maximum bytes of KV cache for sequences of these lengths, in tokens, and for
        their encoder inputs (encoder-decoders only)."""
        return 0

    def reserve(self, num_bytes: int) -> None:
        """Set the size of the KV cache to this many bytes, if the backend can."""

    def set_prefix_caching(self, enabled: bool) -> None:
        """Turn the prefix cache on or off.

        Args:
            enabled: True to cache sequences that leave from now on, False to drop all cached ones.
        """

    def set_salt(self, salt: str) -> None:
        """Let the sequences that join next share cached prefixes only with those of the same salt.

        Args:
            salt: The salt.
        """


class Scorer(Component, ABC):
    """The part of a target that a step needs, after its sequences have joined."""

    vocab_size: int  # size of the output layer, padding included
    device: torch.device = torch.device("cpu")
    padding: int = 0  # padding positions that the last forward pass computed

    @abstractmethod
    def score(self, blocks: Blocks, need: list[int]) -> Tensor:
        """Append block b to sequence b, for all sequences, in one forward pass; a block may be
        empty.

        A tensor `[B, W]` on the model's device is padded on the right with any ids: block b is the
        first need[b] tokens of row b.

        Returns logits `[B, max(need), V]`, valid until the next forward pass: row b has those of
        the last need[b] tokens of its block, then finite padding.
        """

    @abstractmethod
    def set_lengths(self, lengths: list[int]) -> None:
        """Truncate each sequence b to its first lengths[b] tokens, without rejected ones. No length
        may grow."""


class Model(Scorer):
    """A target or draft model: methods that all backends implement, and defaults for the others."""

    context: int | None = None  # tokens that a sequence can hold; None: no limit
    encoder_decoder: bool = False
    source_context: int | None = None  # tokens of an encoder input; None: no limit, or no encoder
    source_vocab_size: int | None = None  # the encoder's vocabulary size; None: no encoder
    compute_dtype: str  # the dtype of its arithmetic: "float32", "bfloat16", "int8", ...
    # tokens that `set_lengths` can remove, at most, and none of a cached prefix that the sequence
    # started from; it can always remove all tokens. None: no limit
    max_rewind: int | None = None
    taps: tuple[int, ...] = ()  # layers whose hidden states it returns (`models.stock.taps`)
    joining_media: list[Media | None]  # media of the sequences that join next; []: none has any
    needs_media: bool = False  # its encoder takes media, not ids; a source gives only their length
    # hidden states `[n, H]` by encoder input, from an earlier run of the same encoder elsewhere
    shared_encoder_states: dict[tuple[int, ...], Tensor] | None = None
    num_cached_tokens: list[int]  # tokens from the prefix cache, of each sequence that joined last

    @abstractmethod
    def start(self, prompts: list[list[int]], sources: list[list[int]] | None = None) -> None:
        """Add sequences after those present and prefill `prompts`, which may be empty.

        `sources`: the encoder's inputs, encoded once; None for decoder-only models.
        """

    @abstractmethod
    def permute(self, rows: list[int]) -> None:
        """Replace sequence b by the former sequence rows[b]; rows may be repeated or left out."""

    def leave(self, rows: list[int]) -> None:
        """Remove these sequences; later ones move up."""
        self.permute(list_remaining_rows(len(self.lengths), rows))

    def clear(self) -> None:
        self.permute([])

    # Sequences longer than `context`: some models then use other position embeddings

    _max_context: int | None = None
    _long_context = False  # for the sequences that join next

    @property
    def max_context(self) -> int | None:
        """Return the maximum length of a sequence that joins again as a long one when it outgrows
        `context`; None: no limit."""
        return self._max_context or self.context

    @property
    def long(self) -> list[bool]:
        """For each sequence, whether it joined as a long one (`set_long_context`)."""
        raise NotImplementedError

    def compute_max_lengths(self, long: list[bool]) -> list[int | None]:
        """Return the maximum length of each sequence; `long`: the ones that join as long ones."""
        return [self.max_context if each else self.context for each in long]

    def set_long_context(self, enabled: bool) -> None:
        """Set whether the sequences that join next are long: they hold more than `context` tokens,
        the next token included."""
        self._long_context = enabled

    # Set before sequences join

    def set_prompt_lengths(self, lengths: list[int]) -> None:
        """Set the prompt lengths of the sequences that join next, which may differ from the tokens
        given to `start`; 0: up to the first token whose logits are needed. For models whose logits
        depend on the prompt length."""

    def find_media_problem(self, media: Media) -> str | None:
        """Return the reason why the model cannot encode these media, or None; it encodes the first
        media of a kind to find out. A sequence with media joins with all of its prompt; for an
        encoder-decoder, the media are its source."""
        return "it reads ids only"

    @cached_property
    def encoder_key(self) -> str | None:
        """The key of its encoder, under which `Media` stores the encoder's output; None if it has
        no encoder."""
        return None

    def count_cached_tokens(self, prompt: list[int]) -> int:
        """Return how many of a prompt's first tokens are in the prefix cache."""
        return 0

    # For drafters that use the target's hidden states or KV cache

    @property
    def lengths(self) -> list[int]:
        """The length of each sequence, in tokens."""
        raise NotImplementedError

    @property
    def hidden(self) -> Tensor:
        """The inputs of the output layer, `[B, max(need), H]`, at the positions of the last
        score's logits; valid until the next forward pass."""
        assert self._hidden is not None, "no output layer has run"
        return self._hidden

    _hidden: Tensor | None = None

    def tap(self, taps: tuple[int, ...]) -> None:
        """Prepare to return the hidden states at these taps. Raises RefusedError if the model has
        no such layers."""
        raise NotImplementedError

    def expose_hidden_states(self, known: Callable[[list[int]], int] | None) -> None:
        """Store the hidden states at the `taps` from now on, until they are taken, or none if
        `known` is None. The model must have no sequences.

        Tokens from the prefix cache get no hidden states, so a sequence that joins uses at most
        `known(prompt)` of them: those whose states the drafter has.
        """

    def take_hidden_states(self) -> list[HiddenStates | None]:
        """Return and drop the stored hidden states of each sequence: those computed since the last
        call, without truncated tokens. None: no states are stored."""
        raise NotImplementedError

    def get_shared_kv(self, kind: str, rows: list[int], first: int) -> SharedKV:
        """Return the keys and values of these sequences from position `first` on, valid until the
        next forward pass; entries after a sequence's length are undefined. `kind` selects the
        layer: the last "full_attention" or "sliding_attention" layer that has a KV cache."""
        raise NotImplementedError

    # Drafting

    def chain(
        self,
        blocks: list[list[int]],
        budget: list[int],
        choice: TokenChoice,
        embeddings: Tensor | None = None,
    ) -> ChainedTokens:
        """Append blocks as `score` does, then make up to budget[b] draft tokens for sequence b,
        each from the one before it. All of them but the last are appended.

        embeddings: `[V, E]`, for a `HiddenStateDraftModel`; None for others.
        """
        raise NotImplementedError

    def drafts_from_text(self, *, greedy: bool) -> bool:
        """Return whether to draft by `draft_from_text` instead of from its distributions.

        greedy: True if all sequences decode greedily.
        """
        return False

    def draft_from_text(self, blocks: list[list[int]], counts: list[int]) -> TextDraft:
        """Append block b to sequence b, for all sequences, and generate at most counts[b] draft
        tokens, which are not appended. They depend on the sequence's tokens alone."""
        raise NotImplementedError


class HiddenStateDraftModel(Model):
    """A draft model whose input at each position is a token embedding and a hidden state (as in
    EAGLE); its own `hidden` replaces the target's state at the next position."""

    @abstractmethod
    def project_states(self, states: Tensor) -> Tensor:
        """Return the target's hidden states `[N, W]` projected to the model's width, `[N, H]`."""

    @abstractmethod
    def set_next_pairs(self, pairs: Tensor, counts: list[int]) -> None:
        """Set the inputs of the next `score`, `[sum(counts), E + H]`: embeddings, then states."""

    def set_draft_pairs(self, tokens: list[int], states: Tensor, embeddings: Tensor) -> None:
        """Set the inputs of the next `chain`: the embeddings of these tokens, from a table
        `[V, E]`, and the target's hidden states, `[N, W]`."""
        raise NotImplementedError


def require_model(value: object) -> None:
    """Raise InputError if `value` is not a model, but for instance a Speculator."""
    if not isinstance(value, Model):
        raise InputError(
            f"{value!r:.60} is not a model; give the one of a Speculator: load(...).target"
        )
