"""Counter-based random numbers: every number has a name, and the same name always gives the same
number.

A name is (sequence key, committed length at the start of the step, offset in the block, purpose).
Names by position alone would be wrong: a position that is drafted again after a rejection would get
the same number again. With these names, a sequence's output depends neither on other sequences of
the batch nor on the order of computation. Only the noise of coupled mode, `draw_exponentials`, is
named by position alone, because draft and target must use the same noise.
"""

from __future__ import annotations

from enum import IntEnum
from functools import lru_cache
from threading import get_ident
from typing import Any, NamedTuple

import numpy as np

INITIAL_PHILOX_STATE = {"buffer": (0, 0, 0, 0), "buffer_pos": 4, "has_uint32": 0, "uinteger": 0}


class SequenceKey(NamedTuple):
    """The random key of a sequence: the seed of the call, and the sequence's number in the call."""

    seed: int
    number: int


class Purpose(IntEnum):
    """The use of a random number. Numbers for different uses are independent."""

    DRAFT = 0  # samples a draft token
    ACCEPT = 1  # samples how many draft tokens are accepted
    NEXT = 2  # samples the token after the accepted draft tokens
    SHARED = 3  # the noise of coupled mode
    WITHIN = 4  # the keys of a drafter's inner steps


def draw_uniform(key: SequenceKey, length: int, offset: int, purpose: Purpose) -> float:
    """Return the number in [0, 1) with the name (key, length, offset, purpose), by Philox 4x64
    (Salmon et al. 2011) with the name as key and counter."""
    return (int(_bits(key, length, offset, purpose).random_raw()) >> 11) * 2.0**-53


def draw_exponentials(key: SequenceKey, position: int, count: int) -> np.ndarray:
    """Return the noise of coupled mode at an absolute position: an Exp(1) number above 0 for each
    of the ids 0..count-1, `[count]` in float64. An id's number does not depend on `count`."""
    raw = _bits(key, position, 0, Purpose.SHARED).random_raw(count)
    return -np.log(((raw >> np.uint64(12)) + 0.5) * 2.0**-52)


def derive_key(key: SequenceKey, length: int, offset: int) -> SequenceKey:
    """Return the key for the inner steps of a drafter (a cascade). This key consists of random
    numbers with the name (key, length, offset), so that the inner steps of every outer step, at any
    depth, have new numbers."""
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
    """Return the generator of a thread; creating one takes ten times as long as setting its
    state."""
    return np.random.Philox(key=(0, 0))
