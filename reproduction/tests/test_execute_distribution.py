"""Speculative execution: the distribution of g's input is f's, by enumeration of all that is drawn.

`Bet` draws with `pick` and nothing else. Here `pick` branches over every outcome, so that the
distribution of the real code is summed up exactly, over all guesses, verdicts and residuals.
"""

from __future__ import annotations

import numpy as np
import pytest

from foretoken import theory
from oracle import tv
from reproduction import execute
from reproduction.execute import (
    Bet,
    SampleDistribution,
    finite_distribution,
    normalized,
    sample_distribution,
)

V = 4
EXACT, VISIBLE = 1e-12, 1e-3
RNG = np.random.default_rng(5)


def random_distribution(zeros: int) -> np.ndarray:
    distribution = RNG.gamma(0.6, size=V) + 1e-3
    distribution[RNG.permutation(V)[:zeros]] = 0.0
    return distribution / distribution.sum()


PAIRS = [(random_distribution(i % 3), random_distribution(i % 2)) for i in range(8)]
PAIRS += [
    (random_distribution(0), np.eye(V)[1]),
    (np.eye(V)[2], random_distribution(0)),
    (PAIRS[0][0],) * 2,
]
PAIRS += [
    (np.array([0.5, 0.5, 0, 0]), np.array([0, 0, 0.5, 0.5])),
    (random_distribution(1), np.full(V, 0.25)),
]


class Branches:
    """In place of `pick`: every call takes one of the possible outcomes, until all were taken."""

    todo: list[tuple[int, ...]]

    def __call__(self, masses: np.ndarray, uniform: float) -> int:
        possible = np.flatnonzero(masses)
        if len(self.taken) == len(self.path):
            self.todo += [(*self.taken, i) for i in range(1, len(possible))]
            self.path = (*self.path, 0)
        choice = possible[self.path[len(self.taken)]]
        self.taken = (*self.taken, self.path[len(self.taken)])
        self.weight *= masses[choice] / masses.sum()
        return int(choice)

    def distribution_of(self, run) -> dict:
        """The distribution of what `run()` returns."""
        self.todo, distribution = [()], {}
        while self.todo:
            self.path, self.taken, self.weight = self.todo.pop(), (), 1.0
            outcome = run()
            distribution[outcome] = distribution.get(outcome, 0.0) + self.weight
        return distribution


@pytest.fixture
def branches(monkeypatch: pytest.MonkeyPatch) -> Branches:
    branches = Branches()
    monkeypatch.setattr(execute, "pick", branches)
    return branches


def sample(p, q, guesses: int) -> int:
    return Bet(finite_distribution("q", q), guesses, 0).settle(finite_distribution("f", p))[1]


@pytest.mark.parametrize("guesses", [0, 1, 2, 3, 4, 9])
def test_the_sample_has_the_distribution_of_f(branches: Branches, guesses: int) -> None:
    for p, q in PAIRS:
        samples = branches.distribution_of(lambda p=p, q=q: sample(p, q, guesses))
        assert tv(samples, dict(enumerate(p))) < EXACT


def test_distributions_over_different_outcomes(branches: Branches) -> None:
    """q knows an outcome that f never gives, and lacks one that it gives."""
    p, q = {"left": 0.5, "right": 0.3, "wait": 0.2}, {"wait": 0.6, "left": 0.1, "jump": 0.3}
    assert tv(branches.distribution_of(lambda: sample(p, q, 2)), p) < EXACT


def test_two_calls_one_after_the_other(branches: Branches) -> None:
    """A chain: the second f and q depend on the first sample."""
    first, second = PAIRS[0], PAIRS[1:5]

    def chain() -> tuple[int, int]:
        y = sample(*first, 2)
        return y, sample(*second[y], 2)

    expected = {(y, z): first[0][y] * second[y][0][z] for y in range(V) for z in range(V)}
    assert tv(branches.distribution_of(chain), expected) < EXACT


@pytest.mark.parametrize("pair", range(len(PAIRS)))
def test_beta_is_how_likely_a_guess_is_right(branches: Branches, pair: int) -> None:
    """Its mean over the guesses is the probability that one is kept: sum min(p, q) for one, and
    more for more."""
    p, q = (finite_distribution("f", distribution) for distribution in PAIRS[pair])
    means: list[float] = []
    for guesses in (1, 2, 3):

        def right(guesses: int = guesses) -> tuple[bool, float]:
            kept, _, beta = Bet(q, guesses, 0).settle(p)
            return kept is not None, beta

        distribution = branches.distribution_of(right)
        means.append(sum(beta * weight for (_, beta), weight in distribution.items()))
        kept = sum(w for (kept, _), w in distribution.items() if kept)
        assert means[-1] == pytest.approx(kept, abs=EXACT)
        if guesses == 1:
            betas = {round(beta, 12) for _, beta in distribution}
            assert betas == {round(theory.beta(*PAIRS[pair]), 12)}
    assert all(b >= a - EXACT for a, b in zip(means, means[1:], strict=False))


# --- controls: a proof that cannot fail proves nothing ---


def with_replacement(p, q, guesses) -> SampleDistribution:
    """q does not lose the guess that was not kept, though it is not drawn again."""
    masses, rest = [], 1.0
    for x in guesses:
        masses.append(rest * min(1.0, p[x] / q[x]))
        rest -= masses[-1]
        p = normalized(np.maximum(p - q, 0.0), otherwise=p)
    return SampleDistribution(np.array([*masses, max(0.0, rest)]), p, 0.0)


def without_residual(p, q, guesses) -> SampleDistribution:
    return sample_distribution(p, q, guesses)._replace(residual=p)


def likeliest_first(p, q, guesses) -> SampleDistribution:
    """The guesses are judged in another order than they were drawn in."""
    order = sorted(range(len(guesses)), key=lambda i: -p[guesses[i]])
    judged = sample_distribution(p, q, [guesses[i] for i in order])
    totals = np.zeros(len(guesses) + 1)
    totals[[*order, len(guesses)]] = judged.kept
    return judged._replace(kept=totals)


@pytest.mark.parametrize("wrong", [with_replacement, without_residual, likeliest_first])
def test_a_wrong_rule_is_seen(branches: Branches, monkeypatch, wrong) -> None:
    monkeypatch.setattr(execute, "sample_distribution", wrong)
    p, q = PAIRS[0]
    assert tv(branches.distribution_of(lambda: sample(p, q, 2)), dict(enumerate(p))) > VISIBLE


def test_guesses_from_another_distribution_than_q_are_seen(branches: Branches) -> None:
    """Guessing what is likeliest and claiming to have drawn it."""
    p, q = PAIRS[0]

    def greedy() -> int:
        bet = Bet(finite_distribution("q", np.eye(V)[q.argmax()]), 1, 0)
        bet.q = finite_distribution("q", q)
        return bet.settle(finite_distribution("f", p))[1]

    assert tv(branches.distribution_of(greedy), dict(enumerate(p))) > VISIBLE
