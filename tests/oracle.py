"""The mathematics once more, naively: float64 NumPy, one row, no cache, no blocks of tensors.

What the package computes is compared with this. A model here is a function from a text (a tuple of
ids) to the distribution of the next token; a verdict is (probability, draft tokens accepted,
distribution of the next).
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Sequence
from functools import lru_cache

import numpy as np
from scipy import stats

Text = tuple[int, ...]
Model = Callable[[Text], np.ndarray]
Verification = tuple[float, int, np.ndarray]


def standardize(
    logits: np.ndarray, temperature: float, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0
) -> np.ndarray:
    """Section 2.2 for logits without ties: temperature, top-k, top-p, min-p, in this order."""
    if temperature < 1e-5:
        return np.eye(len(logits))[int(np.argmax(logits))]
    p = softmax(np.asarray(logits, dtype=np.float64) / temperature)
    down = np.argsort(-p)
    if top_k:
        p[down[top_k:]] = 0.0
        p = p / p.sum()
    if top_p < 1:
        before = np.cumsum(p[down]) - p[down]  # the mass of what is likelier
        p[down[before >= top_p]] = 0.0
        p = p / p.sum()
    p[p < min_p * p.max()] = 0.0
    return p / p.sum()


def softmax(logits: np.ndarray) -> np.ndarray:
    e = np.exp(logits - logits.max())
    return e / e.sum()


def inverse_cdf(distribution: np.ndarray, u: float) -> int:
    """The first id at which the running sum passes u."""
    running = 0.0
    for i, mass in enumerate(distribution):
        running += mass
        if mass > 0 and u * distribution.sum() < running:
            return i
    return int(np.flatnonzero(distribution)[-1])


def residual(p: np.ndarray, q: np.ndarray, weight: float = 1.0) -> np.ndarray:
    """norm(max(0, weight p - q)), and p where nothing is left."""
    left = np.clip(weight * p - q, 0.0, None)
    return left / left.sum() if left.sum() > 0 else p


def algorithm1(
    p: np.ndarray, q: np.ndarray, x: Sequence[int], lenience: float = 1.0
) -> list[Verification]:
    """Algorithm 1 of the paper on draft tokens x: p [len(x) + 1, V], q [len(x), V]; appendix
    A.5."""
    verifications, reached = [], 1.0
    for i, token in enumerate(x):
        accept = min(1.0, p[i, token] / (lenience * q[i, token])) if q[i, token] > 0 else 0.0
        verifications.append((reached * (1 - accept), i, residual(p[i], q[i])))
        reached *= accept
    return [*verifications, (reached, len(x), p[len(x)])]


def block_verification(p: np.ndarray, q: np.ndarray, x: Sequence[int]) -> list[Verification]:
    """Sun et al. (arXiv 2403.10444): the longest prefix that wins its coin."""
    weight = [1.0]
    for i, token in enumerate(x):
        ratio = p[i, token] / q[i, token] if q[i, token] > 0 else 0.0
        weight.append(min(1.0, weight[-1] * ratio))
    verifications, not_longer = [(weight[-1], len(x), p[len(x)])], 1 - weight[-1]
    for k in range(len(x) - 1, -1, -1):
        S = float(np.clip(weight[k] * p[k] - q[k], 0.0, None).sum())
        coin = S / (S + 1 - weight[k]) if k and S + 1 - weight[k] > 0 else 1.0
        verifications.append((not_longer * coin, k, residual(p[k], q[k], weight[k])))
        not_longer *= 1 - coin
    return verifications[::-1]


def lenient_greedy(
    p: np.ndarray, q: np.ndarray, x: Sequence[int], lenience: float
) -> list[Verification]:
    """Appendix A.5 at temperature 0, the inequality put right."""
    n = 0
    while n < len(x) and p[n, x[n]] >= lenience * p[n].max():
        n += 1
    return [(1.0, n, np.eye(p.shape[1])[int(p[n].argmax())])]


def steps(
    model: Model,
    draft_token: Model,
    gamma: int,
    verify: Callable[[np.ndarray, np.ndarray, Sequence[int]], list[Verification]],
    count: int,
    prompt: Text = (),
) -> dict[Text, float]:
    """The distribution of the new tokens that `count` steps make, draft tokens being drawn from
    `guess`."""
    ended = {(): 1.0}
    for _ in range(count):
        distribution: dict[Text, float] = {}
        for text, weight in ended.items():
            head = (*prompt, *text)
            for x in itertools.product(range(len(model(head))), repeat=gamma):
                q = np.array([draft_token((*head, *x[:i])) for i in range(gamma)])
                drawn = weight * float(np.prod([q[i, token] for i, token in enumerate(x)]))
                if not drawn:
                    continue
                p = np.array([model((*head, *x[:i])) for i in range(gamma + 1)])
                for happens, n, after in verify(p, q, x):
                    for y, mass in enumerate(after):
                        new = (*text, *x[:n], y)
                        distribution[new] = distribution.get(new, 0.0) + drawn * happens * float(
                            mass
                        )
        ended = distribution
    return ended


def extend(
    weights: dict[Text, float], model: Model, length: int, eos: frozenset[int] = frozenset()
) -> dict[Text, float]:
    """The distribution of texts of `length` new tokens, from weighted beginnings; shorter where EOS
    came, and where no next token is possible."""
    ended: dict[Text, float] = {}
    todo = list(weights.items())
    while todo:
        text, weight = todo.pop()
        over = len(text) == length or (text and text[-1] in eos) or not weight
        distribution = () if over else model(text)
        if not any(distribution):
            ended[text] = ended.get(text, 0.0) + weight
        else:
            todo += [((*text, y), weight * float(py)) for y, py in enumerate(distribution)]
    return ended


def joint(model: Model, length: int, eos: frozenset[int] = frozenset()) -> dict[Text, float]:
    """The model's own distribution over texts."""
    return extend({(): 1.0}, model, length, eos)


def tv(a: dict[Text, float], b: dict[Text, float]) -> float:
    """Total variation."""
    return 0.5 * sum(abs(a.get(text, 0.0) - b.get(text, 0.0)) for text in set(a) | set(b))


def random_model(seed: int, V: int, zeros: float = 0.0, sharpness: float = 0.7) -> Model:
    """A distribution of its own for every text; a share of `zeros` of its entries is impossible."""

    @lru_cache(None)
    def model(text: Text) -> np.ndarray:
        rng = np.random.default_rng([seed, len(text), *text])
        distribution = rng.gamma(sharpness, size=V) + 1e-3
        gone = rng.random(V) < zeros
        gone[rng.integers(V)] = False
        distribution[gone] = 0.0
        return distribution / distribution.sum()

    return model


def p_value(texts: Counter[Text], distribution: dict[Text, float]) -> float:
    """Chi-square; texts expected fewer than 10 times share a cell, so that its distribution
    holds."""
    assert all(distribution.get(text, 0) > 0 for text in texts)  # nothing that was cut
    cells = [(texts[text], texts.total() * weight) for text, weight in distribution.items()]
    common = [cell for cell in cells if cell[1] >= 10]
    rare = [cell for cell in cells if cell[1] < 10]
    assert len(common) >= 30
    together = [tuple(map(sum, zip(*rare, strict=True)))] if rare else []
    observed, expected = zip(*common, *together, strict=True)
    return float(stats.chisquare(observed, expected, sum_check=False).pvalue)
