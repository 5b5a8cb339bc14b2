"""Blocks of draft tokens in one pass: DFlash (arXiv 2602.06036), and DSpark (arXiv 2607.05147).

The target's states at several taps, joined, are the context: each layer makes keys and values of
them by its own projections. Queries come from a block behind it, the last token and as many masks
as there are guesses, whose places see each other both ways. Layers are Qwen3's, as in all that is
published; ours is what is between them. Knows no files.
"""

from __future__ import annotations

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
from foretoken.transfer import send


@dataclass(frozen=True, slots=True)
class BlockLayout:
    """The layout of a block.

    Attributes:
        taps: The target's taps that it reads.
        block_size: Places of a block, at most.
        mask_token_id: The id whose embedding stands for a token that is not known.
        sample_from_anchor: True where the place of the last token guesses too.
        window_per_position: True where a window is counted from each place; else it is from the
            last token, and the block is outside it.
        causal_window: True where, in a layer with a window, a place sees none of the block behind
            it.
    """

    taps: tuple[int, ...]
    block_size: int
    mask_token_id: int
    sample_from_anchor: bool = False
    window_per_position: bool = True
    causal_window: bool = False

    @property
    def max_draft_tokens(self) -> int:
        """Guesses of a block, at most."""
        return self.block_size if self.sample_from_anchor else self.block_size - 1


