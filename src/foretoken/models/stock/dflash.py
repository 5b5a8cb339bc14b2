"""Drafters that propose a block of tokens in one forward pass: DFlash (arXiv 2602.06036), DFlash2,
DSpark (arXiv 2607.05147), Domino (arXiv 2605.29707) and JetSpec (arXiv 2606.18394) without its
tree.

The context is the target's hidden states at several taps, concatenated. Each layer projects the
context to keys and values. The queries are a block that follows the context: the sequence's last
token (the anchor), and one mask token for each draft token. The queries attend to each other in
both directions. The layers are Qwen3's, as in all published drafters.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from transformers import Qwen3Config
from transformers.models.qwen3.modeling_qwen3 import (
    Qwen3DecoderLayer,
    Qwen3RMSNorm,
    Qwen3RotaryEmbedding,
    rotate_half,
)

from foretoken.models.base import Capabilities, Component
from foretoken.models.row_slots import (
    PREFILL_CHUNK_TOKENS,
    compute_max_positions,
    list_remaining_rows,
)
from foretoken.models.stock.cache import CAPACITY_MULTIPLE, RaggedCache, RaggedLayer
from foretoken.models.stock.dflash2 import CandidateSelector, ConvolutionLayer
from foretoken.models.stock.domino import DominoHead
from foretoken.transfer import send


@dataclass(frozen=True, slots=True)
class BlockLayout:
    """The layout of a block, from the drafter's config.

    Attributes:
        taps: The target's taps whose hidden states are the context.
        block_size: Maximum number of positions of a block.
        mask_token_id: The id of the mask token.
        sample_from_anchor: True if the last token's own position also yields a draft token.
        window_per_position: True if a sliding window is counted from each position of the block;
            False if it is counted from the block's first position, and all of the block is visible.
        causal_window: True if attention within the block is causal in layers with a window.
        causal: True if it is causal in all layers (JetSpec).
    """

    taps: tuple[int, ...]
    block_size: int
    mask_token_id: int
    sample_from_anchor: bool = False
    window_per_position: bool = True
    causal_window: bool = False
    causal: bool = False

    @property
    def max_draft_tokens(self) -> int:
        """The maximum number of draft tokens of a block."""
        return self.block_size if self.sample_from_anchor else self.block_size - 1


class MarkovHead(nn.Module):
    """DSpark's Markov head. It computes a bias on a draft token's logits from the previous token:
    the previous token's embedding `markov_w1`, projected by `markov_w2`."""

    def __init__(self, vocab_size: int, outputs: int, rank: int) -> None:
        super().__init__()
        self.markov_w1 = nn.Embedding(vocab_size, rank)
        self.markov_w2: nn.Module = nn.Linear(rank, outputs, bias=False)

    def forward(
        self, hidden: Tensor, before: Tensor, memory: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        """Return the bias `[B, Vd]`, and the recurrent state `memory` to pass on for the next draft
        token.

        hidden: Hidden states at the draft token, `[B, H]`.
        before: The embedding `markov_w1` of the previous token, `[B, r]`.
        memory: The recurrent state, which only `RecurrentMarkovHead` uses; None for the first draft
            token.
        """
        return self.markov_w2(before), None


class GatedMarkovHead(MarkovHead):
    """A Markov head whose bias is gated by the draft token's hidden state."""

    def __init__(self, vocab_size: int, outputs: int, rank: int, hidden: int) -> None:
        super().__init__(vocab_size, outputs, rank)
        self.gate_proj = nn.Linear(hidden + rank, rank)

    def forward(
        self, hidden: Tensor, before: Tensor, memory: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        gate = self.gate_proj(torch.cat([hidden, before], -1)).sigmoid()
        return self.markov_w2(gate * before), None


class RecurrentMarkovHead(MarkovHead):
    """A Markov head with a recurrent state (`memory`) over the tokens of the block."""

    def __init__(self, vocab_size: int, outputs: int, rank: int, hidden: int) -> None:
        super().__init__(vocab_size, outputs, rank)
        self.joint_proj = nn.Linear(2 * rank + hidden, 3 * rank)

    def forward(
        self, hidden: Tensor, before: Tensor, memory: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        memory = torch.zeros_like(before) if memory is None else memory
        projected = self.joint_proj(torch.cat([memory, before, hidden], -1))
        gate, new, out = projected.chunk(3, -1)
        memory = torch.lerp(new.tanh(), memory, gate.sigmoid())
        return self.markov_w2(out.tanh()), memory


class ConfidenceHead(nn.Module):
    """Predicts the probability that a draft token is accepted if all earlier draft tokens are
    accepted.

    rank: the size of the previous token's Markov embedding, which is appended to the hidden state;
    0: no embedding is appended.
    """

    def __init__(self, hidden: int, rank: int) -> None:
        super().__init__()
        self.proj = nn.Linear(hidden + rank, 1)
        self.rank = rank

    def forward(self, hidden: Tensor, before: Tensor | None) -> Tensor:
        """Return the probabilities `[B]` from hidden states `[B, H]` and the previous tokens'
        Markov embeddings `[B, r]`."""
        if self.rank and before is not None:
            hidden = torch.cat([hidden, before], -1)
        return self.proj(hidden).squeeze(-1).sigmoid()


def apply_markov_head(
    markov_head: MarkovHead | None,
    confidence_head: ConfidenceHead | None,
    states: Tensor,
    logits: Tensor,
    tokens: Tensor,
    memory: Tensor | None,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Condition one draft token of each sequence b on the previous token, tokens[b].

    Returns the draft token's logits `[B, Vd]`; the probability that the draft token is accepted if
    all earlier draft tokens are accepted (None without a confidence head); and `memory` for the
    next draft token.
    """
    before = None
    if markov_head is not None:
        before = markov_head.markov_w1(tokens).to(states)
        bias, memory = markov_head(states, before, memory)
        logits = logits + bias
    chance = None if confidence_head is None else confidence_head(states, before)
    return logits, chance, memory


class BlockNetwork(nn.Module):
    """The layers of a block drafter, and `fc`, which projects the target's hidden states to the
    layers' context.

    width: Number of values per token of the target's hidden states.
    markov_head, confidence_head: The heads of DSpark; None for the others.
    candidate_selector: The selector of DFlash2; None for the others.
    domino_head: The head of Domino; None for the others.
    convolution: The taps and the group size of the layers' convolutions (DFlash2); None: the layers
        have none.
    embedding_scale: Factor of the embeddings of a block.
    """

    def __init__(
        self,
        config: Qwen3Config,
        layout: BlockLayout,
        width: int,
        markov_head: MarkovHead | None = None,
        confidence_head: ConfidenceHead | None = None,
        candidate_selector: CandidateSelector | None = None,
        domino_head: DominoHead | None = None,
        convolution: tuple[int, int] | None = None,
        embedding_scale: float = 1.0,
    ) -> None:
        super().__init__()
        config._attn_implementation = "sdpa"
        H, eps = config.hidden_size, config.rms_norm_eps
        self.config, self.layout = config, layout
        self.fc = nn.Linear(width, H, bias=False)
        self.hidden_norm, self.norm = Qwen3RMSNorm(H, eps), Qwen3RMSNorm(H, eps)
        self.layers = nn.ModuleList(
            Qwen3DecoderLayer(config, i)
            if convolution is None
            else ConvolutionLayer(config, i, *convolution)
            for i in range(config.num_hidden_layers)
        )
        self.markov_head, self.confidence_head = markov_head, confidence_head
        self.candidate_selector, self.domino_head = candidate_selector, domino_head
        self.embedding_scale = embedding_scale
        with torch.device("cpu"):  # on the meta device its buffers would have no values
            # In a list, so that conversions of the network leave its buffers in float32
            self.rotary = [Qwen3RotaryEmbedding(config)]

    @property
    def heads(self) -> list[nn.Module]:
        """The small heads, which take the layers' results at one draft token after another."""
        heads = self.markov_head, self.confidence_head, self.candidate_selector, self.domino_head
        return [head for head in heads if head is not None]

    @property
    def bias_layer(self) -> tuple[nn.Module, str] | None:
        """The layer with which a head computes biases on all logits: the module that has the layer,
        and its name in this module. None if no head has such a layer."""
        if self.markov_head is not None:
            return self.markov_head, "markov_w2"
        return None if self.domino_head is None else (self.domino_head.embed_proj, "2")

    def make_context(self, states: Tensor, positions: Tensor) -> list[tuple[Tensor, Tensor]]:
        """Return, for each layer, the keys and values `[N, heads, dim]` of the target's hidden
        states `[N, W]` at these positions."""
        c = self.hidden_norm(self.fc(states))
        cos, sin = (x[0, :, None] for x in self._angles(c, positions[None]))
        made: list[tuple[Tensor, Tensor]] = []
        for layer in self.layers:
            attention: Any = layer.self_attn
            shape = (*c.shape[:-1], -1, attention.head_dim)  # not len(c), a constant when traced
            k = attention.k_norm(attention.k_proj(c).view(shape))
            v = attention.v_proj(c).view(shape)
            made.append((k * cos + rotate_half(k) * sin, v))
        return made

    def forward(
        self, embedded: Tensor, positions: Tensor, cache: Any, masks: tuple[Tensor, Tensor]
    ) -> Tensor:
        """Return the hidden states `[B, n, H]` of embedded blocks `[B, n, H]` at these positions.

        cache: The context, as a transformers cache.
        masks: The masks for layers with full attention, and for layers with a window.
        """
        full, windowed = masks
        angles = self._angles(embedded, positions)
        states = embedded * self.embedding_scale
        for kind, layer in zip(self.config.layer_types or [], self.layers, strict=True):
            states = layer(
                states,
                attention_mask=windowed if kind == "sliding_attention" else full,
                position_embeddings=angles,
                past_key_values=cache,
            )
        return self.norm(states)

    def _angles(self, x: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        return self.rotary[0].to(x.device)(x, positions)

    def make_masks(
        self, positions: Tensor, slots: Tensor, block_sizes: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Return the attention masks `[B, n, S]` of blocks at these positions `[B, n]`: one for
        layers with full attention, one for layers with a window. Every query attends to itself, so
        that padding does not become NaN.

        slots: The keys' positions, `[S]` or `[B, S]`.
        block_sizes: The number of positions of each block without padding, `[B]`.
        """
        position, slot = positions[:, :, None], slots[..., None, :]
        first, own = position[:, :1], position == slot
        full = slot < first + block_sizes[:, None, None]
        if self.layout.causal:
            full = full & (slot <= position)
        window = self.config.sliding_window
        if window is None:
            return full | own, full | own
        if self.layout.window_per_position:
            near = (position - slot).abs() <= window
        else:
            near = slot >= first - window
        if self.layout.causal_window:
            near = near & (slot <= position)
        return full | own, (full & near) | own


@dataclass(frozen=True, slots=True)
class BlocksDraft:
    """A block drafter, as loaded from files.

    Attributes:
        network: The network, with its weights in the stored precision.
        embedding, head: The embedding `[N]` -> `[N, H]` and the output layer `[N, H]` -> `[N, Vd]`;
            both may be the target's.
        ids: The target's id of each output, `[Vd]`; None: the id is the output's index.
    """

    network: BlockNetwork
    embedding: nn.Module
    head: nn.Module
    ids: Tensor | None


class BlockDraftModel(Component, ABC):
    """A block drafter without the layers, which a backend runs: its layout, and the small heads
    that condition each draft token on the token before it."""

    capabilities = Capabilities(memory=True)

    def __init__(self, draft: BlocksDraft) -> None:
        network = draft.network
        self.layout, self.config, self.taps = network.layout, network.config, network.layout.taps
        self.embedding, self.ids = draft.embedding, draft.ids
        self.markov_head, self.confidence_head = network.markov_head, network.confidence_head
        self.candidate_selector, self.domino_head = network.candidate_selector, network.domino_head
        self.is_conditional = any(head is not self.confidence_head for head in network.heads)
        self.embedding_scale = network.embedding_scale
        self.max_draft_tokens = network.layout.max_draft_tokens
        self.num_anchors = int(not network.layout.sample_from_anchor)  # without a draft token

    @property
    @abstractmethod
    def lengths(self) -> list[int]:
        """The number of tokens in each sequence's context."""

    def clear(self) -> None:
        self.permute([])

    @abstractmethod
    def permute(self, rows: list[int]) -> None:
        """Replace sequence b by the former sequence rows[b]; rows may be repeated or left out."""

    def leave(self, rows: list[int]) -> None:
        """Remove these sequences; later sequences move up."""
        self.permute(list_remaining_rows(len(self.lengths), rows))

    @torch.inference_mode()
    def append_context(self, states: list[Tensor]) -> int:
        """Append the target's hidden states, one `[n, W]` for each sequence, to the contexts.
        Returns the number of forward passes."""
        max_new, passes = max(map(len, states), default=0), 0
        for at in range(0, max_new, PREFILL_CHUNK_TOKENS):
            parts = [x[at : at + PREFILL_CHUNK_TOKENS] for x in states]
            flat = torch.cat([part for part in parts if len(part)])
            passes += self._append(flat, [len(part) for part in parts])
        return passes

    @abstractmethod
    def _append(self, states: Tensor, counts: list[int]) -> int:
        """Append counts[b] of the hidden states `[sum(counts), W]` to the context of each sequence
        b. Returns the number of forward passes."""

    @torch.inference_mode()
    def condition_on_previous(
        self, states: Tensor, logits: Tensor, tokens: Tensor, memory: Tensor | None
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Condition one draft token of each sequence on the token before it; see
        `apply_markov_head`, `CandidateSelector` and `DominoHead`."""
        tokens = send(tokens, states.device)
        if self.candidate_selector is not None:
            return self.candidate_selector(states, logits, tokens), None, None
        if self.domino_head is not None:
            logits, memory = self.domino_head(states, logits, self.embedding(tokens), memory)
            return logits, None, memory
        return apply_markov_head(
            self.markov_head, self.confidence_head, states, logits, tokens, memory
        )


class StockBlockModel(BlockDraftModel):
    """A block drafter that runs on torch, in the precision of its weights, over the contexts of a
    batch of sequences of different lengths."""

    runtime = "transformers"

    def __init__(self, draft: BlocksDraft) -> None:
        super().__init__(draft)
        self.network, self.head = draft.network, draft.head
        weight = self.network.fc.weight
        self.device, self.itemsize = weight.device, weight.itemsize
        self.context: int | None = self.config.max_position_embeddings
        self.cache = self._make_cache(0)
        self.compute_dtype = str(weight.dtype).removeprefix("torch.")
        self.identity: str | None = (
            f"blocks {self.layout} {self.config.to_json_string()} {self.compute_dtype}"
        )

    def _make_cache(self, rows: int) -> RaggedCache:
        return RaggedCache([RaggedLayer() for _ in self.network.layers], rows, self.device)

    @property
    def lengths(self) -> list[int]:
        return self.cache.lengths

    def compute_cache_bytes(self, lengths: list[int], sources: list[int]) -> int:
        config: Any = self.config
        pair = 2 * config.num_key_value_heads * config.head_dim * self.itemsize
        return config.num_hidden_layers * pair * compute_max_positions(lengths, CAPACITY_MULTIPLE)

    @torch.inference_mode()
    def start(self, rows: int) -> None:
        """Add `rows` sequences with an empty context."""
        if self.lengths:
            self.cache.join(self._make_cache(rows))
        else:
            self.cache = self._make_cache(rows)

    @torch.inference_mode()
    def permute(self, rows: list[int]) -> None:
        if rows:
            self.cache.select(rows)
        else:
            self.cache = self._make_cache(0)

    @torch.inference_mode()
    def predict_block(self, anchors: list[int], counts: list[int]) -> tuple[Tensor, Tensor]:
        """Return hidden states `[B, G, H]` and logits `[B, G, Vd]` for counts[b] draft tokens that
        follow anchors[b], the last token of sequence b. The contexts do not change."""
        skip = self.num_anchors
        block = torch.full((len(anchors), max(counts) + skip), self.layout.mask_token_id)
        block[:, 0] = torch.tensor(anchors)
        cache, sizes = self.cache, send(torch.tensor(counts), self.device) + skip
        cache.prepare(block.shape[1])
        ids, sizes = (cache.to_slot_order(x) for x in (send(block, self.device), sizes))
        states, logits = self._run_blocks(ids, sizes)
        slots = send(torch.tensor(cache.slots), self.device)
        return states[slots], logits[slots]

    def _append(self, states: Tensor, counts: list[int]) -> int:
        """Append hidden states to the contexts. Keys and values do not depend on other tokens, so
        they are computed before the padding is added."""
        cache, ranges = self.cache, zip(self.lengths, counts, strict=True)
        positions = torch.cat([torch.arange(first, first + n) for first, n in ranges])
        states = send(states, self.device).to(self.network.fc.weight.dtype)
        made = self.network.make_context(states, send(positions, self.device))
        cache.prepare(max(counts))
        for i, pair in enumerate(made):
            k, v = (pad_sequence(list(x.split(counts)), batch_first=True) for x in pair)
            cache.update(
                cache.to_slot_order(k.transpose(1, 2)), cache.to_slot_order(v.transpose(1, 2)), i
            )
        cache.advance(counts)
        return 1

    def _run_blocks(self, ids: Tensor, sizes: Tensor) -> tuple[Tensor, Tensor]:
        """Return hidden states and logits at the draft tokens of blocks `[slots, n]`, for which the
        cache is prepared. The block in slot b has sizes[b] positions without padding."""
        cache = self.cache
        keys = torch.arange(cache.end, device=self.device)
        full, windowed = self.network.make_masks(cache.positions, keys, sizes)
        embedded = self.embedding(ids).to(self.network.fc.weight.dtype)
        masks = full[:, None], windowed[:, None]
        states = self.network(embedded, cache.positions, cache, masks)[:, self.num_anchors :]
        cache.advance([0] * len(cache.lengths))
        head: Any = self.head
        return states, head(states.to(head.weight.dtype))
