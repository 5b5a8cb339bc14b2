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
    """Return the number of tokens in each block of a `score` call. A tensor of blocks is padded, so
    `need` gives the number for each sequence."""
    return need if isinstance(blocks, Tensor) else [len(block) for block in blocks]


class TokenChoice(NamedTuple):
    """Specifies how `Model.chain` selects draft tokens from logits: the argmax, or a sample after
    temperature, top-k, top-p and min-p."""

    V: int  # the target's vocabulary size
    ids: Tensor | None = None  # [Vd], the target id of each draft logit; None: the same ids
    # temperature, top-k, top-p and min-p of each sequence, equal unless the model has
    # `Capabilities.mixed_chain`; None: argmax
    filters: list[tuple[float, int, float, float]] | None = None
    numbers: Tensor | None = None  # [G, B], uniform in [0, 1); None: argmax


class ChainedTokens(NamedTuple):
    """The draft tokens of one `chain` call. Entries after the last draft token of a sequence are
    undefined."""

    tokens: Tensor  # [B, G], the target's ids
    tops: Tensor  # [B, G], the largest logit for each token; non-finite if any of its logits is
    q: Tensor | None  # [B, G, V], the distributions of the tokens; None: argmax
    masses: Tensor  # [B, G], float64, the sum of each of these distributions


class TextDraft(NamedTuple):
    """Draft tokens in the target's ids, from a draft model with another vocabulary."""

    draft_tokens: list[list[int]]
    num_forward_passes: int


class SharedKV(NamedTuple):
    """Keys and values of one layer, `[B, heads, positions, dim]`."""

    keys: Tensor
    values: Tensor


@dataclass(frozen=True, slots=True)
class Capabilities:
    """The optional abilities of a model, with the methods and attributes that each requires. A
    backend declares its abilities once, as a class attribute.

    Attributes:
        tensors: The new tokens of a forward pass may be a tensor on the device, so that the host
            need not know them.
        batch_invariant: Logits depend only on the sequence: they are bitwise equal in any batch and
            for any split of the sequence into blocks.
        media: Prompts may contain images and audio (`joining_media`, `find_media_problem`).
        prefix_cache: Sequences stay in the cache after they leave, and later sequences reuse common
            prefixes (`set_prefix_caching`, `set_salt`, `count_cached_tokens`, `num_cached_tokens`).
        memory: The model can compute the size of its KV cache in bytes (`compute_cache_bytes`).
        hidden: The model returns the input of its output layer (`hidden`).
        taps: The model can return hidden states of all tokens (`taps`, `expose_hidden_states`,
            `take_hidden_states`).
        shared_kv: A drafter may read the model's keys and values (`get_shared_kv`, `lengths`).
        target_rows: The draft model uses the sequences and the KV cache of its `target`, so that
            it need not prefill prompts again (`lengths`).
        chain: The draft model makes all draft tokens of a step in one call (`chain`).
        mixed_chain: The sequences of a `chain` call may have different filters.
        text: The draft model has another vocabulary than the target, and may draft by generating a
            string (`drafts_from_text`, `draft_from_text`).
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
    mixed_chain: bool = False
    text: bool = False


class Component:
    """A model, a drafter, or a network within a drafter.

    Attributes:
        capabilities: Its optional abilities.
        runtime: Name of its backend, for reports.
        model: The transformers model, if torch runs it; for a drafter, its draft model.
        holds: The models and drafters inside this component. No object may be in two components.
        identity: The key under which measured costs are saved: components with equal keys are
            equally fast. None: the speed is unknown, or is determined by `model`.
        has_own_speed: True if its `model` does not determine its speed.
        reads_target: True if it uses hidden states or the KV cache of its `target`.
        encoder_seconds: Total run time of its encoder; on a GPU, only the time to launch the
            kernels.
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
        """Remove all sequences, including sequences left by an aborted run."""

    def compute_cache_bytes(self, lengths: list[int], sources: list[int]) -> int:
        """Return the maximum size, in bytes, of the KV cache for sequences of these lengths in
        tokens. `sources` has the lengths of their encoder inputs, for encoder-decoders."""
        return 0

    def reserve(self, num_bytes: int) -> None:
        """Set the size of the KV cache to this many bytes, if the backend can."""

    def set_prefix_caching(self, enabled: bool) -> None:
        """Turn the prefix cache on or off.

        Args:
            enabled: True to cache sequences when they leave; False to cache none and drop all
                cached sequences.
        """

    def set_salt(self, salt: str) -> None:
        """Set the salt of the sequences that join next: they share cached prefixes only with
        sequences of the same salt.

        Args:
            salt: Any string, for instance one for each user.
        """


