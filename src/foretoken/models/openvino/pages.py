"""Keys and values in pages, which several graphs may read and rows share, and the flat passes of a
graph over them: the new tokens of all rows one behind another, whatever their lengths.

Which pages hold which beginnings of texts is known by whole pages, found by their very tokens:
nothing is taken for another text's because two hashes happen to agree. A page that is written anew
must be forgotten first. Knows no models; which rows there are, its caller knows.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from dataclasses import dataclass, field
from itertools import accumulate, chain
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


class Flat:
    """A compiled graph and its inputs; `facts` are its export's."""

    def __init__(self, compiled: ov.CompiledModel, facts: dict[str, Any]) -> None:
        self.request = compiled.create_infer_request()
        kinds = {p.get_any_name(): p.get_element_type() for p in compiled.inputs}
        self.kinds = {name: k.to_dtype() for name, k in kinds.items() if "cache." not in name}
        self.buffers: dict[tuple[str, int], tuple[NDArray[Any], ov.Tensor]] = {}
        self.bound: dict[str, int] = {}  # sizes of the buffers that the request reads now
        self.longest: int | None = facts.get("longest") or facts["context"]
        self.sizes = Padding()
        self.padding = 0
        self.states: StateFeed | None = None  # of a model that has some
        # what a decoder of pairs reads in the next pass, [N, W], in place of ids
        self.given: NDArray[Any] | None = None

    def padded(self, ids: list[list[int]], past: list[int], most: int) -> list[list[int]]:
        """The tokens of every row, padded behind the last one, which may have `most`, where the
        next ones will be written: for a pass of another size OpenVINO prepares every layer anew."""
        room = min(MOST, most - len(ids[-1]))
        if self.longest is not None:
            room = min(room, self.longest - past[-1] - len(ids[-1]))
        single = all(len(tokens) == 1 for tokens in ids)
        self.padding = self.sizes.missing(sum(map(len, ids)), room, single=single)
        return [*ids[:-1], [*ids[-1], *[0] * self.padding]]

    def run(
        self,
        ids: list[list[int]],
        past: list[int],
        pages: list[list[int]],
        places: list[int],
        firsts: list[int],
    ) -> Tensor:
        """A pass over these tokens of rows that have so many in their pages; logits
        `[len(places), V]` at flat `places`, valid until the next pass. firsts: the position that a
        row's first token has."""
        sizes = [len(tokens) for tokens in ids]
        ends = [start + size for start, size in zip(past, sizes, strict=True)]
        reads = "input_ids" if self.given is None else "inputs_embeds"
        same = sum(sizes) == self.bound.get(reads)
        repeats = max(0, self.bound.get("needed", 0) - len(places)) if same else 0
        self._put(reads, list(chain.from_iterable(ids)) if self.given is None else self.given)
        spans = (range(n + a, n + b) for n, a, b in zip(firsts, past, ends, strict=True))
        self._put("position_ids", list(chain.from_iterable(spans)))
        self._put("needed", places + places[-1:] * repeats)
        self._put("past_lens", past)
        self._put("subsequence_begins", [0, *accumulate(sizes)])
        self._put("block_indices_begins", [0, *accumulate(map(len, pages))])
        self._put("block_indices", list(chain.from_iterable(pages)))
        self._put("max_context_len", [max(ends)])
        self.request.infer(share_outputs=True)
        return self.output("logits", len(places))

    def output(self, name: str, count: int) -> Tensor:
        """The first `count` rows of an output of the last run, whose padding may have made more."""
        values = torch.from_numpy(self.request.get_tensor(name).data)
        return values.flatten(0, -2)[:count]

    def give(self, rows: NDArray[Any], tokens: int) -> None:
        """Let the next pass, over so many tokens with padding, read these in place of ids."""
        self.given = np.pad(rows, ((0, tokens - len(rows)), (0, 0)))

    def _put(self, name: str, values: list[int] | NDArray[Any]) -> None:
        """Fill an input; its buffer is bound again only if its size has changed."""
        if name not in self.kinds:
            return  # a graph without positions
        size = len(values)
        if (name, size) not in self.buffers:
            shape = () if name == "max_context_len" else np.shape(values)
            array = np.empty(shape, self.kinds[name])
            self.buffers[name, size] = array, ov.Tensor(array, shared_memory=True)
        array, tensor = self.buffers[name, size]
        array[...] = values[0] if array.ndim == 0 else values
        if self.bound.get(name) != size:
            self.bound.pop(name, None)  # broken off here, either buffer may be bound
            self.request.set_tensor(name, tensor)
            self.bound[name] = size
