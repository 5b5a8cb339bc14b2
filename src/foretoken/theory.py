"""Section 3: what speculation gains, from alpha, gamma and c, in the paper's letters.

alpha is how likely a guess is kept, gamma how many guesses are made per run of the target, c the
time of one run of the drafter over one run of the target. Factors are against plain decoding.
Guesses are assumed to be kept independently of one another, as in the paper. Knows no models, no
clocks and no tensors.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

import numpy as np
from numpy.typing import ArrayLike

from foretoken import checked
from foretoken.errors import InputError, as_float, shown

MAX_GAMMA = 64  # how far `optimal_gamma` looks
ORACLE_BOUND = math.e / (math.e - 1)  # `oracle_factor` over the best fixed gamma, at most: + 58 %

VerifyCost = Callable[[int], float] | Sequence[float]
"""v: the target's time for n tokens at once over that for one; v(n), or v[n] with v[0] unused."""


def beta(p: ArrayLike, q: ArrayLike) -> float:
    """Probability that a guess drawn from q is kept, sum min(p, q) (Theorem 3.5); p, q: laws `[V]`.

    Raises InputError where p and q are not two laws over the same tokens.
    """
    p, q = checked.laws(p, q)
    return min(1.0, float(np.minimum(p, q).sum()))


def alpha(betas: ArrayLike) -> float:
    """Mean of the betas of many prefixes, which are to come from the target (Corollary 3.6)."""
    values = checked.numbers("betas", betas)
    if values.size == 0:
        raise InputError("betas is empty; give the beta of one prefix or more")
    for value in values.ravel().tolist():
        checked.probability("beta", value)
    return float(values.mean())


def lenient_betas(p: ArrayLike, q: ArrayLike, lenience: float) -> tuple[float, ...]:
    """Probability that a guess drawn from q is kept with lenience l: the five forms that appendix
    A.5 prints, in its order. They are equal; the last is sum min(p/l, q)."""
    p, q = checked.laws(p, q)
    p, q = p[q > 0], q[q > 0]  # the other tokens add nothing
    lenience = checked.lenience(lenience)
    scaled = lenience * q
    return (
        float(q @ np.where(scaled <= p, 1.0, p / scaled)),
        float(q @ (p / np.maximum(p, scaled))),
        float((p * q / np.maximum(p, scaled)).sum()),
        float(np.minimum(p, scaled).sum() / lenience),
        float(np.minimum(p / lenience, q).sum()),
    )


def lenient_beta(p: ArrayLike, q: ArrayLike, lenience: float) -> float:
    """sum min(p/l, q), `beta` at lenience l (appendix A.5); at l = 1 it is `beta`."""
    return min(1.0, lenient_betas(p, q, lenience)[-1])


def lenient_bias(p: ArrayLike, q: ArrayLike, lenience: float) -> float:
    """Total variation between p and what comes out with lenience l: alpha_l - alpha."""
    return lenient_beta(p, q, lenience) - beta(p, q)


def greedy_lenient_beta(p: ArrayLike, q: ArrayLike, lenience: float) -> float:
    """The same at temperature 0: sum of q where p >= l max p (appendix A.5, whose inequality is
    printed the wrong way round). p is the target's law at temperature 1."""
    p, q = checked.laws(p, q)
    return min(1.0, float(q[p >= checked.lenience(lenience) * p.max()].sum()))


def match_beta(p: ArrayLike, q: ArrayLike) -> float:
    """Probability that a guess drawn from q equals a token drawn from p, sum p q: token matching,
    never above `beta`."""
    p, q = checked.laws(p, q)
    return min(1.0, float(p @ q))


def rejection_beta(p: ArrayLike, q: ArrayLike) -> float:
    """Probability that rejection sampling keeps a draw from q, 1/M = min q/p over what p can give,
    never above `beta` (appendix A.2); 0 where p gives what q cannot."""
    p, q = checked.laws(p, q)
    return min(1.0, float((q[p > 0] / p[p > 0]).min()))


def d_lk(p: ArrayLike, q: ArrayLike) -> float:
    """D_LK(p, q) = sum |p - M| with M = (p + q) / 2 (Definition 3.2); p, q: laws `[V]`.

    That is sum |p - q| / 2, total variation, and 1 - beta (Lemma 3.3). Raises as `beta` does.
    """
    p, q = checked.laws(p, q)
    return min(1.0, float(np.abs(p - q).sum() / 2))