class Scorer(Component, ABC):
    """The methods of a target that a decoding step uses, after sequences have joined."""

    vocab_size: int  # size of the output layer, padding included
    device: torch.device = torch.device("cpu")
    padding: int = 0  # padding positions that the last forward pass computed

    @abstractmethod
    def score(self, blocks: Blocks, need: list[int]) -> Tensor:
        """Append block b to sequence b, for all sequences, in one forward pass; a block may be
        empty.

        `blocks` may also be a tensor `[B, W]` on the model's device, padded on the right with any
        ids; block b is then the first need[b] tokens of row b.

        Returns logits `[B, max(need), V]`, valid until the next forward pass: sequence b has the
        logits of the last need[b] tokens of block b, followed by finite padding.
        """

    @abstractmethod
    def set_lengths(self, lengths: list[int]) -> None:
        """Truncate each sequence b to its first lengths[b] tokens, to remove rejected draft tokens.
        lengths[b] may not exceed the present length of sequence b."""


class Model(Scorer):
    """A target or draft model: the methods that every backend implements, and defaults for the
    methods that only some backends implement."""

    context: int | None = None  # maximum length of a sequence in tokens; None: no limit
    encoder_decoder: bool = False
    source_context: int | None = None  # tokens in an encoder input; None: no limit, or no encoder
    source_vocab_size: int | None = None  # the encoder's vocabulary size; None: no encoder
    compute_dtype: str  # the dtype of its arithmetic: "float32", "bfloat16", "int8", ...
    # longest block that shares a forward pass with the blocks of other sequences; longer blocks run
    # in passes of their own. None: all blocks share a pass
    max_shared_width: int | None = None
    # maximum number of tokens that `set_lengths` can remove from a sequence; it cannot remove part
    # of a cached prefix that the sequence started from. Removing all tokens is always possible.
    # None: no limit
    max_rewind: int | None = None
    taps: tuple[int, ...] = ()  # layers whose hidden states it returns (`models.stock.taps`)
    joining_media: list[Media | None]  # media of the sequences that join next; []: none has any
    needs_media: bool = False  # its encoder takes media, not ids
    # encoder outputs `[n, H]` by source ids, if the caller has run the same encoder already; None:
    # unsupported
    shared_encoder_states: dict[tuple[int, ...], Tensor] | None = None
    # number of tokens from the prefix cache, for each of the sequences that joined last
    num_cached_tokens: list[int]

    @abstractmethod
    def start(self, prompts: list[list[int]], sources: list[list[int]] | None = None) -> None:
        """Add one sequence for each prompt after the present sequences, and prefill the prompts. A
        prompt may be empty.

        `sources`: token ids for the encoder, one list for each sequence; None for decoder-only
        models.
        """

    @abstractmethod
    def permute(self, rows: list[int]) -> None:
        """Replace sequence b by the former sequence rows[b]; rows may be repeated or left out."""

    def leave(self, rows: list[int]) -> None:
        """Remove these sequences; later sequences move up."""
        self.permute(list_remaining_rows(len(self.lengths), rows))

    def clear(self) -> None:
        self.permute([])

    def prepare(self) -> None:
        """Do work that pays only in runs of minutes, such as compiling layers. May take seconds."""

    def count_padded_positions(self, batch_size: int, width: int) -> int | None:
        """Return how many positions a forward pass computes, padding included, over at most `width`
        tokens of each of `batch_size` sequences. None: passes have no padding."""
        return None

    @property
    def max_attended_tokens(self) -> int | None:
        """The number of tokens beyond which a longer context does not make a forward pass slower,
        because no token attends to more; None: no limit is known."""
        return None

    # Sequences longer than `context`: some models then use other position embeddings

    _max_context: int | None = None
    _long_context = False  # for the sequences that join next

    @property
    def max_context(self) -> int | None:
        """The maximum length of a sequence in tokens; None: no limit. To outgrow `context`, a
        sequence must leave and join again as a long sequence (`set_long_context`)."""
        return self._max_context or self.context

    @property
    def long(self) -> list[bool]:
        """For each sequence, True if it joined as a long sequence (`set_long_context`)."""
        raise NotImplementedError

    def compute_max_lengths(self, long: list[bool]) -> list[int | None]:
        """Return the maximum length of each sequence b, which joins as a long sequence if long[b];
        None: no limit."""
        return [self.max_context if each else self.context for each in long]

    def set_long_context(self, enabled: bool) -> None:
        """Set whether the sequences that join next are long: a long sequence has more than
        `context` tokens, including its last token, which is not cached yet."""
        self._long_context = enabled

    # Set before sequences join

    def set_prompt_lengths(self, lengths: list[int]) -> None:
        """Set the prompt lengths of the sequences that join next, which may differ from the numbers
        of tokens given to `start`; 0: the prompt ends at the first token whose logits are needed.
        For models whose logits depend on the prompt length."""

    def find_media_problem(self, media: Media) -> str | None:
        """Return why the model cannot encode these media; None if it can. To find out, the model
        encodes the first media of each kind. A sequence with media must be added
        with its whole prompt at once, not in pieces; for an encoder-decoder, the media take the
        place of its source."""
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
        """Store hidden states at the `taps` from now on, until `take_hidden_states` returns them.
        If `known` is None, store none. The model must have no sequences.

        Tokens from the prefix cache get no hidden states. So a sequence that joins uses at most its
        first `known(prompt)` cached tokens, whose hidden states the drafter has already.
        """

    def take_hidden_states(self) -> list[HiddenStates | None]:
        """Return, for each sequence, the hidden states stored since the last call, except those of
        truncated tokens; None if there are none. The model then drops the stored states."""
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
        each from the draft token before it. All draft tokens of a sequence except the last one
        are appended too.

        embeddings: the target's embeddings `[V, E]`, for a `HiddenStateDraftModel`; None for other
        models.
        """
        raise NotImplementedError

    def drafts_from_text(self, *, greedy: bool) -> bool:
        """Return whether to draft by `draft_from_text` instead of by `score` or `chain`.

        greedy: True if all sequences decode greedily.
        """
        return False

    def draft_from_text(self, blocks: list[list[int]], counts: list[int]) -> TextDraft:
        """Append block b to sequence b, for all sequences, and generate at most counts[b] draft
        tokens, which are not appended. The draft tokens of a sequence depend only on its tokens,
        not on other sequences."""
        raise NotImplementedError


class HiddenStateDraftModel(Model):
    """A draft model whose input at each position is a token embedding and a hidden state (as in
    EAGLE). For the first draft token, the hidden states are the target's. For each later draft
    token, the hidden state is the draft model's own `hidden` at the previous draft token.

    num_layers: In a stack of layers, each of which makes one draft token, the number of these
        layers; otherwise 1.
    """

    num_layers: int = 1

    @abstractmethod
    def project_states(self, states: Tensor) -> Tensor:
        """Return the target's hidden states `[N, W]` projected to the model's width, `[N, H]`."""

    @abstractmethod
    def set_next_pairs(self, pairs: Tensor, counts: list[int]) -> None:
        """Set the inputs of the next `score`, `pairs` `[sum(counts), E + H]`: each row is a token
        embedding followed by a projected hidden state. The first counts[0] rows are for sequence 0,
        the next counts[1] rows for sequence 1, and so on."""

    def set_next_layers(self, layers: range) -> None:
        """Set the layers of a stack that the next `score` runs. Its pairs have one embedding for
        each of these layers, followed by the hidden state for the first of these layers."""
        raise NotImplementedError

    def set_draft_pairs(self, tokens: list[int], states: Tensor, embeddings: Tensor) -> None:
        """Set the inputs of the next `chain`: N tokens, each with its row of the table `embeddings`
        `[V, E]` and with its row of the target's hidden states, `states` `[N, W]`. Raises
        MemoryError."""
        raise NotImplementedError


def require_model(value: object) -> None:
    """Raise InputError if `value` is not a `Model`; a Speculator, for instance, is not."""
    if not isinstance(value, Model):
        raise InputError(
            f"{value!r:.60} is not a model; give a Speculator's target: load(...).target"
        )