class MarkovHead(nn.Module):
    """A bias on a guess's logits by the token before it (DSpark's Markov head).

    The product of a row for each of the target's tokens, `markov_w1`, and `markov_w2`.
    """

    def __init__(self, vocab_size: int, outputs: int, rank: int) -> None:
        super().__init__()
        self.markov_w1 = nn.Embedding(vocab_size, rank)
        self.markov_w2: nn.Module = nn.Linear(rank, outputs, bias=False)

    def forward(
        self, hidden: Tensor, before: Tensor, memory: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        """Return the bias `[B, Vd]`, and what the next guess is to be given as `memory`.

        hidden: states of the guess, `[B, H]`; before: `markov_w1` of the token before, `[B, r]`.
        """
        return self.markov_w2(before), None


class GatedMarkovHead(MarkovHead):
    """The same, where the guess's own state says how much of it counts."""

    def __init__(self, vocab_size: int, outputs: int, rank: int, hidden: int) -> None:
        super().__init__(vocab_size, outputs, rank)
        self.gate_proj = nn.Linear(hidden + rank, rank)

    def forward(
        self, hidden: Tensor, before: Tensor, memory: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        gate = self.gate_proj(torch.cat([hidden, before], -1)).sigmoid()
        return self.markov_w2(gate * before), None


class RecurrentMarkovHead(MarkovHead):
    """The same with a memory of all tokens of the block."""

    def __init__(self, vocab_size: int, outputs: int, rank: int, hidden: int) -> None:
        super().__init__(vocab_size, outputs, rank)
        self.joint_proj = nn.Linear(2 * rank + hidden, 3 * rank)

    def forward(
        self, hidden: Tensor, before: Tensor, memory: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        memory = torch.zeros_like(before) if memory is None else memory
        read = self.joint_proj(torch.cat([memory, before, hidden], -1))
        gate, new, out = read.chunk(3, -1)
        memory = torch.lerp(new.tanh(), memory, gate.sigmoid())
        return self.markov_w2(out.tanh()), memory


class ConfidenceHead(nn.Module):
    """The chance that a guess is accepted where those before it are.

    rank: values of the token before that it reads beside the guess's state; 0: none.
    """

    def __init__(self, hidden: int, rank: int) -> None:
        super().__init__()
        self.proj = nn.Linear(hidden + rank, 1)
        self.rank = rank

    def forward(self, hidden: Tensor, before: Tensor | None) -> Tensor:
        """`[B, H]` and `[B, r]` -> `[B]`."""
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
    """Let a guess follow the tokens `[B]` before it.

    Returns its logits `[B, Vd]`; the chance that it is accepted where those before it are, None
    where that is not known; and what the next guess is to be given as `memory`.
    """
    before = None
    if markov_head is not None:
        before = markov_head.markov_w1(tokens).to(states)
        bias, memory = markov_head(states, before, memory)
        logits = logits + bias
    chance = None if confidence_head is None else confidence_head(states, before)
    return logits, chance, memory


class BlockNetwork(nn.Module):
    """The layers, and what makes the context of `width` values of a target's states.

    chain, confidence: DSpark's, where it has them.
    """

    def __init__(
        self,
        config: Qwen3Config,
        layout: BlockLayout,
        width: int,
        markov_head: MarkovHead | None = None,
        confidence_head: ConfidenceHead | None = None,
    ) -> None:
        super().__init__()
        config._attn_implementation = "sdpa"
        H, eps = config.hidden_size, config.rms_norm_eps
        self.config, self.layout = config, layout
        self.fc = nn.Linear(width, H, bias=False)
        self.hidden_norm, self.norm = Qwen3RMSNorm(H, eps), Qwen3RMSNorm(H, eps)
        layers = [Qwen3DecoderLayer(config, i) for i in range(config.num_hidden_layers)]
        self.layers = nn.ModuleList(layers)
        self.markov_head, self.confidence_head = markov_head, confidence_head
        with torch.device("cpu"):  # not on meta, from where it would have no numbers
            self.rotary = [Qwen3RotaryEmbedding(config)]  # in a list: its numbers stay float32

    def context(self, states: Tensor, positions: Tensor) -> list[tuple[Tensor, Tensor]]:
        """Return each layer's keys and values `[N, heads, dim]` of states `[N, W]` there."""
        c = self.hidden_norm(self.fc(states))
        cos, sin = (x[0, :, None] for x in self._angles(c, positions[None]))
        made: list[tuple[Tensor, Tensor]] = []
        for layer in self.layers:
            attention: Any = layer.self_attn
            shape = (*c.shape[:-1], -1, attention.head_dim)  # no len: tracing would fix it
            k = attention.k_norm(attention.k_proj(c).view(shape))
            v = attention.v_proj(c).view(shape)
            made.append((k * cos + rotate_half(k) * sin, v))
        return made

    def forward(
        self, embedded: Tensor, positions: Tensor, cache: Any, masks: tuple[Tensor, Tensor]
    ) -> Tensor:
        """Return states of blocks `[B, n, H]` at these positions. cache: the context, as layers
        take it; masks: of full layers and of those with a window, as their attention takes them."""
        full, windowed = masks
        angles = self._angles(embedded, positions)
        states = embedded
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
        """Which keys each place of a block `[B, n]` sees, `[B, n, S]`: in full layers, and in those
        with a window. All see their own, so that padding makes no NaN.

        slots: the keys' positions, `[S]` or `[B, S]`; sizes: places of each row's block, `[B]`.
        """
        position, slot = positions[:, :, None], slots[..., None, :]
        first, own = position[:, :1], position == slot
        full = slot < first + block_sizes[:, None, None]
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
    """A draft by blocks, as it is read.

    Attributes:
        network: The network, with its weights as they are stored.
        embedding, head: Its ends, which may be the target's own: `[N]` -> `[N, H]` -> `[N, Vd]`.
        ids: The target's ids that its outputs stand for, `[Vd]`; None: their numbers.
    """

    network: BlockNetwork
    embedding: nn.Module
    head: nn.Module
    ids: Tensor | None


class StockBlockModel(Component):
    """A draft by blocks on torch, in the precision of its network's weights: rows of contexts of
    different lengths."""

    runtime = "transformers"
    capabilities = Capabilities(memory=True)

    def __init__(self, draft: BlocksDraft) -> None:
        self.network, self.head, network = draft.network, draft.head, draft.network
        weight = network.fc.weight
        self.layout, self.config = network.layout, network.config
        self.device, self.itemsize = weight.device, weight.itemsize
        self.embedding, self.ids = draft.embedding, draft.ids
        self.markov_head, self.confidence_head = network.markov_head, network.confidence_head
        self.is_conditional = self.markov_head is not None
        self.max_draft_tokens, self.taps = network.layout.max_draft_tokens, network.layout.taps
        self.context: int | None = network.config.max_position_embeddings
        self.cache = self._make_cache(0)
        self.compute_dtype = str(weight.dtype).removeprefix("torch.")
        self.identity: str | None = (
            f"blocks {self.layout} {self.config.to_json_string()} {self.compute_dtype}"
        )

    def _make_cache(self, rows: int) -> RaggedCache:
        """The context of so many rows, of which nothing is read."""
        return RaggedCache([RaggedLayer() for _ in self.network.layers], rows, self.device)

    @property
    def lengths(self) -> list[int]:
        """Tokens of each row whose states were read."""
        return self.cache.lengths

    def memory(self, lengths: list[int], sources: list[int]) -> int:
        config: Any = self.config
        pair = 2 * config.num_key_value_heads * config.head_dim * self.itemsize
        return config.num_hidden_layers * pair * compute_max_positions(lengths, CAPACITY_MULTIPLE)

    @torch.inference_mode()
    def start(self, rows: int) -> None:
        """So many rows join, of which nothing is read."""
        if self.lengths:
            self.cache.join(self._make_cache(rows))
        else:
            self.cache = self._make_cache(rows)

    def clear(self) -> None:
        self.permute([])

    @torch.inference_mode()
    def permute(self, rows: list[int]) -> None:
        """Row b becomes what row rows[b] was."""
        if rows:
            self.cache.select(rows)
        else:
            self.cache = self._make_cache(0)

    def leave(self, rows: list[int]) -> None:
        """Drop rows; those behind move up."""
        self.permute(list_remaining_rows(len(self.lengths), rows))

    @torch.inference_mode()
    def append_context(self, states: list[Tensor]) -> int:
        """Append the target's states `[n, W]` to the context of each row; return the passes."""
        max_new = max(map(len, states), default=0)
        for at in range(0, max_new, PREFILL_CHUNK_TOKENS):
            parts = [row[at : at + PREFILL_CHUNK_TOKENS] for row in states]
            counts = [len(part) for part in parts]
            places = zip(self.lengths, counts, strict=True)
            positions = torch.cat([torch.arange(first, first + n) for first, n in places])
            flat = torch.cat([part for part in parts if len(part)])
            self._append(send(flat, self.device), send(positions, self.device), counts)
        return -(-max_new // PREFILL_CHUNK_TOKENS)

    @torch.inference_mode()
    def predict_block(self, anchors: list[int], counts: list[int]) -> tuple[Tensor, Tensor]:
        """Return states `[B, G, H]` and logits `[B, G, Vd]` of counts[b] guesses behind a row's
        last token; the block leaves nothing in the context."""
        skip = int(not self.layout.sample_from_anchor)
        block = torch.full((len(anchors), max(counts) + skip), self.layout.mask_token_id)
        block[:, 0] = torch.tensor(anchors)
        sizes = send(torch.tensor(counts), self.device) + skip
        return self._forward_block(self.embedding(send(block, self.device)), sizes)

    @torch.inference_mode()
    def condition_on_previous(
        self, states: Tensor, logits: Tensor, tokens: Tensor, memory: Tensor | None
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Let a guess follow the tokens `[B]` before it, as `apply_markov_head` does."""
        tokens = send(tokens, self.device)
        return apply_markov_head(
            self.markov_head, self.confidence_head, states, logits, tokens, memory
        )

    def _append(self, states: Tensor, positions: Tensor, counts: list[int]) -> None:
        """Append to each row's context counts[b] states of `[sum(counts), W]`, row behind row.
        Nothing here depends on other tokens, so that padding is added to the outcome only."""
        cache = self.cache
        made = self.network.context(states.to(self.network.fc.weight.dtype), positions)
        cache.prepare(max(counts))
        for i, pair in enumerate(made):
            k, v = (pad_sequence(list(x.split(counts)), batch_first=True) for x in pair)
            cache.update(
                cache.to_slot_order(k.transpose(1, 2)), cache.to_slot_order(v.transpose(1, 2)), i
            )
        cache.advance(counts)

    def _forward_block(self, embedded: Tensor, sizes: Tensor) -> tuple[Tensor, Tensor]:
        """Return states and logits of blocks `[B, n, H]`, of which row b has sizes[b] places; they
        leave nothing in the context."""
        cache, skip = self.cache, int(not self.layout.sample_from_anchor)
        cache.prepare(embedded.shape[1])
        slots = torch.arange(cache.end, device=self.device)
        full, windowed = self.network.make_masks(cache.positions, slots, cache.to_slot_order(sizes))
        embedded = cache.to_slot_order(embedded).to(self.network.fc.weight.dtype)
        masks = full[:, None], windowed[:, None]
        made = self.network(embedded, cache.positions, cache, masks)
        cache.advance([0] * len(embedded))
        states = made[send(torch.tensor(cache.slots), self.device), skip:]
        head: Any = self.head
        return states, head(states.to(head.weight.dtype))