def match_probability(p: ArrayLike, q: ArrayLike) -> float:
    """Probability that laws drawn from with the same noise choose the same token (coupled mode).

    sum_i 1 / sum_j max(p_j / p_i, q_j / q_i), between (1 - d) / (1 + d) and 1 - d, d being `d_lk`
    (Daliri, Musco, Suresh 2024, arXiv 2408.07978). Raises as `beta` does.
    """
    p, q = checked.laws(p, q)
    both = (p > 0) & (q > 0)
    order = np.argsort(p[both] / q[both])
    pi, qi = p[both][order], q[both][order]
    # p_j / p_i is the larger of the two from i on, where p_j / q_j is at least p_i / q_i
    above = p[q == 0].sum() + np.cumsum(pi[::-1])[::-1]
    below = q[p == 0].sum() + np.cumsum(qi) - qi
    return min(1.0, float((1 / (above / pi + below / qi)).sum()))


def tokens_law(alpha: float, gamma: int) -> list[float]:
    """P(a run of the target gives k tokens), k = 1..gamma+1: capped geometric (section 3.1).

    The entry of k is at k - 1: alpha^(k-1) (1 - alpha), and alpha^gamma for the last.
    """
    alpha, gamma = checked.probability("alpha", alpha), checked.count("gamma", gamma)
    return [alpha ** (k - 1) * (1 - alpha) for k in range(1, gamma + 1)] + [alpha**gamma]


def expected_tokens(alpha: float, gamma: int) -> float:
    """Tokens per run of the target, (1 - alpha^(gamma+1)) / (1 - alpha) (equation 1).

    gamma + 1 at alpha = 1; precise just below, where 1 - alpha^(gamma+1) would cancel.
    """
    alpha, gamma = checked.probability("alpha", alpha), checked.count("gamma", gamma)
    if alpha in (0, 1):
        return gamma * alpha + 1.0
    tokens = -math.expm1((gamma + 1) * math.log(alpha)) / (1 - alpha)
    return min(gamma + 1.0, max(1.0, tokens))  # but for rounding it never leaves this range


def expected_runs(alpha: float, gamma: int, tokens: int) -> float:
    """Runs of the target that generate `tokens` tokens; a surplus of the last run is dropped."""
    return _expected_cost(alpha, gamma, 0.0, None, tokens)


def walltime_factor(
    alpha: float,
    gamma: int,
    c: float,
    *,
    v: VerifyCost | None = None,
    tokens: int | None = None,
) -> float:
    """How many times faster than plain decoding (Theorem 3.8).

    v: what a block costs the target; None is the paper's assumption, as much as one token.
    tokens: how many are generated; None is the paper's assumption, very many. Otherwise exact, with
    gamma cut near the end to the tokens still missing less one, as in generation. Never above
    `tokens` where a block costs at least as much as one token.
    """
    if tokens is not None:
        return checked.count("tokens", tokens, least=1) / _expected_cost(alpha, gamma, c, v, tokens)
    return expected_tokens(alpha, gamma) / _round_cost(gamma, c, v)


def steps_factor(
    alpha: float, steps: Mapping[int, int], c: float, *, v: VerifyCost | None = None
) -> float:
    """The same where runs of the target differ in how many guesses they check: steps[gamma] of them
    check gamma. One without a guess costs what plain decoding does, and gives one token."""
    if not any(steps.values()):
        raise InputError("steps is empty; give how many steps made each number of guesses")
    tokens = sum(count * expected_tokens(alpha, gamma) for gamma, count in steps.items())
    return tokens / sum(count * _round_cost(gamma, c, v) for gamma, count in steps.items())


def operations_factor(alpha: float, gamma: int, c_hat: float) -> float:
    """How many times the arithmetic of plain decoding; c_hat is c in operations (Theorem 3.11)."""
    gamma, c_hat = checked.count("gamma", gamma), checked.cost("c_hat", c_hat)
    return (gamma * c_hat + gamma + 1) / expected_tokens(alpha, gamma)


def memory_factor(alpha: float, gamma: int) -> float:
    """How many times fewer reads of the target's weights and KV cache: equation 1 (section 3.4)."""
    return expected_tokens(alpha, gamma)


def optimal_gamma(
    alpha: float,
    c: float,
    *,
    v: VerifyCost | None = None,
    max_gamma: int = MAX_GAMMA,
    tokens: int | None = None,
) -> int:
    """The gamma in 0..max_gamma with the largest `walltime_factor` (section 3.5).

    The smallest on ties; 0 means: do not speculate. A sequence v needs entries up to max_gamma + 1.
    """
    gammas = range(checked.count("max_gamma", max_gamma) + 1)
    return max(gammas, key=lambda gamma: walltime_factor(alpha, gamma, c, v=v, tokens=tokens))


