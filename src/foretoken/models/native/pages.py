"""Keys and values of rows in pages of 16 positions, which rows that begin alike share.

A page is written by its only user: who shares one has it copied before it is written to.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from foretoken.models.prefix_cache import PrefixCache

if TYPE_CHECKING:  # which lies above
    from foretoken.models.native.recurrent_states import RecurrentStates

PAGE_POSITIONS = 16  # positions
SLAB_PAGES = 32  # pages that are allocated together
CACHE_LINE_BYTES = 64  # bytes that the processor loads together
MIN_SPARE_PAGES = 64  # pages that are kept for the next rows
DEFAULT_CACHE_BYTES = (
    2**29
)  # bytes of all pages up to which cached prefixes stay, unless `reserve` says


class LayerOffsets(NamedTuple):
    """Where a layer's keys and values lie from a page's address, in numbers."""

    keys: int  # of the first head
    values: int  # how far behind its keys
    step: int  # how far behind them the next head's keys


class PageLayout(NamedTuple):
    """Where keys and values lie in a slab. A head's keys, and its values, of all pages are one
    stretch of memory, in which the processor runs ahead; where heads differ in width a page is."""

    layers: list[LayerOffsets]
    stretches: int
    numbers: int  # of a page in a stretch


def compute_page_layout(heads: Sequence[tuple[int, int]]) -> PageLayout:
    """Return where layers have the keys and values of so many heads of such a width."""
    head_numbers = [PAGE_POSITIONS * width for _, width in heads]
    alike = len(set(head_numbers)) == 1
    places, end = [], 0
    for (count, _), numbers in zip(heads, head_numbers, strict=True):
        value_offset = numbers * (SLAB_PAGES if alike else 1)
        places.append(LayerOffsets(end, value_offset, 2 * value_offset))
        end += count * 2 * value_offset
    return (
        PageLayout(places, end // (SLAB_PAGES * head_numbers[0]), head_numbers[0])
        if alike
        else PageLayout(places, 1, end)
    )


class Slab:
    """Memory of several pages, freed when none is used."""

    __slots__ = ("num_used", "pages")

    def __init__(self, layout: PageLayout, dtype: np.dtype[Any]) -> None:
        shape = layout.stretches, SLAB_PAGES, layout.numbers
        some = np.empty(math.prod(shape) + CACHE_LINE_BYTES // dtype.itemsize, dtype)
        start = (
            -some.ctypes.data % CACHE_LINE_BYTES // dtype.itemsize
        )  # no vector lies across two lines
        memory = some[start : start + math.prod(shape)].reshape(shape)
        self.num_used, self.pages = 0, [Page(self, memory[:, i]) for i in range(SLAB_PAGES)]


class Page:
    """Keys and values of 16 positions, in all layers."""

    __slots__ = ("address", "num_users", "numbers", "slab")

    def __init__(self, slab: Slab, numbers: NDArray[Any]) -> None:
        self.slab, self.numbers, self.num_users = slab, numbers, 0
        self.address = numbers.ctypes.data


class PagePool:
    """Makes pages, and takes unused ones back. Cached prefixes give way where there are more than
    `capacity`: rows that run come first."""

    def __init__(self, layout: PageLayout, dtype: str = "float32") -> None:
        self.layout, self.dtype = layout, np.dtype(dtype)
        self.page_bytes = layout.stretches * layout.numbers * self.dtype.itemsize  # of a page
        self.capacity = DEFAULT_CACHE_BYTES // self.page_bytes
        self.slabs: list[Slab] = []
        self.spare_pages: list[Page] = []
        self.num_used = 0
        self.prefix_cache: PrefixCache | None = None  # rows that have left

    def allocate_page(self) -> Page:
        """Return a page of one user, whose content means nothing."""
        while self.num_used >= self.capacity and self.prefix_cache:
            self.prefix_cache.drop_oldest()
        if not self.spare_pages:
            self.slabs.append(Slab(self.layout, self.dtype))
            self.spare_pages = self.slabs[-1].pages[::-1]
        page = self.spare_pages.pop()
        page.num_users, self.num_used = 1, self.num_used + 1
        page.slab.num_used += 1
        return page

    def copy(self, page: Page) -> Page:
        """Return a page with the same content, of one user."""
        new = self.allocate_page()
        np.copyto(new.numbers, page.numbers)
        return new

    def release(self, pages: Sequence[Page]) -> None:
        """Take back pages from one of their users."""
        for page in pages:
            page.num_users -= 1
            if page.num_users == 0:
                self.num_used -= 1
                self.spare_pages.append(page)
                page.slab.num_used -= 1
                if (
                    page.slab.num_used == 0
                    and len(self.spare_pages) >= MIN_SPARE_PAGES + SLAB_PAGES
                ):
                    self.slabs.remove(page.slab)
                    self.spare_pages = [
                        other for other in self.spare_pages if other.slab is not page.slab
                    ]

    def recount(self) -> None:
        """Count users where no row runs: what a Ctrl-C has left behind is spare again."""
        pages = [page for slab in self.slabs for page in slab.pages]
        for page in pages:
            page.num_users = 0
        for seq in self.prefix_cache or ():
            for page in seq.pages:
                page.num_users += 1
        self.spare_pages = [page for page in reversed(pages) if page.num_users == 0]
        self.num_used = len(pages) - len(self.spare_pages)
        for slab in self.slabs:
            slab.num_used = sum(page.num_users > 0 for page in slab.pages)


class PagedSequence:
    """One row: its pages, and how many of their positions are its own. long: it was joined as one
    of more tokens than a model with a switch reads in the ordinary way. source: what the encoder
    has made of its source, for an encoder-decoder. shift: how far its rotary positions are from its
    places, behind pictures. states: of its recurrences, where there are, and
    following: whether its prompt, which is being read, may still be that of another row."""

    __slots__ = (
        "_addresses",
        "may_share",
        "length",
        "long",
        "pages",
        "pool",
        "position_shift",
        "source",
        "states",
        "table",
    )

    def __init__(
        self,
        pool: PagePool,
        pages: Sequence[Page] = (),
        length: int = 0,
        *,
        long: bool = False,
        source: PagedSequence | None = None,
    ) -> None:
        self.pool, self.pages, self.length, self.long = pool, list(pages), length, long
        self.source, self.position_shift = source, 0
        self.states: RecurrentStates | None = None
        self.may_share = False
        self._addresses: NDArray[np.uint64] = np.zeros(0, np.uint64)
        self._reserve_addresses(len(self.pages))
        for i, page in enumerate(self.pages):
            page.num_users += 1
            self._addresses[i] = page.address

    def fork(self, length: int) -> PagedSequence:
        """Return a row that begins with the first `length` of these positions, without states."""
        source = self.source and self.source.fork(self.source.length)
        pages = self.pages[: -(-length // PAGE_POSITIONS)]
        forked = PagedSequence(self.pool, pages, length, long=self.long, source=source)
        forked.position_shift = self.position_shift
        return forked

    def reserve(self, first: int, last: int) -> None:
        """Make pages for positions `first` up to `last`, which are about to be written."""
        for i in range(first // PAGE_POSITIONS, len(self.pages)):
            shared = self.pages[i]
            if shared.num_users > 1:
                self._set_page(i, self.pool.copy(shared))
                self.pool.release([shared])
        while len(self.pages) * PAGE_POSITIONS < last:
            self._set_page(len(self.pages), self.pool.allocate_page())

    def release(self) -> None:
        """Give up all pages."""
        pages, self.pages, self.length = self.pages, [], 0
        self.pool.release(pages)
        if self.source is not None:
            self.source.release()

    def _set_page(self, i: int, page: Page) -> None:
        self._reserve_addresses(i + 1)
        self._addresses[i] = page.address
        self.pages[i : i + 1] = [page]

    def _reserve_addresses(self, pages: int) -> None:
        """Make room in the table of addresses, which the kernels read."""
        if pages > len(self._addresses):
            table = np.zeros(max(16, 2 * pages), np.uint64)
            table[: len(self._addresses)] = self._addresses
            self._addresses, self.table = table, table.ctypes.data
        elif not pages and not len(self._addresses):
            self.table = 0
