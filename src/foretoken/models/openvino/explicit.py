"""OpenVINO graphs over a cache that we own, behind the Model protocol.

Every row has a place in all layers, of which slots 0 .. length-1 are its own. A pass reads them in
place; the new keys and values that it returns are written behind them, so rollback is a smaller
length. Rows that stay are not moved when others join or leave, but for the last, which close gaps.
It does not know transformers' code, how tokens are chosen, nor how graphs are made and compiled.
"""

from __future__ import annotations

from dataclasses import dataclass
from time import perf_counter
from typing import Any

import numpy as np
import openvino as ov
import torch
from numpy.typing import NDArray
from torch import Tensor

from foretoken.models.base import Blocks
from foretoken.models.openvino.companion import Companion, require_alike
from foretoken.models.rows import (
    CHUNK,
    beyond,
    by_place,
    check_lengths,
    check_room,
    check_sources,
    joined,
    most_slots,
    moved,
    padded,
    repeated,
    room,
    roomy,
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
        self.encoder_seconds = 0.0
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

    @property
    def kind(self) -> str:
        """The element type of keys and values."""
        return self.shapes.kind

    def companion(self, compiled: ov.CompiledModel, facts: dict[str, Any]) -> Companion[Feed]:
        """A copy of this model over its rows."""
        require_alike(shapes(compiled, self.shapes.layers), self.shapes)
        return Companion(self, Feed(compiled), facts)

    def memory(self, lengths: list[int], sources: list[int]) -> int:
        s = self.shapes
        token = s.layers * s.heads * sum(s.widths) * np.dtype(STORAGE[s.kind]).itemsize
        read = sources if self.encoder_decoder else []
        return token * (most_slots(lengths, BUCKET) + most_slots(read, 1))

    def start(self, prompts: list[list[int]], sources: list[list[int]] | None = None) -> None:
        if not prompts:
            return
        if self.encoder is not None:
            check_sources(prompts, sources, self.source_context)
        fresh = Rows([0] * len(prompts), self._empty(len(prompts)), *self._read(sources))
        check_room(fresh.lengths, [len(p) for p in prompts], self.context)
        for at in range(0, max(map(len, prompts)), CHUNK):
            blocks = [p[at : at + CHUNK] for p in prompts]
            self._run(self.decoder, fresh, fresh.lengths, blocks, [0] * len(prompts))
            fresh.lengths = gained(fresh.lengths, blocks)
        if self.rows is None:
            self.rows = fresh
        else:
            self.rows.join(fresh)

    def score(self, blocks: Blocks, need: list[int]) -> Tensor:
        assert isinstance(blocks, list)
        check_room(self.lengths, [len(block) for block in blocks], self.context)
        logits = self.scored(self.decoder, self.lengths, blocks, need)
        if self.rows is not None:
            self.rows.lengths = gained(self.lengths, blocks)
        return logits

    def scored(
        self, feed: Feed, past: list[int], blocks: list[list[int]], need: list[int]
    ) -> Tensor:
        """The logits as `score` returns them, by any decoder over this cache, of which row b has
        past[b] tokens in place; no row moves on."""
        if self.rows is None or not any(blocks):
            return torch.zeros(len(blocks), 0, self.vocab_size)
        return self._run(feed, self.rows, past, blocks, need)

    def set_lengths(self, lengths: list[int]) -> None:
        check_lengths(self.lengths, lengths)
        if self.rows is not None:
            self.rows.lengths = list(lengths)

    def permute(self, rows: list[int]) -> None:
        if self.rows is not None and rows:
            self.rows.select(rows)
        else:  # an idle model keeps no memory
            self.rows = None

    def leave(self, rows: list[int]) -> None:
        self.permute(staying(len(self.lengths), rows))

    def _empty(self, rows: int) -> Slots:
        s = self.shapes
        keys, values = (
            np.zeros((s.layers, roomy(rows), s.heads, BUCKET, width), STORAGE[s.kind])
            for width in s.widths
        )
        return Slots((keys, values), BUCKET)

    def _read(self, sources: list[list[int]] | None) -> tuple[Slots | None, list[int]]:
        """Keys and values of the sources, and how many tokens each has."""
        if self.encoder is None or sources is None:
            return None, []
        lengths = [len(source) for source in sources]
        self.encoder.put("ids", padded(sources, self.device).numpy())
        self.encoder.put("sources", np.array(lengths))
        start = perf_counter()
        self.encoder.run()
        self.encoder_seconds += perf_counter() - start
        B, S = len(sources), max(lengths)
        read = (self.encoder.read(name) for name in ("cross_keys", "cross_values"))
        keys, values = (resized(x, roomy(B), S, B) for x in read)
        return Slots((keys, values), 1), lengths

    def _run(
        self, feed: Feed, rows: Rows, past: list[int], blocks: list[list[int]], need: list[int]
    ) -> Tensor:
        rows.close(past)
        B, order = len(blocks), by_place(rows.places)
        ids = padded([blocks[b] for b in order], self.device).numpy()
        most = max(need)
        self.padding = ids.size - sum(map(len, blocks))
        feed.put("ids", ids)
        feed.put("lengths", np.array([past[b] for b in order]))
        feed.put("keep", kept(blocks, need, rows.places))
        feed.bind("", rows.own, B, self.shapes)
        if rows.cross is not None:
            feed.put("sources", np.array([rows.sources[b] for b in order]))
            feed.bind("cross_", rows.cross, B, self.shapes)
        feed.run()
        new = feed.read("new_keys"), feed.read("new_values")
        rows.write(past, [len(b) for b in blocks], new)
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

    def __init__(self, compiled: ov.CompiledModel) -> None:
        self.request = compiled.create_infer_request()
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
        if pair is slots.pair and bound == rows:
            return
        self.bound.pop(prefix, None)
        for name, arrays in zip(("keys", "values"), slots.pair, strict=True):
            for i, array in enumerate(arrays[:, :rows]):
                tensor = ov.Tensor(array, ov.Shape(array.shape), getattr(ov.Type, shapes.kind))
                self.request.set_tensor(f"{prefix}{name}.{i}", tensor)
        self.bound[prefix] = slots.pair, rows

    def run(self) -> None:
        self.request.infer()

    def read(self, name: str) -> Array:
        """An output, valid until the next run."""
        return self.request.get_tensor(name).data


class Rows:
    """Rows with the places they have, the tokens they hold, their keys and values, and those of
    their sources."""

    def __init__(
        self, lengths: list[int], own: Slots, cross: Slots | None, sources: list[int]
    ) -> None:
        self.places = list(range(len(lengths)))
        self.lengths, self.sources = lengths, sources  # sources: tokens of each, or none at all
        self.own, self.cross = own, cross

    def write(self, past: list[int], tokens: list[int], new: Pair) -> None:
        """Write the first tokens[b] slots of row b's place in `new [layers, B, heads, n, dim]`
        behind its first past[b] ones."""
        ends = [n + t for n, t in zip(past, tokens, strict=True)]
        self.own.reserve(len(ends), max(ends), len(ends))
        for place, start, end in zip(self.places, past, ends, strict=True):
            for x, fresh in zip(self.own.pair, new, strict=True):
                x[:, place, :, start:end] = fresh[:, place, :, : end - start]

    def join(self, other: Rows) -> None:
        """The rows of `other` join behind these."""
        B, places = len(self.places), joined(self.places, len(other.places))
        lengths, sources = self.lengths + other.lengths, self.sources + other.sources
        parts = ((self.own, other.own, lengths), (self.cross, other.cross, sources))
        for own, theirs, slots in parts:
            if own is not None and theirs is not None:
                own.reserve(room(places), max(slots), room(self.places))
                for b, place in enumerate(other.places):
                    own.put(places[B + b], theirs.row(place, slots[B + b]))
        self.places, self.lengths, self.sources = places, lengths, sources

    def select(self, rows: list[int]) -> None:
        """Row b becomes what row rows[b] was. Only what is repeated is copied."""
        places, lengths = [self.places[b] for b in rows], [self.lengths[b] for b in rows]
        sources = [self.sources[b] for b in rows] if self.sources else []
        places = self._copied(places, lengths, sources, repeated(places))
        self.places, self.lengths, self.sources = places, lengths, sources

    def close(self, lengths: list[int]) -> None:
        """The last rows move into the gaps, as a pass reads the first places; slots go that are not
        needed for so many tokens of each row."""
        B, sources = len(self.places), self.sources
        self.places = self._copied(self.places, lengths, sources, beyond(self.places))
        self.own.trim(B, max(lengths))
        if self.cross is not None:
            self.cross.trim(B, max(sources))

    def _copied(
        self, places: list[int], lengths: list[int], sources: list[int], rows: list[int]
    ) -> list[int]:
        """The places, where these `rows` have been copied to free ones."""
        new = moved(places, rows)
        for part, slots in ((self.own, lengths), (self.cross, sources)):
            if part is not None:
                part.reserve(room(new), 0, room(self.places))
                for b in rows:
                    part.put(new[b], part.row(places[b], slots[b]))
        return new


class Slots:
    """Keys and values of every layer, each `[layers, rows, heads, capacity, dim]`, with room for
    more rows than there are; a capacity that is chosen here is a multiple of `unit`."""

    def __init__(self, pair: Pair, unit: int) -> None:
        self.pair, self.unit = pair, unit

    @property
    def capacity(self) -> int:
        return self.pair[0].shape[3]

    def reserve(self, rows: int, slots: int, used: int) -> None:
        """Room for so many; the first `used` places stay. Rows grow by half at least, slots by an
        eighth: a pass reads the whole capacity."""
        most = self.pair[0].shape[1]
        if rows <= most and slots <= self.capacity:
            return
        rows = max(rows, roomy(most)) if rows > most else min(most, roomy(rows))
        if slots > self.capacity:
            slots = max(slots, self.capacity + self.capacity // 8)
        self._resize(rows, max(slots, self.capacity), used)

    def trim(self, rows: int, slots: int) -> None:
        """Give up slots where these are less than half, with room for rows that have left."""
        if 2 * slots + self.unit < self.capacity:
            self._resize(min(self.pair[0].shape[1], roomy(rows)), slots, rows)

    def _resize(self, rows: int, slots: int, used: int) -> None:
        capacity = -(-max(slots, 1) // self.unit) * self.unit
        keys, values = (resized(x, rows, capacity, used) for x in self.pair)
        self.pair = keys, values

    def put(self, place: int, row: Pair) -> None:
        """A row `[layers, heads, n, dim]` takes this place. Zeros stand behind it, as NaN that
        another row has left would survive a mask."""
        for x, new in zip(self.pair, row, strict=True):
            x[:, place, :, : new.shape[2]] = new
            x[:, place, :, new.shape[2] :] = 0

    def row(self, place: int, slots: int) -> Pair:
        keys, values = self.pair
        return keys[:, place, :, :slots], values[:, place, :, :slots]


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
