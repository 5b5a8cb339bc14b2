"""The paper's theory beyond what foretoken itself computes with: D_LK and alpha, operations, the
oracle for gamma, lenience in all its forms, and speculative execution.

Examples:
    >>> from reproduction import theory
    >>> theory.improves(alpha=0.8, c=0.05)
    True
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import ArrayLike

from foretoken import argument_checks
from foretoken.errors import InputError
from foretoken.theory import beta, expected_tokens, lenient_beta

ORACLE_BOUND = math.e / (math.e - 1)  # `oracle_factor` over the best fixed gamma, at most: + 58 %


def alpha(betas: ArrayLike) -> float:
    """Return the mean of the betas of many prefixes (paper, Corollary 3.6).

    Args:
        betas: The `beta` of each prefix, of any shape; the prefixes are to come from the target.

    Returns:
        alpha, in [0, 1].

    Raises:
        InputError: There is no beta, or one is not in [0, 1].

    Examples:
        >>> alpha([0.5, 1.0])
        0.75
    """
    values = argument_checks.to_array("betas", betas)
    if values.size == 0:
        raise InputError("betas is empty; give the beta of one prefix or more")
    for value in values.ravel().tolist():
        argument_checks.check_probability("beta", value)
    return float(values.mean())


def d_lk(p: ArrayLike, q: ArrayLike) -> float:
    """Return D_LK(p, q) = sum |p - M| with M = (p + q) / 2 (paper, Definition 3.2).

    It is the total variation, sum |p - q| / 2, and 1 - `beta` (Lemma 3.3).

    Args:
        p: The target's distribution, `[V]`.
        q: The draft's distribution, `[V]`.

    Returns:
        The distance, in [0, 1].

    Raises:
        InputError: p and q are not two distributions over the same tokens.

    Examples:
        >>> d_lk([0.5, 0.5], [1.0, 0.0])
        0.5
    """
    p, q = argument_checks.check_distributions(p, q)
    return min(1.0, float(np.abs(p - q).sum() / 2))


def lenient_betas(p: ArrayLike, q: ArrayLike, lenience: float) -> tuple[float, ...]:
    """Return the probability of acceptance at a lenience in the five forms of appendix A.5.

    They are equal; the last is `lenient_beta`.

    Args:
        p: The target's distribution, `[V]`.
        q: The draft's distribution, `[V]`.
        lenience: l, in (0, 1].

    Returns:
        The five numbers, in the paper's order.

    Raises:
        InputError: p and q are not two distributions over the same tokens, or l is out of range.

    Examples:
        >>> lenient_betas([0.25, 0.75], [1.0, 0.0], 0.5)
        (0.5, 0.5, 0.5, 0.5, 0.5)
    """
    p, q = argument_checks.check_distributions(p, q)
    p, q = p[q > 0], q[q > 0]  # the other tokens add nothing
    lenience = argument_checks.check_lenience(lenience)
    scaled = lenience * q
    return (
        float(q @ np.where(scaled <= p, 1.0, p / scaled)),
        float(q @ (p / np.maximum(p, scaled))),
        float((p * q / np.maximum(p, scaled)).sum()),
        float(np.minimum(p, scaled).sum() / lenience),
        float(np.minimum(p / lenience, q).sum()),
    )


def lenient_bias(p: ArrayLike, q: ArrayLike, lenience: float) -> float:
    """Return how far a lenience takes the output from p, in total variation (paper, appendix A.5).

    It is `lenient_beta` less `beta`.

    Args:
        p: The target's distribution, `[V]`.
        q: The draft's distribution, `[V]`.
        lenience: l, in (0, 1].

    Returns:
        The distance, in [0, 1].

    Raises:
        InputError: p and q are not two distributions over the same tokens, or l is out of range.

    Examples:
        >>> lenient_bias([0.25, 0.75], [1.0, 0.0], 0.5)
        0.25
    """
    return lenient_beta(p, q, lenience) - beta(p, q)


def operations_factor(alpha: float, gamma: int, c_hat: float) -> float:
    """Return how many times the arithmetic of plain decoding is needed (paper, Theorem 3.11).

    Args:
        alpha: The probability that a draft token is accepted.
        gamma: Draft tokens for each target forward.
        c_hat: Operations of a draft forward over those of a target forward.

    Returns:
        The factor.

    Raises:
        InputError: An argument is out of range.

    Examples:
        >>> operations_factor(1.0, 3, c_hat=0.0)
        1.0
    """
    gamma, c_hat = (
        argument_checks.check_count("gamma", gamma),
        argument_checks.check_cost("c_hat", c_hat),
    )
    return (gamma * c_hat + gamma + 1) / expected_tokens(alpha, gamma)


def oracle_factor(alpha: float, c: float) -> float:
    """Return the walltime factor of an oracle whose draft tokens are all accepted (section 3.5).

    It is 1 / ((1 - alpha) + c alpha), from 1 / (1 - alpha) tokens and alpha / (1 - alpha) draft
    tokens for each forward. It exceeds the best fixed gamma by at most `ORACLE_BOUND`, approached
    as alpha -> 1 with c = (1 - alpha) / (e - 2), where the paper says "~60 %".

    Args:
        alpha: The probability that a draft token is accepted.
        c: Time of a draft forward over that of a target forward.

    Returns:
        The factor; inf at alpha 1 and c 0.

    Raises:
        InputError: An argument is out of range.

    Examples:
        >>> oracle_factor(0.75, c=0.0)
        4.0
    """
    alpha, c = argument_checks.check_probability("alpha", alpha), argument_checks.check_cost("c", c)
    per_token = 1 - alpha + c * alpha
    return 1 / per_token if per_token > 0 else math.inf


def improves(alpha: float, c: float) -> bool:
    """Tell whether some gamma is faster than plain decoding: alpha > c (paper, Corollary 3.9).

    Args:
        alpha: The probability that a draft token is accepted.
        c: Time of a draft forward over that of a target forward.

    Returns:
        True where speculation pays.

    Raises:
        InputError: An argument is out of range.

    Examples:
        >>> improves(alpha=0.8, c=0.05), improves(alpha=0.3, c=0.5)
        (True, False)
    """
    return argument_checks.check_probability("alpha", alpha) > argument_checks.check_cost("c", c)


def execution_seconds(beta: float, f: float, g: float, q: float = 0.0) -> float:
    """Return the expected time of `execute.speculate` (paper, Discussion).

    It is q + beta max(f, g) + (1 - beta) (f + g). Holds where everything that runs side by side has
    a core of its own, and the cancelled g of a wrong draft token ends no later than the right one.

    Args:
        beta: The probability that a draft token is right; for one draft token sum min(p, q).
        f: Time of f, in any unit.
        g: Time of g, in the same unit.
        q: Time of q, in the same unit.

    Returns:
        The time, in that unit.

    Raises:
        InputError: An argument is out of range.

    Examples:
        >>> execution_seconds(beta=0.5, f=1.0, g=1.0)
        1.5
    """
    beta, f, g = (
        argument_checks.check_probability("beta", beta),
        argument_checks.check_cost("f", f),
        argument_checks.check_cost("g", g),
    )
    return argument_checks.check_cost("q", q) + beta * max(f, g) + (1 - beta) * (f + g)


def execution_factor(beta: float, f: float, g: float, q: float = 0.0) -> float:
    """Return how many times faster `execute.speculate` is than f and then g; at most 2.

    Args:
        beta: The probability that a draft token is right.
        f: Time of f, in any unit.
        g: Time of g, in the same unit.
        q: Time of q, in the same unit.

    Returns:
        The factor.

    Raises:
        InputError: An argument is out of range, or f and g take no time.

    Examples:
        >>> execution_factor(beta=1.0, f=1.0, g=1.0)
        2.0
    """
    f, g = argument_checks.check_cost("f", f), argument_checks.check_cost("g", g)
    if not f + g > 0:
        raise InputError(f"f and g take {f:g} and {g:g}; give one of them a time above 0")
    return (f + g) / execution_seconds(beta, f, g, q)


def execution_improves(beta: float, f: float, g: float, q: float = 0.0) -> bool:
    """Tell whether `execute.speculate` is faster than f and then g: q < beta min(f, g).

    Args:
        beta: The probability that a draft token is right.
        f: Time of f, in any unit.
        g: Time of g, in the same unit.
        q: Time of q, in the same unit.

    Returns:
        True where it pays.

    Raises:
        InputError: An argument is out of range.

    Examples:
        >>> execution_improves(0.5, f=2.0, g=1.0, q=0.25), execution_improves(0.5, 2.0, 1.0, q=0.5)
        (True, False)
    """
    least = min(argument_checks.check_cost("f", f), argument_checks.check_cost("g", g))
    return (
        argument_checks.check_cost("q", q) < argument_checks.check_probability("beta", beta) * least
    )
