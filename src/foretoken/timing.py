"""Timing for comparisons: calls take turns, so that other load on the machine affects all calls
alike; median and quartiles summarize the times of a call."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from time import perf_counter, sleep
from typing import TypeVar

import numpy as np

K = TypeVar("K")
V = TypeVar("V")


@dataclass(frozen=True, slots=True)
class Spread:
    """Median and quartiles of `n` measured values."""

    median: float
    q1: float
    q3: float
    n: int


def summarize(values: Sequence[float]) -> Spread:
    """Return the median and quartiles of one value or more."""
    q1, median, q3 = np.quantile(np.asarray(values, dtype=np.float64), (0.25, 0.5, 0.75)).tolist()
    return Spread(median, q1, q3, len(values))


def measure_seconds(call: Callable[[], object]) -> float:
    """Return the seconds that one call takes."""
    start = perf_counter()
    call()
    return perf_counter() - start


def take_turns(
    contestants: Mapping[K, Callable[[], V]],
    rounds: int,
    *,
    warm_up: int = 1,
    rest: float = 0.0,
) -> Iterator[dict[K, V]]:
    """Call all contestants, round after round, and yield the results of each round.

    Args:
        contestants: Functions by name, called in this order.
        rounds: Number of rounds that are yielded.
        warm_up: Number of rounds that run first and are not yielded.
        rest: Seconds to wait before each call, because threads of the previous call may spin for a
            while.
    """
    for number in range(-warm_up, rounds):
        results: dict[K, V] = {}
        for name, call in contestants.items():
            if rest:
                sleep(rest)
            results[name] = call()
        if number >= 0:
            yield results


def time_in_turns(
    calls: Mapping[K, Callable[[], object]], rounds: int, *, warm_up: int = 1
) -> dict[K, list[float]]:
    """Return, for each call, its seconds in every round; `take_turns` makes the calls."""
    timers = {name: partial(measure_seconds, call) for name, call in calls.items()}
    results = list(take_turns(timers, rounds, warm_up=warm_up))
    return {name: [each[name] for each in results] for name in calls}
