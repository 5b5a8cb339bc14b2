"""Which guesses are kept, and the token after them: from the target's logits to the verdict.

A judge is chosen once per call, by temperature and rule, and handed to the step. It runs no model
and knows no rows and no texts. Nothing here waits for a device.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, NamedTuple, Protocol

import torch
from torch import Tensor

from foretoken.sampling.comparators import COMPARATORS
from foretoken.sampling.distributions import SamplingParams, law, likeliest
from foretoken.sampling.draw import Draw, SharedDraw
from foretoken.sampling.lenience import lenient, near_best
from foretoken.sampling.verify import RULES, Rule, greedy, leading, overlap, overlap_greedy

NAMED: dict[str, Rule] = {**RULES, **COMPARATORS}


@dataclass(frozen=True, slots=True)
class Block:
    """Guesses for every row and the target's logits at them. What lies past a row's length has no
    influence."""

    logits: Tensor  # [B, G+1, V]
    x: Tensor  # [B, G], the guesses
    lengths: Tensor  # [B], how many each row has
    q: Tensor | None  # [B, G, V], the laws they were drawn from; None: proposed for certain


class Verdict(NamedTuple):
    """A judge's decision for every row; tensors on the logits' device."""

    n: Tensor  # [B]: guesses kept
    t: Tensor  # [B]: the token after them
    beta: Tensor  # [B, G], float64: sum min(p, q) at every guess, p being the law judged by
    bias: Tensor | None = None  # [B, G], float64: that law's total variation from the target's
    p: Tensor | None = None  # [B, G+1, V], the target's laws; None where only the argmax counts


class Judge(Protocol):
    """Decides a block of every row."""

    draws: ClassVar[type[Draw]]  # how drafters and the judge itself draw

    def __call__(self, block: Block, draw: Draw) -> Verdict:
        """The verdict under `draw.params`; each number it needs is drawn by `draw`."""
        ...


@dataclass(frozen=True, slots=True)
class Greedy:
    """Temperature 0, where every rule is the same: the guesses that equal the argmax, without a
    softmax."""

    draws: ClassVar[type[Draw]] = Draw

    def __call__(self, block: Block, draw: Draw) -> Verdict:
        best = likeliest(block.logits)  # [B, G+1]
        n = greedy(best, block.x, block.lengths)
        return Verdict(n, _after(best, n), overlap_greedy(best, block.q, block.x))


@dataclass(frozen=True, slots=True)
class Sampled:
    """A rule's outcome, drawn (paper, Algorithm 1). A rule may judge by another law than the
    target's: its outcome's p."""

    draws: ClassVar[type[Draw]] = Draw
    rule: Rule

    def __call__(self, block: Block, draw: Draw) -> Verdict:
        q, x = block.q, block.x
        p = law(block.logits, draw.params)
        outcome = self.rule(p, q, x, block.lengths)
        n = draw.kept(outcome)
        t, beta = draw.next_token(outcome.next_law(n)), overlap(outcome.p, q, x)
        if outcome.p is p:
            return Verdict(n, t, beta, p=p)
        bias = (outcome.p - p)[:, : x.shape[1]].abs().sum(-1).double() / 2
        return Verdict(n, t, beta, bias, p)


@dataclass(frozen=True, slots=True)
class LenientGreedy:
    """Temperature 0 with lenience (appendix A.5): guesses with at least l times the probability of
    the likeliest token, at temperature 1; after them the argmax. The bias is 1 at each guess kept
    that is not the argmax."""

    draws: ClassVar[type[Draw]] = Draw
    lenience: float

    def __call__(self, block: Block, draw: Draw) -> Verdict:
        x, q, G = block.x, block.q, block.x.shape[1]
        best = likeliest(block.logits)  # [B, G+1]
        near = near_best(block.logits[:, :G], self.lenience)  # [B, G, V]
        kept = near.gather(2, x[..., None]).squeeze(2)
        n = leading(kept, block.lengths)
        beta = kept.double() if q is None else (q * near).sum(-1).double()
        return Verdict(n, _after(best, n), beta, (kept & (x != best[:, :G])).double())


@dataclass(frozen=True, slots=True)
class Coupled:
    """Draft and target draw by the same noise: guesses are kept while they are the tokens that the
    target draws itself (Daliri, Musco, Suresh 2024, arXiv 2408.07978).

    So the text follows from the seed and the target's laws alone, whatever drafter, gamma or batch.
    """

    draws: ClassVar[type[Draw]] = SharedDraw

    def __call__(self, block: Block, draw: Draw) -> Verdict:
        assert isinstance(draw, SharedDraw)
        p = law(block.logits, draw.params)
        own = draw.winners(p)  # [B, G+1]
        n = greedy(own, block.x, block.lengths)
        draw.masses.append(_after(p.sum(-1, dtype=torch.float64), n))
        return Verdict(n, _after(own, n), overlap(p, block.q, block.x), p=p)


def choose(rule: Rule, params: SamplingParams, lenience: float = 1.0) -> Judge:
    """The judge of a call; exact at lenience 1."""
    if lenience == 1:
        return Greedy() if params.greedy else Sampled(rule)
    return LenientGreedy(lenience) if params.greedy else Sampled(lenient(rule, lenience))


def _after(values: Tensor, n: Tensor) -> Tensor:
    """Of `values [B, G+1]` those behind the n guesses that each row keeps, `[B]`."""
    return values.gather(1, n[:, None]).squeeze(1)
