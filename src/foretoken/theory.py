"""Section 3 of the paper: the speed-up of speculation from alpha, gamma and c.

alpha is the probability that a draft token is accepted. gamma is the number of draft tokens for
each forward of the target. c is the time of a draft forward divided by the time of a target
forward. Factors are relative to plain decoding. As in the paper, draft tokens are assumed to be
accepted independently of one another.

Examples:
    >>> from foretoken import theory
    >>> gamma = theory.optimal_gamma(alpha=0.8, c=0.05)
    >>> gamma
    8
    >>> round(theory.walltime_factor(alpha=0.8, gamma=gamma, c=0.05), 2)
    3.09
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

import numpy as np
from numpy.typing import ArrayLike

from foretoken import argument_checks
from foretoken.errors import InputError, format_value, to_float

MAX_GAMMA = 64  # largest gamma that `optimal_gamma` considers by default

VerifyCost = Callable[[int], float] | Sequence[float]
"""v: time of a target forward over n tokens, relative to a forward over one token. It is a function
of n, or a sequence whose entry n is v(n) and whose entry 0 is not used."""


def beta(p: ArrayLike, q: ArrayLike) -> float:
    """Return the probability that a draft token drawn from q is accepted (paper, Theorem 3.5).

    It is sum min(p, q), which equals 1 minus the total variation of p and q. alpha is the mean of
    beta over prefixes.

    Args:
        p: The target's distribution, `[V]`.
        q: The draft's distribution, `[V]`.

    Returns:
        beta, in [0, 1].

    Raises:
        InputError: p and q are not two distributions over the same tokens.

    Examples:
        >>> beta([0.5, 0.5], [1.0, 0.0])
        0.5
    """
    p, q = argument_checks.check_distributions(p, q)
    return min(1.0, float(np.minimum(p, q).sum()))


def lenient_beta(p: ArrayLike, q: ArrayLike, lenience: float) -> float:
    """Return the probability of acceptance at a lenience, sum min(p / l, q) (paper, appendix A.5).

    Args:
        p: The target's distribution, `[V]`.
        q: The draft's distribution, `[V]`.
        lenience: l, in (0, 1]; at 1 the result is `beta(p, q)`.

    Returns:
        The probability, in [0, 1].

    Raises:
        InputError: p and q are not two distributions over the same tokens, or l is out of range.

    Examples:
        >>> lenient_beta([0.25, 0.75], [1.0, 0.0], 0.5)
        0.5
    """
    p, q = argument_checks.check_distributions(p, q)
    return min(1.0, float(np.minimum(p / argument_checks.check_lenience(lenience), q).sum()))


def greedy_lenient_beta(p: ArrayLike, q: ArrayLike, lenience: float) -> float:
    """Return the probability of acceptance at a lenience and temperature 0 (paper, appendix A.5).

    It is the sum of q over the tokens with p >= l max p; in the paper the inequality is reversed.

    Args:
        p: The target's distribution at temperature 1, `[V]`.
        q: The draft's distribution, `[V]`.
        lenience: l, in (0, 1].

    Returns:
        The probability, in [0, 1].

    Raises:
        InputError: p and q are not two distributions over the same tokens, or l is out of range.

    Examples:
        >>> greedy_lenient_beta([0.6, 0.3, 0.1], [0.25, 0.5, 0.25], 0.5)
        0.75
    """
    p, q = argument_checks.check_distributions(p, q)
    return min(1.0, float(q[p >= argument_checks.check_lenience(lenience) * p.max()].sum()))


def match_beta(p: ArrayLike, q: ArrayLike) -> float:
    """Return the probability of acceptance by token matching: sum p q, at most `beta`.

    Token matching accepts a draft token that equals a token drawn from p.

    Args:
        p: The target's distribution, `[V]`.
        q: The draft's distribution, `[V]`.

    Returns:
        The probability, in [0, 1].

    Raises:
        InputError: p and q are not two distributions over the same tokens.

    Examples:
        >>> match_beta([0.5, 0.5], [0.5, 0.5])
        0.5
    """
    p, q = argument_checks.check_distributions(p, q)
    return min(1.0, float(p @ q))


def rejection_beta(p: ArrayLike, q: ArrayLike) -> float:
    """Return the probability of acceptance by rejection sampling (paper, appendix A.2).

    It is 1/M, the minimum of q / p over the tokens with p > 0. It is at most `beta`, and 0 if a
    token with p > 0 has q = 0.

    Args:
        p: The target's distribution, `[V]`.
        q: The draft's distribution, `[V]`.

    Returns:
        The probability, in [0, 1].

    Raises:
        InputError: p and q are not two distributions over the same tokens.

    Examples:
        >>> rejection_beta([0.5, 0.5], [0.25, 0.75])
        0.5
    """
    p, q = argument_checks.check_distributions(p, q)
    return min(1.0, float((q[p > 0] / p[p > 0]).min()))


def match_probability(p: ArrayLike, q: ArrayLike) -> float:
    """Return the probability that tokens drawn from p and q with the same noise are equal.

    With rule="coupled" it is the probability of acceptance. It is sum_i 1 / sum_j max(p_j / p_i,
    q_j / q_i), between (1 - d) / (1 + d) and 1 - d, where d is the total variation of p and q
    (Daliri, Musco, Suresh 2024, arXiv 2408.07978).

    Args:
        p: The target's distribution, `[V]`.
        q: The draft's distribution, `[V]`.

    Returns:
        The probability, in [0, 1].

    Raises:
        InputError: p and q are not two distributions over the same tokens.

    Examples:
        >>> match_probability([0.5, 0.5], [0.5, 0.5])
        1.0
    """
    p, q = argument_checks.check_distributions(p, q)
    both = (p > 0) & (q > 0)
    order = np.argsort(p[both] / q[both])
    pi, qi = p[both][order], q[both][order]
    # sorted by p / q: for j >= i, p_j / p_i is the larger of the two, for j < i q_j / q_i
    above = p[q == 0].sum() + np.cumsum(pi[::-1])[::-1]
    below = q[p == 0].sum() + np.cumsum(qi) - qi
    return min(1.0, float((1 / (above / pi + below / qi)).sum()))


def tokens_distribution(alpha: float, gamma: int) -> list[float]:
    """Return the distribution of the number of tokens per target forward (paper, section 3.1).

    It is a capped geometric distribution: alpha^(k-1) (1 - alpha) for k = 1..gamma, and alpha^gamma
    for gamma + 1.

    Args:
        alpha: The probability that a draft token is accepted.
        gamma: Number of draft tokens for each target forward.

    Returns:
        Probabilities of 1 to gamma + 1 tokens; index k - 1 is for k tokens.

    Raises:
        InputError: alpha is not in [0, 1], or gamma is not an integer of 0 or more.

    Examples:
        >>> tokens_distribution(0.5, 2)
        [0.5, 0.25, 0.25]
    """
    alpha, gamma = (
        argument_checks.check_probability("alpha", alpha),
        argument_checks.check_count("gamma", gamma),
    )
    return [alpha ** (k - 1) * (1 - alpha) for k in range(1, gamma + 1)] + [alpha**gamma]


def expected_tokens(alpha: float, gamma: int) -> float:
    """Return the expected number of tokens per target forward (paper, equation 1).

    It is (1 - alpha^(gamma+1)) / (1 - alpha), and gamma + 1 at alpha = 1. For alpha near 1 it is
    computed without the formula's cancellation of digits.

    Args:
        alpha: The probability that a draft token is accepted.
        gamma: Number of draft tokens for each target forward.

    Returns:
        Tokens for each forward, from 1 to gamma + 1.

    Raises:
        InputError: alpha is not in [0, 1], or gamma is not an integer of 0 or more.

    Examples:
        >>> expected_tokens(0.5, 2)
        1.75
    """
    alpha, gamma = (
        argument_checks.check_probability("alpha", alpha),
        argument_checks.check_count("gamma", gamma),
    )
    if alpha in (0, 1):
        return gamma * alpha + 1.0
    tokens = -math.expm1((gamma + 1) * math.log(alpha)) / (1 - alpha)
    return min(gamma + 1.0, max(1.0, tokens))  # rounding may leave this range


def walltime_factor(
    alpha: float,
    gamma: int,
    c: float,
    *,
    v: VerifyCost | None = None,
    tokens: int | None = None,
) -> float:
    """Return the speed-up of speculation over plain decoding (paper, Theorem 3.8).

    Args:
        alpha: The probability that a draft token is accepted.
        gamma: Number of draft tokens for each target forward.
        c: Time of a draft forward divided by the time of a target forward.
        v: Time of a target forward over n tokens, relative to a forward over one token: a function
            of n, or a sequence whose entry n is v(n). None is the paper's assumption, 1 for every
            n.
        tokens: Number of generated tokens. None is the paper's assumption, infinitely many. For a
            finite number, the gamma of each step is at most the number of remaining tokens minus
            one, as in generation; the factor is then at most `tokens` if v(n) >= 1.

    Returns:
        The factor; below 1, speculation is slower.

    Raises:
        InputError: An argument is out of range, or a sequence v has no entry gamma + 1.

    Examples:
        >>> walltime_factor(0.5, 2, c=0.125)
        1.4
    """
    if tokens is not None:
        return argument_checks.check_count("tokens", tokens, minimum=1) / _expected_cost(
            alpha, gamma, c, v, tokens
        )
    return expected_tokens(alpha, gamma) / _step_cost(gamma, c, v)


def steps_factor(
    alpha: float, steps: Mapping[int, int], c: float, *, v: VerifyCost | None = None
) -> float:
    """Return `walltime_factor` for target forwards with different numbers of draft tokens.

    A forward without draft tokens costs the same as plain decoding and yields one token.

    Args:
        alpha: The probability that a draft token is accepted.
        steps: Number of forwards for each number of draft tokens, `{gamma: forwards}`.
        c: Time of a draft forward divided by the time of a target forward.
        v: As in `walltime_factor`.

    Returns:
        The factor.

    Raises:
        InputError: There are no steps, or an argument is out of range.

    Examples:
        >>> steps_factor(1.0, {0: 1, 2: 1}, c=0.0)
        2.0
    """
    if not any(steps.values()):
        raise InputError("steps is empty; give the number of steps for each gamma")
    tokens = sum(count * expected_tokens(alpha, gamma) for gamma, count in steps.items())
    return tokens / sum(count * _step_cost(gamma, c, v) for gamma, count in steps.items())


def optimal_gamma(
    alpha: float,
    c: float,
    *,
    v: VerifyCost | None = None,
    max_gamma: int = MAX_GAMMA,
    tokens: int | None = None,
) -> int:
    """Return the gamma with the largest `walltime_factor` (paper, section 3.5).

    Args:
        alpha: The probability that a draft token is accepted.
        c: Time of a draft forward divided by the time of a target forward.
        v: As in `walltime_factor`; a sequence needs entries up to max_gamma + 1.
        max_gamma: The largest gamma considered.
        tokens: As in `walltime_factor`.

    Returns:
        The smallest such gamma; 0 if plain decoding is the fastest.

    Raises:
        InputError: An argument is out of range.

    Examples:
        >>> optimal_gamma(alpha=0.8, c=0.05)
        8
        >>> optimal_gamma(alpha=0.3, c=0.5)
        0
    """
    gammas = range(argument_checks.check_count("max_gamma", max_gamma) + 1)
    return max(gammas, key=lambda gamma: walltime_factor(alpha, gamma, c, v=v, tokens=tokens))


def _expected_cost(alpha: float, gamma: int, c: float, v: VerifyCost | None, tokens: int) -> float:
    """Return the time to generate `tokens` tokens, by the recursion over n remaining tokens
    cost[n] = time of a step + E cost[n - tokens of the step].

    With n tokens remaining, gamma is at most n - 1. This limit does not change the number of steps,
    as tokens beyond n would be dropped.
    """
    tokens = argument_checks.check_count("tokens", tokens, minimum=1)
    max_gamma = min(argument_checks.check_count("gamma", gamma), tokens - 1)
    # reversed, it ends with the distribution of a smaller gamma g, except P(g + 1) = rest[g]
    distribution = np.array(tokens_distribution(alpha, max_gamma)[::-1])
    rest = argument_checks.check_probability("alpha", alpha) ** np.arange(max_gamma + 1)
    step_costs = [_step_cost(g, c, v) for g in range(max_gamma + 1)]
    cost = np.zeros(tokens + 1)
    for n in range(1, tokens + 1):
        g = min(max_gamma, n - 1)
        cost[n] = (
            step_costs[g]
            + distribution[max_gamma + 1 - g :] @ cost[n - g : n]
            + rest[g] * cost[n - g - 1]
        )
    return float(cost[tokens])


def _step_cost(gamma: int, c: float, v: VerifyCost | None) -> float:
    gamma = argument_checks.check_count("gamma", gamma)
    return gamma * argument_checks.check_cost("c", c) + (
        1.0 if v is None else _verify_cost(v, gamma + 1)
    )


def _verify_cost(v: VerifyCost, n: int) -> float:
    if callable(v):
        cost = v(n)
    elif n < len(v):
        cost = v[n]
    else:
        raise InputError(f"v ends at {len(v) - 1} tokens; give v[{n}] too, or give a smaller gamma")
    if not 0 < to_float(cost) <= argument_checks.MAX_COST:
        raise InputError(
            f"v of {n} tokens is {format_value(cost)}; give a number above 0, at "
            f"most {argument_checks.MAX_COST:g}"
        )
    return float(cost)
