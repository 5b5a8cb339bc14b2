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

from foretoken.models.rows import CHUNK, most_slots, staying
from foretoken.models.stock.cache import BUCKET, RaggedCache, RaggedLayer
from foretoken.transfer import sent


@dataclass(frozen=True, slots=True)
class BlockForm:
    """The layout of a block.

    Attributes:
        taps: The target's taps that it reads.
        size: Places of a block, at most.
        mask: The id whose embedding stands for a token that is not known.
        from_anchor: True where the place of the last token guesses too.
        by_place: True where a window is counted from each place; else it is from the last token,
            and the block is outside it.
        causal: True where, in a layer with a window, a place sees none of the block behind it.
    """

    taps: tuple[int, ...]
    size: int
    mask: int
    from_anchor: bool = False
    by_place: bool = True
    causal: bool = False

    @property
    def most(self) -> int:
        """Guesses of a block, at most."""
        return self.size if self.from_anchor else self.size - 1


class Markov(nn.Module):
    """A bias on a guess's logits by the token before it (DSpark's Markov head).

    The product of a row for each of the target's tokens, `markov_w1`, and `markov_w2`.
    """

    def __init__(self, vocab_size: int, outputs: int, rank: int) -> None:
        super().__init__()
        self.markov_w1 = nn.Embedding(vocab_size, rank)
        self.markov_w2 = nn.Linear(rank, outputs, bias=False)

    def forward(
        self, hidden: Tensor, before: Tensor, memory: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        """Return the bias `[B, Vd]`, and what the next guess is to be given as `memory`.

        hidden: states of the guess, `[B, H]`; before: `markov_w1` of the token before, `[B, r]`.
        """
        return self.markov_w2(before), None


class GatedMarkov(Markov):
    """The same, where the guess's own state says how much of it counts."""

    def __init__(self, vocab_size: int, outputs: int, rank: int, hidden: int) -> None:
        super().__init__(vocab_size, outputs, rank)
        self.gate_proj = nn.Linear(hidden + rank, rank)

    def forward(
        self, hidden: Tensor, before: Tensor, memory: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        gate = self.gate_proj(torch.cat([hidden, before], -1)).sigmoid()
        return self.markov_w2(gate * before), None


class RecurrentMarkov(Markov):
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


class Confidence(nn.Module):
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


class BlockNetwork(nn.Module):
    """The layers, and what makes the context of `width` values of a target's states.

    chain, confidence: DSpark's, where it has them.
    """

    def __init__(
        self,
        config: Qwen3Config,
        form: BlockForm,
        width: int,
        chain: Markov | None = None,
        confidence: Confidence | None = None,
    ) -> None:
        super().__init__()
        config._attn_implementation = "sdpa"
        H, eps = config.hidden_size, config.rms_norm_eps
        self.config, self.form = config, form
        self.fc = nn.Linear(width, H, bias=False)
        self.hidden_norm, self.norm = Qwen3RMSNorm(H, eps), Qwen3RMSNorm(H, eps)
        layers = [Qwen3DecoderLayer(config, i) for i in range(config.num_hidden_layers)]
        self.layers = nn.ModuleList(layers)
        self.markov_head, self.confidence_head = chain, confidence
        self.rotary = [Qwen3RotaryEmbedding(config)]  # in a list: its numbers stay float32

    def context(self, states: Tensor, positions: Tensor) -> list[tuple[Tensor, Tensor]]:
        """Return each layer's keys and values `[N, heads, dim]` of states `[N, W]` there."""
        c = self.hidden_norm(self.fc(states))
        cos, sin = (x[0, :, None] for x in self._angles(c, positions[None]))
        made: list[tuple[Tensor, Tensor]] = []
        for layer in self.layers:
            attention: Any = layer.self_attn
            shape = (len(c), -1, attention.head_dim)
            k = attention.k_norm(attention.k_proj(c).view(shape))
            v = attention.v_proj(c).view(shape)
            made.append((k * cos + rotate_half(k) * sin, v))
        return made

    def forward(self, embedded: Tensor, cache: RaggedCache, sizes: Tensor) -> Tensor:
        """Return states of blocks `[B, n, H]`, of which row b has the first sizes[b] places."""
        return self.through(embedded, cache, cache.positions, *self._seen(cache, sizes))

    def through(
        self, embedded: Tensor, cache: Any, positions: Tensor, full: Tensor, windowed: Tensor
    ) -> Tensor:
        """Return states of places `[B, n, H]` at these positions, behind a cache that holds the
        context.

        full, windowed: which slots of the cache and then of their own each place sees, `[B, n,
        slots]`, in full layers and in those with a window.
        """
        angles, states = self._angles(embedded, positions), embedded
        for kind, layer in zip(self.config.layer_types or [], self.layers, strict=True):
            states = layer(
                states,
                attention_mask=(windowed if kind == "sliding_attention" else full)[:, None],
                position_embeddings=angles,
                past_key_values=cache,
            )
        return self.norm(states)

    def follow(
        self, states: Tensor, logits: Tensor, tokens: Tensor, memory: Tensor | None
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Let a guess follow the tokens `[B]` before it.

        Returns its logits `[B, Vd]`; the chance that it is accepted where those before it are,
        None where that is not known; and what the next guess is to be given as `memory`.
        """
        before = None
        if self.markov_head is not None:
            before = self.markov_head.markov_w1(tokens)
            bias, memory = self.markov_head(states, before, memory)
            logits = logits + bias
        sure = None if self.confidence_head is None else self.confidence_head(states, before)
        return logits, sure, memory

    def _angles(self, x: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        return self.rotary[0].to(x.device)(x, positions)

    def _seen(self, cache: RaggedCache, sizes: Tensor) -> tuple[Tensor, Tensor]:
        """Which slots each place sees, `[B, n, slots]`: in full layers, and in those with a window.
        All see their own, so that padding makes no NaN."""
        place, slot = cache.positions[:, :, None], torch.arange(cache.end, device=cache.device)
        first, own = place[:, :1], place == slot
        full = slot < first + sizes[:, None, None]
        window = self.config.sliding_window
        if window is None:
            return full | own, full | own
        if self.form.by_place:
            near = (place - slot).abs() <= window
        else:
            near = slot >= first - window
        if self.form.causal:
            near = near & (slot <= place)
        return full | own, (full & near) | own


class StockBlocks:
    """A network of blocks on torch, with the context of rows of different lengths.

    Args:
        network: The network.
        embedding, head: Its ends, which may be the target's own: `[N]` -> `[N, H]` -> `[N, Vd]`.
        ids: The target's ids that its outputs stand for, `[Vd]`; None: their numbers.
    """

    runtime = "transformers"

    def __init__(
        self, network: BlockNetwork, embedding: nn.Module, head: nn.Module, ids: Tensor | None
    ) -> None:
        self.network, self.embedding, self.head, self.ids = network, embedding, head, ids
        self.chained = network.markov_head is not None
        self.most, self.taps = network.form.most, network.form.taps
        self.context: int | None = network.config.max_position_embeddings
        weight = network.fc.weight
        self.identity = f"blocks {network.form} {network.config.to_json_string()} {weight.dtype}"
        self.device = weight.device
        self.cache = self._empty(0)

    def _empty(self, rows: int) -> RaggedCache:
        return RaggedCache([RaggedLayer() for _ in self.network.layers], rows, self.device)

    @property
    def lengths(self) -> list[int]:
        """Tokens of each row whose states were read."""
        return self.cache.lengths

    def memory(self, lengths: list[int], sources: list[int]) -> int:
        """Bytes of the context, at most, of rows of so many tokens."""
        config: Any = self.network.config
        pair = 2 * config.num_key_value_heads * config.head_dim * self.network.fc.weight.itemsize
        return config.num_hidden_layers * pair * most_slots(lengths, BUCKET)

    @torch.inference_mode()
    def start(self, rows: int) -> None:
        """So many rows join, of which nothing is read."""
        if self.lengths:
            self.cache.join(self._empty(rows))
        else:
            self.cache = self._empty(rows)

    @torch.inference_mode()
    def permute(self, rows: list[int]) -> None:
        """Row b becomes what row rows[b] was."""
        if rows:
            self.cache.select(rows)
        else:
            self.cache = self._empty(0)

    def leave(self, rows: list[int]) -> None:
        """Drop rows; those behind move up."""
        self.permute(staying(len(self.lengths), rows))

    @torch.inference_mode()
    def read(self, states: list[Tensor]) -> int:
        """Append the target's states `[n, W]` to the context of each row; return the passes."""
        most = max(map(len, states), default=0)
        for at in range(0, most, CHUNK):
            self._append([row[at : at + CHUNK] for row in states])
        return -(-most // CHUNK)

    def _append(self, states: list[Tensor]) -> None:
        """Nothing here depends on other tokens, so that padding is added to the outcome only."""
        cache, counts = self.cache, [len(part) for part in states]
        places = zip(cache.lengths, counts, strict=True)
        positions = torch.cat([torch.arange(first, first + n) for first, n in places])
        flat = torch.cat([part for part in states if len(part)])
        flat = sent(flat, self.device).to(self.network.fc.weight.dtype)
        made = self.network.context(flat, sent(positions, self.device))
        cache.prepare(max(counts))
        for i, pair in enumerate(made):
            k, v = (pad_sequence(list(x.split(counts)), batch_first=True) for x in pair)
            cache.update(cache.placed(k.transpose(1, 2)), cache.placed(v.transpose(1, 2)), i)
        cache.advance(counts)

    @torch.inference_mode()
    def guess(self, anchors: list[int], counts: list[int]) -> tuple[Tensor, Tensor]:
        """Return states `[B, G, H]` and logits `[B, G, Vd]` of counts[b] guesses behind a row's
        last token; the block leaves nothing in the context."""
        form, cache = self.network.form, self.cache
        skip = int(not form.from_anchor)
        width = max(counts) + skip
        block = torch.full((len(anchors), width), form.mask)
        block[:, 0] = torch.tensor(anchors)
        cache.prepare(width)
        embedded = self.embedding(cache.placed(sent(block, self.device)))
        sizes = cache.placed(sent(torch.tensor(counts), self.device)) + skip
        made = self.network(embedded.to(self.network.fc.weight.dtype), cache, sizes)
        cache.advance([0] * len(counts))
        states = made[sent(torch.tensor(cache.places), self.device), skip:]
        return states, self.head(states)

    @torch.inference_mode()
    def follow(
        self, states: Tensor, logits: Tensor, tokens: Tensor, memory: Tensor | None
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Let a guess follow the tokens `[B]` before it, as the network does."""
        return self.network.follow(states, logits, sent(tokens, self.device), memory)
