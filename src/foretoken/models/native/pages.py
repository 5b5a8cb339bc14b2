"""A paged KV cache: pages of 16 positions. Sequences with a common prefix share pages.

A shared page is copied before it is written to (copy on write).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from foretoken.models.prefix_cache import PrefixCache

if TYPE_CHECKING:  # imports this module
    from foretoken.models.native.recurrent_states import RecurrentStates

PAGE_POSITIONS = 16
SLAB_PAGES = 32  # pages that are allocated together
CACHE_LINE_BYTES = 64
MIN_SPARE_PAGES = 64  # number of unused pages that are retained for reuse
# cached prefixes are dropped if all pages take more bytes; `NativeModel.reserve` sets another limit
DEFAULT_CACHE_BYTES = 2**29


class LayerOffsets(NamedTuple):
    """Offsets of a layer's keys and values in a page, counted in numbers, not in bytes."""

    keys: int  # from the page's address to the first head's keys
    values: int  # from a head's keys to its values
    step: int  # from a head's keys to the next head's keys


class PageLayout(NamedTuple):
    """The layout of keys and values in a slab. The keys of one head are contiguous over all pages
    of the slab, and its values are contiguous too: the processor then prefetches across pages. If
    heads differ in width, each page is contiguous instead."""

    layers: list[LayerOffsets]
    stretches: int  # contiguous stretches of memory, each with a part of every page
    numbers: int  # how many numbers of each page are in a stretch


def compute_page_layout(heads: Sequence[tuple[int, int]]) -> PageLayout:
    """Return the layout of a page. heads: for each layer, the number of key heads and the width of
    a head."""
    head_numbers = [PAGE_POSITIONS * width for _, width in heads]
    alike = len(set(head_numbers)) == 1
    layers, end = [], 0
    for (count, _), numbers in zip(heads, head_numbers, strict=True):
        value_offset = numbers * (SLAB_PAGES if alike else 1)
        layers.append(LayerOffsets(end, value_offset, 2 * value_offset))
        end += count * 2 * value_offset
    return (
        PageLayout(layers, end // (SLAB_PAGES * head_numbers[0]), head_numbers[0])
        if alike
        else PageLayout(layers, 1, end)
    )


class Slab:
    """The memory of SLAB_PAGES pages, freed when none of the pages is used."""

    __slots__ = ("num_used", "pages")

    def __init__(self, layout: PageLayout, dtype: np.dtype[Any]) -> None:
        shape = layout.stretches, SLAB_PAGES, layout.numbers
        some = np.empty(math.prod(shape) + CACHE_LINE_BYTES // dtype.itemsize, dtype)
        # aligned: no vector of 64 bytes spans two cache lines
        start = -some.ctypes.data % CACHE_LINE_BYTES // dtype.itemsize
        memory = some[start : start + math.prod(shape)].reshape(shape)
        self.num_used, self.pages = 0, [Page(self, memory[:, i]) for i in range(SLAB_PAGES)]


class Page:
    """Keys and values of 16 positions in all layers, and the page's number of users."""

    __slots__ = ("address", "num_users", "numbers", "slab")

    def __init__(self, slab: Slab, numbers: NDArray[Any]) -> None:
        self.slab, self.numbers, self.num_users = slab, numbers, 0
        self.address = numbers.ctypes.data


class PagePool:
    """Allocates pages and takes back unused pages. When `capacity` pages are in use, the least
    recently used cached prefixes are dropped. Running sequences are never dropped, so their pages
    may exceed `capacity`."""

    def __init__(self, layout: PageLayout, dtype: str = "float32") -> None:
        self.layout, self.dtype = layout, np.dtype(dtype)
        self.page_bytes = layout.stretches * layout.numbers * self.dtype.itemsize
        self.capacity = DEFAULT_CACHE_BYTES // self.page_bytes
        self.slabs: list[Slab] = []
        self.spare_pages: list[Page] = []
        self.num_used = 0
        self.prefix_cache: PrefixCache | None = None  # pages of sequences that have left

    def allocate_page(self) -> Page:
        """Return a page with one user and undefined content."""
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
        """Return a new page with the same content and one user."""
        new = self.allocate_page()
        np.copyto(new.numbers, page.numbers)
        return new

    def release(self, pages: Sequence[Page]) -> None:
        """Decrement the user count of these pages, and take back the pages that have no user
        left."""
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
        """Count the users of all pages again, to free pages that a Ctrl-C leaked. Call only when no
        sequence is running."""
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
    """The KV cache of one sequence.

    Attributes:
        pages: The sequence's pages. Their first `length` positions are valid.
        length: Number of cached tokens.
        long: True if the sequence has the rotary positions of long contexts.
        source: Keys and values of cross-attention; None if the model is not an encoder-decoder.
        position_shift: Added to positions for rotary embeddings, because images take fewer
            positions than tokens.
        states: The recurrent states; None if the model has none.
        may_share: With recurrent states, True while other sequences may share all tokens so far.
        table: Memory address of the table of page addresses that the kernels read.
    """

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
        """Return a new sequence that shares the pages of the first `length` positions. The new
        sequence's recurrent states are None."""
        source = self.source and self.source.fork(self.source.length)
        pages = self.pages[: -(-length // PAGE_POSITIONS)]
        forked = PagedSequence(self.pool, pages, length, long=self.long, source=source)
        forked.position_shift = self.position_shift
        return forked

    def reserve(self, first: int, last: int) -> None:
        """Prepare positions `first` to `last - 1` for writing: copy pages that other sequences
        share, and allocate missing pages."""
        for i in range(first // PAGE_POSITIONS, len(self.pages)):
            shared = self.pages[i]
            if shared.num_users > 1:
                self._set_page(i, self.pool.copy(shared))
                self.pool.release([shared])
        while len(self.pages) * PAGE_POSITIONS < last:
            self._set_page(len(self.pages), self.pool.allocate_page())

    def release(self) -> None:
        """Release all pages, including the pages of cross-attention."""
        pages, self.pages, self.length = self.pages, [], 0
        self.pool.release(pages)
        if self.source is not None:
            self.source.release()

    def _set_page(self, i: int, page: Page) -> None:
        self._reserve_addresses(i + 1)
        self._addresses[i] = page.address
        self.pages[i : i + 1] = [page]

    def _reserve_addresses(self, pages: int) -> None:
        if pages > len(self._addresses):
            table = np.zeros(max(16, 2 * pages), np.uint64)
            table[: len(self._addresses)] = self._addresses
            self._addresses, self.table = table, table.ctypes.data
        elif not pages and not len(self._addresses):
            self.table = 0
