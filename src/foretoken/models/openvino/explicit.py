"""OpenVINO graphs over a cache that we own, behind the Model protocol.

A pass reads a row's keys and values in place; the new ones that it returns are written behind them,
so rollback is a smaller length.
It does not know transformers' code, how tokens are chosen, nor how graphs are made and compiled.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from time import perf_counter
from typing import Any, Self

import numpy as np
import openvino as ov
import torch
from numpy.typing import NDArray
from torch import Tensor

from foretoken.models.base import Blocks
from foretoken.models.companion import Companion, require_alike
from foretoken.models.rows import (
    CHUNK,
    Places,
    by_place,
    check_lengths,
    check_room,
    check_sources,
    most_slots,
    padded,
    roomy,
    staying,
)

BUCKET = Places.unit  # a shape that changed with every token would need new kernels every time
# numpy has no bf16: OpenVINO shows it as float16, which does for copies of the bits.
STORAGE = {"f32": np.float32, "f16": np.float16, "bf16": np.float16}
Array = NDArray[Any]
Pair = tuple[Array, Array]


class ExplicitModel:
    """Runs what `export_explicit` made: `facts` and its graphs, compiled for the CPU.

    `encoder` and `cross` are None for a decoder-only model. The cache has the precision of the
    decoder's inputs `keys.i` and `values.i`.
    """

    runtime = "openvino"
    takes_tensors = False

    def __init__(
        self,
        decoder: ov.CompiledModel,
        facts: dict[str, Any],
        cross: ov.CompiledModel | None = None,
        encoder: ov.CompiledModel | None = None,
    ) -> None:
        self.encoder_decoder = cross is not None
        self.vocab_size: int = facts["vocab_size"]
        self.context: int | None = facts["context"]
        self.source_context: int | None = facts["source_context"]
        self.source_vocab_size: int | None = facts["source_vocab_size"]
        self.identity: str | None = facts.get("identity")  # what its speed follows from
        self.computed: str = facts.get("computed", "float32")
        self.device = torch.device("cpu")
        self.encoder_seconds = 0.0
        self.encoder = None if encoder is None else Feed(encoder, [])
        self.cross = None if cross is None else Feed(cross, [])
        self.decoder = Feed(decoder, list(range(facts["layers"])))
        self.shapes = shapes(decoder, facts["layers"])
        self.caches: list[Slots] = []  # of the rows, and of their sources if there are any
        self.padding = 0

    @property
    def hidden(self) -> Tensor:
        states = torch.from_numpy(self.decoder.read("hidden"))
        return states.view(len(self.lengths), -1, states.shape[-1])

    @property
    def lengths(self) -> list[int]:
        return self.caches[0].lengths if self.caches else []

    @property
    def kind(self) -> str:
        """The element type of keys and values."""
        return self.shapes.kind

    def companion(
        self, compiled: ov.CompiledModel, facts: dict[str, Any], some: tuple[int, ...]
    ) -> Companion[Feed]:
        """A copy of this model, which has `some` of its layers, or all of them where that is empty,
        over its rows."""
        layers = list(some or range(self.shapes.layers))
        require_alike(shapes(compiled, len(layers)), replace(self.shapes, layers=len(layers)))
        return Companion(self, Feed(compiled, layers), facts)

    def memory(self, lengths: list[int], sources: list[int]) -> int:
        s = self.shapes
        token = s.layers * s.heads * sum(s.widths) * np.dtype(STORAGE[s.kind]).itemsize
        read = sources if self.encoder_decoder else []
        return token * (most_slots(lengths, BUCKET) + most_slots(read, 1))

    def start(self, prompts: list[list[int]], sources: list[list[int]] | None = None) -> None:
        if not prompts:
            return
        check_room([0] * len(prompts), [len(p) for p in prompts], self.context)
        own = Slots.empty(len(prompts), self.shapes)
        fresh = [own, *self._read(prompts, sources)]
        for at in range(0, max(map(len, prompts)), CHUNK):
            blocks = [p[at : at + CHUNK] for p in prompts]
            self._run(self.decoder, fresh, own.lengths, blocks, [0] * len(prompts))
            own.lengths = gained(own.lengths, blocks)
        for mine, joining in zip(self.caches, fresh, strict=False):
            mine.join(joining)
        self.caches = self.caches or fresh

    def score(self, blocks: Blocks, need: list[int]) -> Tensor:
        assert isinstance(blocks, list)
        check_room(self.lengths, [len(block) for block in blocks], self.context)
        logits = self.scored(self.decoder, self.lengths, blocks, need)
        if self.caches:
            self.caches[0].lengths = gained(self.lengths, blocks)
        return logits

    def scored(
        self, feed: Feed, past: list[int], blocks: list[list[int]], need: list[int]
    ) -> Tensor:
        """The logits as `score` returns them, by any decoder over this cache, of which row b has
        past[b] tokens in place; no row moves on."""
        if not self.caches or not any(blocks):
            return torch.zeros(len(blocks), 0, self.vocab_size)
        return self._run(feed, self.caches, past, blocks, need)

    def set_lengths(self, lengths: list[int]) -> None:
        check_lengths(self.lengths, lengths)
        if self.caches:
            self.caches[0].lengths = list(lengths)

    def permute(self, rows: list[int]) -> None:
        self.caches = self.caches if rows else []  # an idle model keeps no memory
        for cache in self.caches:
            cache.select(rows)

    def leave(self, rows: list[int]) -> None:
        self.permute(staying(len(self.lengths), rows))

    def _read(self, prompts: list[list[int]], sources: list[list[int]] | None) -> list[Slots]:
        """Keys and values of the sources, if there are any."""
        if self.cross is None:
            return []
        start = perf_counter()
        states, lengths = self._encoded(prompts, sources)
        self.cross.put("states", states)
        self.cross.run()
        self.encoder_seconds += perf_counter() - start
        B, S = len(lengths), max(lengths)
        read = (self.cross.read(name) for name in ("cross_keys", "cross_values"))
        keys, values = (resized(x, roomy(B), S, B) for x in read)
        return [Slots(lengths, (keys, values), 1)]

    def _encoded(
        self, prompts: list[list[int]], sources: list[list[int]] | None
    ) -> tuple[Array, list[int]]:
        """The encoder's states `[B, S, H]` of the sources, and how many each has."""
        check_sources(prompts, sources, self.source_context)
        assert self.encoder is not None and sources is not None
        lengths = [len(source) for source in sources]
        self.encoder.put("ids", padded(sources, self.device).numpy())
        self.encoder.put("sources", np.array(lengths))
        self.encoder.run()
        return self.encoder.read("states"), lengths

    def _run(
        self,
        feed: Feed,
        caches: list[Slots],
        past: list[int],
        blocks: list[list[int]],
        need: list[int],
    ) -> Tensor:
        own, *cross = caches
        B = len(blocks)
        for cache, lengths in zip(caches, (past, *(each.lengths for each in cross)), strict=True):
            cache.close(lengths)
            cache.trim(B, max(lengths))
        order = by_place(own.places)
        ids = padded([blocks[b] for b in order], self.device).numpy()
        most = max(need)
        self.padding = ids.size - sum(map(len, blocks))
        feed.put("ids", ids)
        feed.put("lengths", np.array([past[b] for b in order]))
        feed.put("keep", kept(blocks, need, own.places))
        feed.bind("", own, B, self.shapes)
        for cache in cross:
            feed.put("sources", np.array([cache.lengths[b] for b in order]))
            feed.bind("cross_", cache, B, self.shapes)
        feed.run()
        new = feed.read("new_keys"), feed.read("new_values")
        own.write(past, [len(b) for b in blocks], new, feed.layers)
        if not most:
            return torch.zeros(B, 0, self.vocab_size)
        logits = feed.read("logits").reshape(B, most, self.vocab_size).copy()
        for b, n in enumerate(need):  # what it repeats may be invalid, which is no mate's concern
            logits[b, n:] = 0
        return torch.from_numpy(logits)  # a copy: the next pass writes over the graph's own


