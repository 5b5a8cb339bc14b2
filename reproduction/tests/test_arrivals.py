from __future__ import annotations

import math
from itertools import pairwise

import pytest

from reproduction.fleet import arrivals


def test_all_at_once():
    assert arrivals(3, math.inf, 1) == [0.0, 0.0, 0.0] and arrivals(1, 2.0, 1) == [0.0]


def test_a_seed_gives_the_same_times_and_another_others():
    assert arrivals(50, 3.0, 7) == arrivals(50, 3.0, 7) != arrivals(50, 3.0, 8)
    assert arrivals(50, 3.0, 7)[:20] == arrivals(20, 3.0, 7)
    scaled = [10 * seconds for seconds in arrivals(50, 30.0, 7)]
    assert scaled == pytest.approx(arrivals(50, 3.0, 7))


@pytest.mark.parametrize("seed", range(5))
def test_gaps_are_those_of_a_poisson_process(seed: int):
    """Exponential gaps: their mean is 1 / rate, their standard deviation too, and a share 1 / e of
    them is above. Of 40,000 gaps, bounds at 5 standard errors (of the deviation: sqrt(2 / n) of it,
    as the fourth moment of an exponential distribution gives). Of other seeds, fewer than one in
    500,000 would fail; these pass, whenever they are run.
    """
    n, rate = 40_000, 4.0
    times = arrivals(n + 1, rate, seed)
    gaps = [late - early for early, late in pairwise(times)]
    assert times[0] == 0.0 and min(gaps) >= 0
    mean = math.fsum(gaps) / n
    assert abs(mean * rate - 1) < 5 / math.sqrt(n)
    deviation = math.sqrt(math.fsum((gap - mean) ** 2 for gap in gaps) / n)
    assert abs(deviation * rate - 1) < 5 * math.sqrt(2 / n)
    above = sum(gap > 1 / rate for gap in gaps) / n
    assert abs(above - 1 / math.e) < 5 * math.sqrt((1 - 1 / math.e) / math.e / n)
