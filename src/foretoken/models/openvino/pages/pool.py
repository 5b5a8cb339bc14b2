"""Pages of keys and values, in every layer of a graph, and which rows hold them."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import chain
from math import prod
from typing import Any
from weakref import ReferenceType, ref

import numpy as np
import openvino as ov
from numpy.typing import NDArray

from foretoken.models.openvino.pages.prefixes import Prefixes

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
    """What a graph keeps in pages, by the names of its inputs."""
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
