"""OpenVINO graphs over a cache that we own, behind the Model protocol.

Row b owns slots 0 .. lengths[b]-1 of every layer. A pass reads them in place; the new keys and
values that it returns are written behind them, so rollback is a smaller length. It does not know
transformers' code, how tokens are chosen, nor how graphs are made and compiled.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import openvino as ov
import torch
from numpy.typing import NDArray
from torch import Tensor

from foretoken.models.base import Blocks
from foretoken.models.rows import (
    CHUNK,
    check_lengths,
    check_room,
    check_sources,
    padded,
    staying,
)

BUCKET = 64  # slots: a shape that changed with every token would need new kernels every time
# numpy has no bf16: OpenVINO shows it as float16, which does for copies of the bits.
STORAGE = {"f32": np.float32, "f16": np.float16, "bf16": np.float16}
Array = NDArray[Any]
Pair = tuple[Array, Array]


class ExplicitModel:
    """Runs what `export_explicit` made: `facts` and its graphs, compiled for the CPU.

    `encoder` is None for a decoder-only model. The cache has the precision of the decoder's inputs
    `keys.i` and `values.i`.
    """

    runtime = "openvino"
    takes_tensors = False

    def __init__(
        self, encoder: ov.CompiledModel | None, decoder: ov.CompiledModel, facts: dict[str, Any]
    ) -> None:
        self.encoder_decoder = encoder is not None
        self.vocab_size: int = facts["vocab_size"]
        self.context: int | None = facts["context"]
        self.source_context: int | None = facts["source_context"]
        self.source_vocab_size: int | None = facts["source_vocab_size"]
        self.identity: str | None = facts.get("identity")  # what its speed follows from
        self.computed: str = facts.get("computed", "float32")
        self.device = torch.device("cpu")
        self.encoder = None if encoder is None else Feed(encoder)
        self.decoder = Feed(decoder)
        self.shapes = shapes(decoder, facts["layers"])
        self.rows: Rows | None = None
        self.padding = 0

    @property
    def hidden(self) -> Tensor:
        states = torch.from_numpy(self.decoder.read("hidden"))
        return states.view(len(self.lengths), -1, states.shape[-1])

    @property
    def lengths(self) -> list[int]:
        return self.rows.lengths if self.rows else []

    def start(self, prompts: list[list[int]], sources: list[list[int]] | None = None) -> None:
        if not prompts:
            return
        if self.encoder is not None:
            check_sources(prompts, sources, self.source_context)
        fresh = Rows([0] * len(prompts), self._empty(len(prompts)), *self._read(sources))
        check_room(fresh.lengths, [len(p) for p in prompts], self.context)
        for at in range(0, max(map(len, prompts)), CHUNK):
            self._run(fresh, [p[at : at + CHUNK] for p in prompts], [0] * len(prompts))
        self.rows = fresh if self.rows is None else self.rows.joined(fresh)

    def score(self, blocks: Blocks, need: list[int]) -> Tensor:
        assert isinstance(blocks, list)
        check_room(self.lengths, [len(block) for block in blocks], self.context)
        if self.rows is None or not any(blocks):
            return torch.zeros(len(blocks), 0, self.vocab_size)
        return self._run(self.rows, blocks, need)

    def set_lengths(self, lengths: list[int]) -> None:
        check_lengths(self.lengths, lengths)
        if self.rows is not None:
            self.rows.lengths = list(lengths)

    def permute(self, rows: list[int]) -> None:
        if self.rows is not None and rows != list(range(len(self.lengths))):
            self.rows = self.rows.selected(rows) if rows else None

    def leave(self, rows: list[int]) -> None:
        self.permute(staying(len(self.lengths), rows))

    def _empty(self, rows: int) -> Slots:
        s = self.shapes
        keys, values = (
            np.zeros((s.layers, rows, s.heads, BUCKET, width), STORAGE[s.kind])
            for width in s.widths
        )
        return Slots((keys, values))

    def _read(self, sources: list[list[int]] | None) -> tuple[Slots | None, list[int]]:
        """Keys and values of the sources, and how many tokens each has."""
        if self.encoder is None or sources is None:
            return None, []
        lengths = [len(source) for source in sources]
        self.encoder.put("ids", padded(sources, self.device).numpy())
        self.encoder.put("sources", np.array(lengths))
        self.encoder.run()
        pair = self.encoder.read("cross_keys").copy(), self.encoder.read("cross_values").copy()
        return Slots(pair), lengths

    def _run(self, rows: Rows, blocks: list[list[int]], need: list[int]) -> Tensor:
        ids, feed = padded(blocks, self.device).numpy(), self.decoder
        most = max(need)
        self.padding = ids.size - sum(map(len, blocks))
        feed.put("ids", ids)
        feed.put("lengths", np.array(rows.lengths))
        feed.put("keep", places(blocks, need, ids.shape[1]))
        feed.bind("", rows.own, self.shapes)
        if rows.cross is not None:
            feed.put("sources", np.array(rows.sources))
            feed.bind("cross_", rows.cross, self.shapes)
        feed.run()
        rows.append([len(b) for b in blocks], (feed.read("new_keys"), feed.read("new_values")))
        if not most:
            return torch.zeros(len(blocks), 0, self.vocab_size)
        logits = feed.read("logits").reshape(len(blocks), most, self.vocab_size)
        return torch.from_numpy(logits.copy())  # the next pass writes over the graph's own


class Feed:
    """One graph's inputs and outputs. Inputs are arrays of ours, set anew only if they moved.

    A request keeps no array alive: `held` and `bound` do. A name is absent there while its input
    changes, so that a change that was broken off is made again.
    """

    def __init__(self, compiled: ov.CompiledModel) -> None:
        self.request = compiled.create_infer_request()
        self.held: dict[str, Array] = {}
        self.bound: dict[str, Pair] = {}

    def put(self, name: str, values: Array) -> None:
        held = self.held.get(name)
        if held is not None and held.shape == values.shape:
            held[...] = values
            return
        self.held.pop(name, None)
        self.request.set_tensor(name, ov.Tensor(values, shared_memory=True))
        self.held[name] = values

    def bind(self, prefix: str, slots: Slots, shapes: Shapes) -> None:
        """Let the cache's inputs read `slots` in place."""
        if self.bound.get(prefix) is slots.pair:
            return
        self.bound.pop(prefix, None)
        for name, arrays in zip(("keys", "values"), slots.pair, strict=True):
            for i, array in enumerate(arrays):
                tensor = ov.Tensor(array, ov.Shape(array.shape), getattr(ov.Type, shapes.kind))
                self.request.set_tensor(f"{prefix}{name}.{i}", tensor)
        self.bound[prefix] = slots.pair

    def run(self) -> None:
        self.request.infer()

    def read(self, name: str) -> Array:
        """An output, valid until the next run."""
        return self.request.get_tensor(name).data


