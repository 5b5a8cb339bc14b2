"""When requests come, and random prompts for them: the same for the same seed."""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import accumulate
from random import Random


def arrivals(number: int, rate: float, seed: int) -> list[float]:
    """Seconds from the beginning, where the first comes: a Poisson process of `rate` a second; an
    infinite rate is all at once."""
    random = Random(f"arrivals {seed}")
    gaps = [0.0 if math.isinf(rate) else random.expovariate(rate) for _ in range(number - 1)]
    return [*accumulate(gaps, initial=0.0)]


def prompts(length: int, vocabulary: int, seed: int) -> Iterator[list[int]]:
    """Token ids without end, each id as likely as any other: prompts that share no beginning."""
    random = Random(f"prompts {seed}")
    while True:
        yield random.choices(range(vocabulary), k=length)
