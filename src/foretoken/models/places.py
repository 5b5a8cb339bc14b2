"""Places of rows in a model's arrays; rows keep them when others join, leave or change their order.

A pass runs over the first places, so gaps between them are closed before it. Does not know arrays.
"""

from __future__ import annotations

from itertools import count


def moved(places: list[int], rows: list[int]) -> list[int]:
    """The places of all rows, where these `rows` have taken the first ones that are free."""
    used, new = set(places), list(places)
    free = (place for place in count() if place not in used)
    for b in rows:
        new[b] = next(free)
    return new


def joined(places: list[int], rows: int) -> list[int]:
    """Places of so many more rows, the first ones that are free."""
    return moved(places + [-1] * rows, list(range(len(places), len(places) + rows)))


def repeated(places: list[int]) -> list[int]:
    """The rows whose place a row before them has."""
    return [b for b, place in enumerate(places) if place in places[:b]]


def beyond(places: list[int]) -> list[int]:
    """The rows that are not in the first places, of which there are as many as rows."""
    return [b for b, place in enumerate(places) if place >= len(places)]


def by_place(places: list[int]) -> list[int]:
    """The rows in the order of their places."""
    return sorted(range(len(places)), key=places.__getitem__)


def room(places: list[int]) -> int:
    """How many rows must fit, for these to have their places."""
    return 1 + max(places, default=-1)


def most_slots(lengths: list[int], unit: int) -> int:
    """How many slots rows of these lengths take at most, in arrays that are never twice as long as
    the longest and rounded up to a multiple of `unit`."""
    return len(lengths) * 2 * (max(lengths, default=0) + unit)


def roomy(rows: int) -> int:
    """So many, and half as many that may join them."""
    return rows + rows // 2