class Feed:
    """One graph's inputs and outputs. Inputs are arrays of ours, set anew only if they moved.

    A request keeps no array alive: `held` and `bound` do. A name is absent there while its input
    changes, so that a change that was broken off is made again.
    """

    def __init__(self, compiled: ov.CompiledModel, layers: list[int]) -> None:
        self.request = compiled.create_infer_request()
        self.layers = layers  # of the cache, those that it reads and writes
        self.held: dict[str, Array] = {}
        self.bound: dict[str, tuple[Pair, int]] = {}  # with how many rows

    def put(self, name: str, values: Array) -> None:
        tensor = self.held.get(name)
        if tensor is not None and tensor.shape == values.shape:
            tensor[...] = values
            return
        self.held.pop(name, None)
        self.request.set_tensor(name, ov.Tensor(values, shared_memory=True))
        self.held[name] = values

    def bind(self, prefix: str, slots: Slots, rows: int, shapes: Shapes) -> None:
        """Let the cache's inputs read the first `rows` places of `slots`, where they stand."""
        pair, bound = self.bound.get(prefix, (None, 0))
        if pair is slots.arrays and bound == rows:
            return
        self.bound.pop(prefix, None)
        for name, arrays in zip(("keys", "values"), slots.arrays, strict=True):
            for i, array in enumerate(arrays[layer, :rows] for layer in self.layers):
                tensor = ov.Tensor(array, ov.Shape(array.shape), getattr(ov.Type, shapes.kind))
                self.request.set_tensor(f"{prefix}{name}.{i}", tensor)
        self.bound[prefix] = slots.arrays, rows

    def run(self) -> None:
        self.request.infer()

    def read(self, name: str) -> Array:
        """An output, valid until the next run."""
        return self.request.get_tensor(name).data


