"""Keys and values of rows in pages of 16 positions, which rows that begin alike share.

A page is written by its only user: who shares one has it copied before it is written to.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

PAGE = 16  # positions
SPARE = 64  # pages that are kept for the next rows


class Page:
    """Keys and values of 16 positions, in all layers."""

    __slots__ = ("address", "numbers", "users")

    def __init__(self, numbers: NDArray[Any]) -> None:
        self.numbers, self.address, self.users = numbers, numbers.ctypes.data, 1


class PagePool:
    """Makes pages, and takes unused ones back."""

    def __init__(self, numbers: int, dtype: str = "float32") -> None:
        self.numbers, self.dtype = numbers, np.dtype(dtype)  # of a page
        self.spare: list[Page] = []

    @property
    def bytes(self) -> int:
        """Return the bytes of a page."""
        return self.numbers * self.dtype.itemsize

    def page(self) -> Page:
        """Return a page of one user, whose content means nothing."""
        if self.spare:
            page = self.spare.pop()
            page.users = 1
            return page
        return Page(np.empty(self.numbers, self.dtype))

    def copy(self, page: Page) -> Page:
        """Return a page with the same content, in place of a shared one."""
        new = self.page()
        np.copyto(new.numbers, page.numbers)
        self.release([page])
        return new

    def release(self, pages: Sequence[Page]) -> None:
        """Take back pages from one of their users."""
        for page in pages:
            page.users -= 1
            if page.users == 0 and len(self.spare) < SPARE:
                self.spare.append(page)


class PagedRow:
    """One row: its pages, and how many of their positions are its own."""

    __slots__ = ("_table", "length", "pages", "pool")

    def __init__(self, pool: PagePool, pages: Sequence[Page] = (), length: int = 0) -> None:
        self.pool, self.pages, self.length = pool, list(pages), length
        for page in self.pages:
            page.users += 1
        self._table: NDArray[np.uint64] = np.zeros(16, np.uint64)
        self._fill(0)

    @property
    def table(self) -> int:
        """Return the address of the table of the pages' addresses."""
        return self._table.ctypes.data

    def fork(self, length: int) -> PagedRow:
        """Return a row that begins with the first `length` of these positions."""
        return PagedRow(self.pool, self.pages[: -(-length // PAGE)], length)

    def reserve(self, first: int, last: int) -> None:
        """Make pages for positions `first` up to `last`, which are about to be written."""
        changed, known = first // PAGE, len(self.pages)
        if changed < known and any(page.users > 1 for page in self.pages[changed:]):
            self.pages[changed:] = [
                self.pool.copy(page) if page.users > 1 else page for page in self.pages[changed:]
            ]
            known = changed
        while len(self.pages) * PAGE < last:
            self.pages.append(self.pool.page())
        if known < len(self.pages):
            self._fill(known)

    def release(self) -> None:
        """Give up all pages."""
        self.pool.release(self.pages)
        self.pages, self.length = [], 0

    def _fill(self, first: int) -> None:
        if len(self.pages) > len(self._table):
            table: Any = np.zeros(2 * len(self.pages), np.uint64)
            table[:first] = self._table[:first]
            self._table = table
        self._table[first : len(self.pages)] = [page.address for page in self.pages[first:]]
