"""Keyed randomness: every number that is drawn has a name, and the same name always gives the
same number.

A name is (row key, committed length at the start of the step, offset in the block, purpose). Keying
by position alone would be wrong: a position that is drafted again after a rejection would meet its
old noise. With these names a row's text depends neither on its other rows of the batch nor on the
order of the work. Only coupled mode's noise, `exponentials`, is named by position alone: there a
token is kept because it is the one that this very noise gives the target.
"""

from __future__ import annotations

from enum import IntEnum
from functools import lru_cache
from threading import get_ident
from typing import Any, NamedTuple

import numpy as np

INITIAL_PHILOX_STATE = {"buffer": (0, 0, 0, 0), "buffer_pos": 4, "has_uint32": 0, "uinteger": 0}


class SequenceKey(NamedTuple):
    """Who draws: the seed of the call and the row's number in it."""

    seed: int
    number: int


class Purpose(IntEnum):
    """The use of a random number; the streams of different uses are independent."""

    DRAFT = 0
    ACCEPT = 1
    NEXT = 2
    SHARED = 3
    WITHIN = 4


def uniform(key: SequenceKey, length: int, offset: int, purpose: Purpose) -> float:
    """The number in [0, 1) of that name: Philox 4x64 (Salmon et al. 2011), name in key and
    counter."""
    return (int(_bits(key, length, offset, purpose).random_raw()) >> 11) * 2.0**-53


def exponentials(key: SequenceKey, position: int, count: int) -> np.ndarray:
    """Coupled mode's noise at an absolute position: Exp(1) for each of the ids 0..count-1,
    `[count]` in float64, none of them 0; an id's number does not depend on `count`."""
    raw = _bits(key, position, 0, Purpose.SHARED).random_raw(count)
    return -np.log(((raw >> np.uint64(12)) + 0.5) * 2.0**-52)


def derive_key(key: SequenceKey, length: int, offset: int) -> SequenceKey:
    """Who draws where a drafter takes steps of its own (a cascade): a key that is itself a number
    of that name, so that what is drawn under it is new in every outer step, at any depth."""
    seed, row = _bits(key, length, offset, Purpose.WITHIN).random_raw(2).tolist()
    return SequenceKey(seed >> 1, row >> 1)


def _bits(key: SequenceKey, length: int, offset: int, purpose: Purpose) -> Any:
    bits = _generator(get_ident())
    bits.state = {
        "bit_generator": "Philox",
        "state": {"key": key, "counter": (0, length, offset, purpose)},
        **INITIAL_PHILOX_STATE,
    }
    return bits


@lru_cache
def _generator(thread: int) -> Any:
    """A generator for each thread: making one takes ten times as long as setting it to a name."""
    return np.random.Philox(key=(0, 0))