class Slots(Places):
    """Keys and values of rows, of every layer in one array `[layers, rows, heads, capacity, dim]`,
    with room for more rows than there are. A pass reads the whole capacity, so little is added."""

    spare = 8
    is_initialized = True

    def __init__(self, lengths: list[int], arrays: Pair, unit: int = BUCKET) -> None:
        self.lengths, self.places = lengths, list(range(len(lengths)))
        self.arrays, self.unit = arrays, unit
        _, self.rows, _, self.capacity, _ = arrays[0].shape

    @classmethod
    def empty(cls, rows: int, shapes: Shapes) -> Self:
        """So many rows that hold nothing yet."""
        layers, heads, kind = shapes.layers, shapes.heads, STORAGE[shapes.kind]
        keys, values = (
            np.zeros((layers, roomy(rows), heads, BUCKET, width), kind) for width in shapes.widths
        )
        return cls([0] * rows, (keys, values))

    def parts(self) -> list[Self]:
        return [self]

    def fit(self, like: Pair, rows: int, capacity: int, used: int) -> None:
        keys, values = (resized(x, rows, capacity, used) for x in like)
        self.arrays = keys, values

    def put(self, place: int, row: Pair) -> None:
        """A row `[layers, heads, n, dim]` takes this place. Zeros stand behind it, as NaN that
        another row has left would survive a mask."""
        for x, new in zip(self.arrays, row, strict=True):
            x[:, place, :, : new.shape[2]] = new
            x[:, place, :, new.shape[2] :] = 0

    def row(self, place: int, slots: int) -> Pair:
        keys, values = self.arrays
        return keys[:, place, :, :slots], values[:, place, :, :slots]

    def write(self, past: list[int], tokens: list[int], new: Pair, layers: list[int]) -> None:
        """Write the first tokens[b] slots of row b's place in `new [len(layers), B, heads, n, dim]`
        behind its first past[b] ones, in these layers."""
        ends = [n + t for n, t in zip(past, tokens, strict=True)]
        self.reserve(len(ends), max(ends))
        for place, start, end in zip(self.places, past, ends, strict=True):
            for x, fresh in zip(self.arrays, new, strict=True):
                x[layers, place, :, start:end] = fresh[:, place, :, : end - start]


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


def gained(lengths: list[int], blocks: list[list[int]]) -> list[int]:
    return [n + len(block) for n, block in zip(lengths, blocks, strict=True)]


def resized(x: Array, rows: int, capacity: int, used: int) -> Array:
    """A larger or smaller array, zeros where nothing stood in the first `used` places."""
    new = np.zeros((x.shape[0], rows, x.shape[2], capacity, x.shape[4]), x.dtype)
    slots = min(capacity, x.shape[3])
    new[:, :used, :, :slots] = x[:, :used, :, :slots]
    return new


def kept(blocks: list[list[int]], need: list[int], places: list[int]) -> Array:
    """Where row b's last need[b] tokens are in the flat block `[B * width]`, max(need) per row; a
    row that needs fewer repeats its last.
    """
    flat: list[int] = []
    width = max(map(len, blocks))
    for block, n, place in zip(blocks, need, places, strict=True):
        assert n <= len(block), f"{n} logits needed of a block of {len(block)}"
        last = place * width + max(len(block) - 1, 0)
        flat += [min(last + 1 - n + i, last) for i in range(max(need))]
    return np.array(flat, dtype=np.int64)
