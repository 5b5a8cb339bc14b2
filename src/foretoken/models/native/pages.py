"""Keys and values of rows in pages of 16 positions, which rows that begin alike share.

A page is written by its only user: who shares one has it copied before it is written to.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from foretoken.models.prefixes import PrefixCache

PAGE = 16  # positions
SPARE = 64  # pages that are kept for the next rows
MOST_KEPT = 2**29  # bytes of all pages up to which cached prefixes stay, unless `reserve` says


class Page:
    """Keys and values of 16 positions, in all layers."""

    __slots__ = ("address", "numbers", "users")

    def __init__(self, numbers: NDArray[Any]) -> None:
        self.numbers, self.address, self.users = numbers, numbers.ctypes.data, 1


class PagePool:
    """Makes pages, and takes unused ones back. Cached prefixes give way where there are more than
    `capacity`: rows that run come first."""

    def __init__(self, numbers: int, dtype: str = "float32") -> None:
        self.numbers, self.dtype = numbers, np.dtype(dtype)  # of a page
        self.bytes = numbers * self.dtype.itemsize
        self.capacity = MOST_KEPT // self.bytes
        self.spare: list[Page] = []
        self.used = 0
        self.cached: PrefixCache | None = None  # rows that have left

    def page(self) -> Page:
        """Return a page of one user, whose content means nothing."""
        while self.used >= self.capacity and self.cached:
            self.cached.drop_oldest()
        page = self.spare.pop() if self.spare else Page(np.empty(self.numbers, self.dtype))
        page.users, self.used = 1, self.used + 1
        return page

    def copy(self, page: Page) -> Page:
        """Return a page with the same content, of one user."""
        new = self.page()
        np.copyto(new.numbers, page.numbers)
        return new

    def release(self, pages: Sequence[Page]) -> None:
        """Take back pages from one of their users."""
        for page in pages:
            page.users -= 1
            if page.users == 0:
                self.used -= 1
                if len(self.spare) < SPARE:
                    self.spare.append(page)

    def recount(self) -> None:
        """Count users where no row runs: what a Ctrl-C has left behind is forgotten."""
        pages = [page for row in self.cached or () for page in row.pages]
        for page in pages:
            page.users = 0
        self.used = 0
        for page in pages:
            self.used += page.users == 0
            page.users += 1


class PagedRow:
    """One row: its pages, and how many of their positions are its own. long: it was joined as one
    of more tokens than a model with a switch reads in the ordinary way."""

    __slots__ = ("_addresses", "length", "long", "pages", "pool", "table")

    def __init__(
        self, pool: PagePool, pages: Sequence[Page] = (), length: int = 0, *, long: bool = False
    ) -> None:
        self.pool, self.pages, self.length, self.long = pool, list(pages), length, long
        self._addresses: NDArray[np.uint64] = np.zeros(0, np.uint64)
        self._room(len(self.pages))
        for i, page in enumerate(self.pages):
            page.users += 1
            self._addresses[i] = page.address

    def fork(self, length: int) -> PagedRow:
        """Return a row that begins with the first `length` of these positions."""
        return PagedRow(self.pool, self.pages[: -(-length // PAGE)], length, long=self.long)

    def reserve(self, first: int, last: int) -> None:
        """Make pages for positions `first` up to `last`, which are about to be written."""
        for i in range(first // PAGE, len(self.pages)):
            shared = self.pages[i]
            if shared.users > 1:
                self._put(i, self.pool.copy(shared))
                self.pool.release([shared])
        while len(self.pages) * PAGE < last:
            self._put(len(self.pages), self.pool.page())

    def release(self) -> None:
        """Give up all pages."""
        pages, self.pages, self.length = self.pages, [], 0
        self.pool.release(pages)

    def _put(self, i: int, page: Page) -> None:
        self._room(i + 1)
        self._addresses[i] = page.address
        self.pages[i : i + 1] = [page]

    def _room(self, pages: int) -> None:
        """Make room in the table of addresses, which the kernels read."""
        if pages > len(self._addresses):
            table = np.zeros(max(16, 2 * pages), np.uint64)
            table[: len(self._addresses)] = self._addresses
            self._addresses, self.table = table, table.ctypes.data
        elif not pages and not len(self._addresses):
            self.table = 0