def oracle_factor(alpha: float, c: float) -> float:
    """Walltime factor of an oracle that makes only guesses that are kept (section 3.5).

    1 / ((1 - alpha) + c alpha), from 1 / (1 - alpha) tokens and alpha / (1 - alpha) guesses per
    run; inf at alpha 1, c 0. It exceeds the best fixed gamma by at most `ORACLE_BOUND`, approached
    as alpha -> 1 with c = (1 - alpha) / (e - 2), where the paper says "~60 %".
    """
    alpha, c = checked.probability("alpha", alpha), checked.cost("c", c)
    per_token = 1 - alpha + c * alpha
    return 1 / per_token if per_token > 0 else math.inf


def improves(alpha: float, c: float) -> bool:
    """Whether some gamma is faster than plain decoding: exactly where alpha > c (Corollary 3.9)."""
    return checked.probability("alpha", alpha) > checked.cost("c", c)


def guaranteed_factor(alpha: float, c: float) -> float:
    """(1 + alpha) / (1 + c), what gamma = 1 gains and the best gamma at least (Corollary 3.9)."""
    return (1 + checked.probability("alpha", alpha)) / (1 + checked.cost("c", c))


def factor_bound(alpha: float) -> float:
    """1 / (1 - alpha), which no gamma exceeds even where guesses cost nothing; inf at alpha 1."""
    return oracle_factor(alpha, 0.0)


def execution_seconds(beta: float, f: float, g: float, q: float = 0.0) -> float:
    """Expected time of `execute.speculate`: q + beta max(f, g) + (1 - beta)(f + g) (Discussion).

    f, g, q: how long each takes, in one unit. beta: how likely a guess is right; for one guess sum
    min(p, q). Holds where all that runs side by side has a core of its own, and the g of a wrong
    guess, which is called off, ends no later than the right one.
    """
    beta, f, g = checked.probability("beta", beta), checked.cost("f", f), checked.cost("g", g)
    return checked.cost("q", q) + beta * max(f, g) + (1 - beta) * (f + g)


def execution_factor(beta: float, f: float, g: float, q: float = 0.0) -> float:
    """How many times faster than f and then g; at most 2."""
    f, g = checked.cost("f", f), checked.cost("g", g)
    if not f + g > 0:
        raise InputError(f"f and g take {f:g} and {g:g}; give one of them a time above 0")
    return (f + g) / execution_seconds(beta, f, g, q)


def execution_improves(beta: float, f: float, g: float, q: float = 0.0) -> bool:
    """Whether speculation is faster than f and then g: exactly where q < beta min(f, g)."""
    return checked.cost("q", q) < checked.probability("beta", beta) * min(
        checked.cost("f", f), checked.cost("g", g)
    )


def _expected_cost(alpha: float, gamma: int, c: float, v: VerifyCost | None, tokens: int) -> float:
    """Time to generate `tokens` tokens: cost[n] = that of a run + E cost[n - the tokens it gives].

    Cutting gamma to n - 1 does not change the number of runs: the rest would be dropped.
    """
    tokens = checked.count("tokens", tokens, least=1)
    most = min(checked.count("gamma", gamma), tokens - 1)
    law = np.array(tokens_law(alpha, most)[::-1])  # that of a smaller gamma is its end, and a rest
    rest = checked.probability("alpha", alpha) ** np.arange(most + 1)
    runs = [_round_cost(g, c, v) for g in range(most + 1)]
    cost = np.zeros(tokens + 1)
    for n in range(1, tokens + 1):
        g = min(most, n - 1)
        cost[n] = runs[g] + law[most + 1 - g :] @ cost[n - g : n] + rest[g] * cost[n - g - 1]
    return float(cost[tokens])


def _round_cost(gamma: int, c: float, v: VerifyCost | None) -> float:
    gamma = checked.count("gamma", gamma)
    return gamma * checked.cost("c", c) + (1.0 if v is None else _verify_cost(v, gamma + 1))


def _verify_cost(v: VerifyCost, n: int) -> float:
    if callable(v):
        cost = v(n)
    elif n < len(v):
        cost = v[n]
    else:
        raise InputError(f"v ends at {len(v) - 1} tokens; give v[{n}] too, or a smaller gamma")
    if not 0 < as_float(cost) <= checked.DEAREST:
        raise InputError(
            f"v of {n} tokens is {shown(cost)}; give a number above 0, to {checked.DEAREST:g}"
        )
    return float(cost)