@dataclass(slots=True)
class Rows:
    """Tokens that each row holds, their keys and values, and those of its source."""

    lengths: list[int]
    own: Slots
    cross: Slots | None
    sources: list[int]

    def append(self, tokens: list[int], new: Pair) -> None:
        """Write the first tokens[b] slots of `new [layers, B, heads, n, dim]` behind row b."""
        ends = [n + t for n, t in zip(self.lengths, tokens, strict=True)]
        self.own.reserve(max(ends))
        for b, (start, end) in enumerate(zip(self.lengths, ends, strict=True)):
            for x, fresh in zip(self.own.pair, new, strict=True):
                x[:, b, :, start:end] = fresh[:, b, :, : end - start]
        self.lengths = ends

    def selected(self, rows: list[int]) -> Rows:
        """Row b becomes what row rows[b] was; slots that no source needs any more go."""
        sources = [self.sources[b] for b in rows] if self.sources else []
        cross = self.cross and self.cross.selected(rows, max(sources))
        own = self.own.selected(rows, self.own.capacity)
        return Rows([self.lengths[b] for b in rows], own, cross, sources)

    def joined(self, other: Rows) -> Rows:
        """The rows of `other` behind these."""
        cross = self.cross and other.cross and self.cross.joined(other.cross)
        own, sources = self.own.joined(other.own), self.sources + other.sources
        return Rows(self.lengths + other.lengths, own, cross, sources)


class Slots:
    """Keys and values of every layer, each `[layers, B, heads, capacity, dim]`."""

    def __init__(self, pair: Pair) -> None:
        self.pair = pair

    @property
    def capacity(self) -> int:
        return self.pair[0].shape[3]

    def reserve(self, slots: int) -> None:
        """Grow by an eighth at least: a pass reads the whole capacity, and growing copies it."""
        if slots > self.capacity:
            slots = max(slots, self.capacity + self.capacity // 8)
            self.pair = widened(self.pair, -(-slots // BUCKET) * BUCKET)

    def selected(self, rows: list[int], capacity: int) -> Slots:
        keys, values = (np.take(x[:, :, :, :capacity], rows, axis=1) for x in self.pair)
        return Slots((keys, values))

    def joined(self, other: Slots) -> Slots:
        capacity = max(self.capacity, other.capacity)
        both = zip(widened(self.pair, capacity), widened(other.pair, capacity), strict=True)
        keys, values = (np.concatenate(pair, axis=1) for pair in both)
        return Slots((keys, values))


@dataclass(frozen=True, slots=True)
class Shapes:
    """The shapes of the decoder's cache inputs."""

    layers: int
    heads: int
    widths: tuple[int, int]  # of keys and of values
    kind: str  # element type


def shapes(decoder: ov.CompiledModel, layers: int) -> Shapes:
    keys, values = decoder.input("keys.0"), decoder.input("values.0")
    _, heads, _, width = (side.get_max_length() for side in keys.get_partial_shape())
    kind = keys.get_element_type().get_type_name()
    return Shapes(layers, heads, (width, values.get_partial_shape()[3].get_max_length()), kind)


def widened(pair: Pair, capacity: int) -> Pair:
    """Room for `capacity` slots; zeros, as NaN would survive a mask."""
    missing = capacity - pair[0].shape[3]
    more = [(0, 0)] * 3 + [(0, missing), (0, 0)]
    return (np.pad(pair[0], more), np.pad(pair[1], more)) if missing else pair


def places(blocks: list[list[int]], need: list[int], width: int) -> Array:
    """Places of row b's last need[b] tokens in the flat block `[B * width]`, max(need) per row;
    a row that needs fewer repeats its last.
    """
    flat: list[int] = []
    for b, (block, n) in enumerate(zip(blocks, need, strict=True)):
        assert n <= len(block), f"{n} logits needed of a block of {len(block)}"
        last = b * width + max(len(block) - 1, 0)
        flat += [min(last + 1 - n + i, last) for i in range(max(need))]
    return np.array(flat, dtype=np.int64)
