"""Keys and values in pages, which several graphs may read and rows share, and the flat passes of a
graph over them: the new tokens of all rows one behind another, whatever their lengths.

Which pages hold which beginnings of texts is known by whole pages, found by their very tokens:
nothing is taken for another text's because two hashes happen to agree. A page that is written anew
must be forgotten first. Knows no models; which rows there are, its caller knows.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from dataclasses import dataclass, field
from itertools import chain
from math import prod
from typing import Any
from weakref import ReferenceType, ref

import numpy as np
import openvino as ov
import torch
from numpy.typing import NDArray
from torch import Tensor

from foretoken.models.openvino.states import StateFeed
from foretoken.models.rows import Padding

Key = tuple[int, ...]  # the tokens of a page


class Prefixes:
    """Beginnings of texts, apart by salt: what one salt's texts have read serves no other's. A salt
    is no int, as pages are."""

    def __init__(self) -> None:
        # pages by the one before them, a salt for the first, and their tokens; and the other way
        self._pages: dict[tuple[Hashable, Key], int] = {}
        self._places: dict[int, tuple[Hashable, Key]] = {}
        self._behind: dict[int, set[int]] = {}  # the pages behind each one

    def find(self, tokens: list[int], size: int, salt: Hashable) -> list[int]:
        """The pages, of `size` tokens each, that hold the longest known beginning."""
        pages: list[int] = []
        before: Hashable = salt
        for key in _keys(tokens, size):
            page = self._pages.get((before, key))
            if page is None:
                break
            pages.append(page)
            before = page
        return pages

    def note(self, tokens: list[int], pages: list[int], size: int, salt: Hashable) -> None:
        """These pages hold this text, of which whole pages count. Where other pages hold the same,
        those stay known."""
        before: Hashable = salt
        for key, page in zip(_keys(tokens, size), pages, strict=False):
            known = self._pages.get((before, key))
            if known is None:
                if page in self._places:  # of another text, though it is the same page
                    return
                self._pages[before, key], self._places[page] = page, (before, key)
                if isinstance(before, int):
                    self._behind.setdefault(before, set()).add(page)
                known = page
            before = known

    def forget(self, page: int) -> None:
        """The page is about to be written to; what stands behind it cannot be found any more."""
        before, _ = self._places.get(page, (None, ()))
        if isinstance(before, int):
            self._behind[before].discard(page)
        behind = [page]
        while behind:
            page = behind.pop()
            if page in self._places:
                del self._pages[self._places.pop(page)]
            behind += self._behind.pop(page, ())

    def __contains__(self, page: object) -> bool:
        """Tell whether a page holds part of a text that can be found."""
        return page in self._places


def _keys(tokens: list[int], size: int) -> Iterator[Key]:
    """The whole pages of a text."""
    for at in range(0, len(tokens) - size + 1, size):
        yield tuple(tokens[at : at + size])


PAGE = 2  # dimension of the cache [pages, heads, tokens of a page, width]
FIRST = 16  # pages to begin with; the pool then grows by half
DEEPEST = 1 << 20  # pages of a text at most
LINE = 64  # bytes of a cache line
BITS = {1: np.uint8, 2: np.float16, 4: np.float32, 8: np.float64}  # by bytes


@dataclass(frozen=True, slots=True)
class Layer:
    """The keys, or the values, of a layer: their shape in a page, and their type."""

    shape: tuple[int, ...]
    kind: ov.Type

    @property
    def bytes(self) -> int:
        return self.kind.size * prod(self.shape)


def layers(graph: ov.CompiledModel) -> dict[str, Layer]:
    """Return the layers that a graph keeps in pages, by the names of its inputs."""
    layers_of: dict[str, Layer] = {}
    for port in graph.inputs:
        if "cache." in port.get_any_name():
            inner = list(port.get_partial_shape())[1:]
            shape = tuple(size.get_length() for size in inner)
            layers_of[port.get_any_name()] = Layer(shape, port.get_element_type())
    return layers_of


@dataclass(slots=True)
class Pool:
    """Pages with the same numbers in every layer, for the graphs that are bound to them."""

    layers: dict[str, Layer]
    size: int = 0  # pages in every layer
    goal: int = 0  # the size after growing, which may have been broken off
    arrays: dict[str, NDArray[Any]] = field(default_factory=dict)
    free: list[int] = field(default_factory=list)
    holders: list[int] = field(default_factory=list)  # rows per page
    prefixes: Prefixes | None = None  # None: nothing is kept of texts that have left
    # when a row left each page last; the deeper ones of its text a little earlier
    left: list[float] = field(default_factory=list)
    clock: int = 0
    tensors: dict[str, ov.Tensor] = field(default_factory=dict)  # over the arrays
    readers: list[tuple[ReferenceType[ov.InferRequest], dict[str, str]]] = field(
        default_factory=list
    )

    @property
    def page(self) -> int:
        """Tokens of a page."""
        return self.layers["key_cache.0"].shape[PAGE - 1]

    @property
    def page_bytes(self) -> int:
        return sum(layer.bytes for layer in self.layers.values())

    def bind(self, request: ov.InferRequest, names: dict[str, str]) -> None:
        """Let a graph read and write these pages, as long as its request lives. names: its inputs,
        by the pool's names."""
        self.readers.append((ref(request), names))
        for name, own in names.items():
            if name in self.tensors:
                request.set_tensor(own, self.tensors[name])

    def take(self) -> int:
        if not self.free:
            self.grow()
        page = self.free.pop()
        if self.prefixes is not None:
            self.prefixes.forget(page)
        self.holders[page] = 1
        return page

    def share(self, pages: list[int]) -> None:
        """Another row holds these pages, which may be free."""
        used = set(pages)
        self.free = [page for page in self.free if page not in used]
        for page in pages:
            self.holders[page] += 1

    def leave(self, pages: list[int]) -> None:
        """A row is about to leave these pages, which are its text's from the first on."""
        self.clock += 1
        for depth, page in enumerate(pages):
            self.left[page] = self.clock - depth / DEEPEST

    def own(self, pages: list[int], i: int) -> None:
        """Copy page i of a row, which is about to be written to, if other rows hold it too."""
        shared = pages[i]
        if self.holders[shared] == 1:
            return
        fresh = self.take()
        for array in self.arrays.values():
            array[fresh] = array[shared]
        pages[i] = fresh
        self.holders[shared] -= 1  # last: broken off before, a page is idle until rows change

    def counted(self, rows: list[list[int]]) -> tuple[list[int], list[int]]:
        """`holders` and `free` where these are all the rows, as their pages."""
        holders = [0] * self.size
        for page in chain.from_iterable(rows):
            holders[page] += 1
        free = [page for page in reversed(range(self.size)) if not holders[page]]
        if self.prefixes is not None:  # what is known goes last: first what was left long ago
            cached = [page for page in free if page in self.prefixes]
            cached.sort(key=self.left.__getitem__, reverse=True)
            free = [*cached, *(page for page in free if page not in self.prefixes)]
        return holders, free

    def reserve(self, pages: int) -> None:
        """So many pages at least, at once; untouched they take no memory."""
        self.goal = max(self.size, pages)
        self.fit()

    def grow(self) -> None:
        self.goal = max(FIRST, self.size + self.size // 2)
        self.fit()

    def fit(self) -> None:
        """Bring every layer to the goal, also after growing was broken off: where keys and values
        have different sizes, OpenVINO computes nothing, without an error."""
        if self.size == self.goal:
            return
        for name in self.layers:
            if name not in self.arrays or len(self.arrays[name]) != self.goal:
                self._widen(name)
        more = range(self.goal - 1, self.size - 1, -1)
        # At once: broken off in between, a page would be free twice
        self.free, self.holders, self.left, self.size = (
            [*self.free, *more],
            [*self.holders, *[0] * len(more)],
            [*self.left, *[0.0] * len(more)],
            self.goal,
        )

    def _widen(self, name: str) -> None:
        layer = self.layers[name]
        array, bigger = blank([self.goal, *layer.shape], layer.kind)
        if self.size:
            array[: self.size] = self.arrays[name]
        for reader, names in self.readers:
            if name in names and (request := reader()) is not None:
                request.set_tensor(names[name], bigger)
        self.tensors[name] = bigger
        self.arrays[name] = array


def blank(shape: list[int], kind: ov.Type) -> tuple[NDArray[Any], ov.Tensor]:
    """Zeros, which take memory where they are written to, and a tensor over them. numpy has no
    bf16: it sees the bits as float16."""
    count = prod(shape) * kind.size
    room = np.zeros(count + LINE, np.uint8)
    first = -room.ctypes.data % LINE
    array = room[first : first + count].view(BITS[kind.size]).reshape(shape)
    return array, ov.Tensor(array, ov.Shape(shape), kind)


MOST = 16  # tokens added to a pass


class FlatInputs:
    """Inputs of a flat pass, row behind row."""

    def __init__(self) -> None:
        self.ids: list[int] = []
        self.positions: list[int] = []
        self.needed: list[int] = []  # the tokens whose logits are asked for
        self.past: list[int] = []  # tokens of every row in its pages
        self.begins = [0]
        self.pages: list[int] = []
        self.page_begins = [0]
        self.longest = 0  # tokens of the longest row

    def add(self, ids: list[int], past: int, pages: list[int], first: int, needed: range) -> None:
        """The tokens of one more row, which has so many in these pages. first: the position of its
        first token; needed: the tokens, among these, whose logits are asked for."""
        begin, at = len(self.ids), first + past
        self.ids += ids
        self.positions += range(at, at + len(ids))
        self.needed += range(begin + needed.start, begin + needed.stop)
        self.past.append(past)
        self.begins.append(len(self.ids))
        self.pages += pages
        self.page_begins.append(len(self.pages))
        self.longest = max(self.longest, past + len(ids))

    def step(self, ids: list[int]) -> None:
        """Go on by a token in every row, which had one: these."""
        self.ids[: len(ids)] = ids
        self.positions = [position + 1 for position in self.positions]
        self.past = [n + 1 for n in self.past]
        self.longest += 1


class Flat:
    """A compiled graph, its inputs and its logits; `facts` are its export's."""

    def __init__(self, compiled: ov.CompiledModel, facts: dict[str, Any]) -> None:
        self.request = compiled.create_infer_request()
        kinds = {p.get_any_name(): p.get_element_type() for p in compiled.inputs}
        self.kinds = {name: k.to_dtype() for name, k in kinds.items() if "cache." not in name}
        self.buffers: dict[tuple[str, int], tuple[NDArray[Any], ov.Tensor]] = {}
        self.bound: dict[str, int] = {}  # sizes of the buffers that the request has now
        ports = enumerate(compiled.outputs)
        # asked for by name, one of a graph with many inputs takes ten times as long
        self.numbers = {name: i for i, port in ports for name in port.names}
        self._logits = blank([1, 0, 1], ov.Type.f32)[0]  # that the request writes, [1, N, V]
        self._views: dict[tuple[int, int], Tensor] = {}  # of these, by their shape
        self.longest: int | None = facts.get("longest") or facts["context"]
        self.sizes = Padding()
        self.padding = 0
        self.feed = FlatInputs()  # of the last pass
        self.states: StateFeed | None = None  # of a model that has some
        # what a decoder of pairs reads in the next pass, [N, W], in place of ids
        self.given: NDArray[Any] | None = None

    def pad(self, tokens: int, length: int, room: int, *, single: bool) -> None:
        """Choose the padding of a pass over so many tokens, of which the last row will have
        `length`, and room for some more where the next ones will be written: for a pass of another
        size OpenVINO prepares every layer anew. single: it is over one token of each row."""
        room = min(MOST, room)
        if self.longest is not None:
            room = min(room, self.longest - length)
        self.padding = self.sizes.missing(tokens, room, single=single)

    def run(self, feed: FlatInputs, need: list[int]) -> Tensor:
        """A pass over these tokens; the logits that are needed, so many of each row of the batch,
        `[B, max(need), V]`, valid until the next pass."""
        self.feed = feed
        reads = "input_ids" if self.given is None else "inputs_embeds"
        needed = feed.needed or [0]
        if len(feed.ids) == self.bound.get(reads):  # the size stays that of the pass
            needed = needed + needed[-1:] * (self.bound.get("needed", 0) - len(needed))
        self._put(reads, feed.ids if self.given is None else self.given)
        self._put("position_ids", feed.positions)
        self._put("needed", needed)
        self._put("past_lens", feed.past)
        self._put("subsequence_begins", feed.begins)
        self._put("block_indices_begins", feed.page_begins)
        self._put("block_indices", feed.pages)
        self._put("max_context_len", [feed.longest])
        self._make_room(len(needed))
        self.request.infer(share_outputs=True)
        return self._made(need)

    def repeats(self, rows: int) -> bool:
        """Tell whether the last pass was over one token of so many rows, with the same padding: of
        a row that read two tokens without padding, the second one's logits were needed."""
        same = len(self.feed.past) == rows and len(self.feed.ids) == rows + self.padding
        return same and self.feed.needed == list(range(rows)) and self.states is None

    def again(self, ids: list[int]) -> None:
        """The last pass, one token further in all rows: these."""
        self.feed.step(ids)
        self._put("input_ids", self.feed.ids)
        self._put("position_ids", self.feed.positions)
        self._put("past_lens", self.feed.past)
        self._put("max_context_len", [self.feed.longest])
        self.request.infer(share_outputs=True)

    def last(self, rows: int) -> NDArray[Any]:
        """The first logits of the last pass, `[rows, V]`."""
        return self._logits[0, :rows]

    def output(self, name: str, count: int) -> Tensor:
        """The first `count` rows of an output of the last run, whose padding may have made more."""
        values = torch.from_numpy(self.request.get_output_tensor(self.numbers[name]).data)
        return values.flatten(0, -2)[:count]

    def give(self, rows: NDArray[Any], tokens: int) -> None:
        """Let the next pass, over so many tokens with padding, read these in place of ids."""
        self.given = np.pad(rows, ((0, tokens - len(rows)), (0, 0)))

    def _put(self, name: str, values: list[int] | NDArray[Any]) -> None:
        """Fill an input; its buffer is bound again only if its size has changed."""
        size = len(values)
        if (name, size) not in self.buffers:
            if name not in self.kinds:
                return  # a graph without positions
            shape = () if name == "max_context_len" else np.shape(values)
            array = np.empty(shape, self.kinds[name])
            self.buffers[name, size] = array, ov.Tensor(array, shared_memory=True)
        array, tensor = self.buffers[name, size]
        array[...] = values[0] if array.ndim == 0 else values
        if self.bound.get(name) != size:
            self.bound.pop(name, None)  # broken off here, either buffer may be bound
            self.request.set_tensor(name, tensor)
            self.bound[name] = size

    def _make_room(self, count: int) -> None:
        """Let the next pass write so many logits where they can be read as they are."""
        if self.bound.get("logits") == count:
            return
        self.bound.pop("logits", None)
        number = self.numbers["logits"]
        if count > self._logits.shape[1]:
            V = self.request.model_outputs[number].get_partial_shape()[-1].get_length()
            self._views.clear()
            self._logits, _ = blank([1, count + count // 2, V], ov.Type.f32)
        room = ov.Tensor(self._logits[:, :count], shared_memory=True)
        self.request.set_output_tensor(number, room)
        self.bound["logits"] = count

    def _made(self, need: list[int]) -> Tensor:
        """The logits of the last pass, row by row."""
        B, most = len(need), max(need)
        if min(need) < most:
            return ragged(torch.from_numpy(self._logits[0, : sum(need)]), need)
        if (B, most) not in self._views:
            with torch.inference_mode(False):
                logits = torch.from_numpy(self._logits[0, : B * most])
                self._views[B, most] = logits.view(B, most, self._logits.shape[2])
        return self._views[B, most]


def ragged(flat: Tensor, need: list[int]) -> Tensor:
    """`[sum(need), n]`, row behind row -> `[B, max(need), n]`, padded with zeros."""
    if min(need) == max(need):
        return flat.view(len(need), need[0], -1)
    padded = flat.new_zeros(len(need), max(need), flat.shape[1])
    for row, part in zip(padded, flat.split(need), strict=True):
        row[: len(part)] = part
    return padded
