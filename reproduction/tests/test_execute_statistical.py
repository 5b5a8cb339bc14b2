"""Speculative execution with threads and keyed numbers: what g was given follows f's distribution.

The seeds are fixed. On other seeds each of these would fail by chance once in a million times.
"""

from __future__ import annotations

from collections import Counter

from scipy import stats

from reproduction.execute import Bet, finite_distribution, speculate

ALPHA = 1e-6
N = 600
P = {"a": 0.4, "b": 0.3, "c": 0.2, "d": 0.1}
Q = {"a": 0.1, "b": 0.3, "c": 0.5, "e": 0.1}


def p_value(seen: Counter, distribution: dict) -> float:
    assert set(seen) <= set(distribution)
    counts = [seen[y] for y in distribution]
    return float(stats.chisquare(counts, [N * mass for mass in distribution.values()]).pvalue)


def test_the_input_of_g_follows_f() -> None:
    runs = [speculate(lambda x: P, str.upper, Q, 0, guesses=2, seed=seed) for seed in range(N)]
    assert p_value(Counter(run.value.lower() for run in runs), P) > ALPHA
    assert all(run.value == run.y.upper() for run in runs)
    right = sum(run.kept is not None for run in runs)
    beta = sum(run.beta for run in runs) / N  # the same expectation: 5 deviations are 6e-7
    assert abs(right / N - beta) < 5 * (0.25 / N) ** 0.5


def test_what_a_wrong_rule_gives_is_seen() -> None:
    """The control: the first guess, taken as if it came from f."""
    q = finite_distribution("q", Q)
    guesses = Counter(Bet(q, 1, seed).guesses[0] for seed in range(N))
    del guesses["e"]
    distribution = {y: P[y] for y in P}
    counts = [guesses[y] for y in distribution]
    scale = sum(counts)
    assert stats.chisquare(counts, [scale * m for m in distribution.values()]).pvalue < ALPHA
