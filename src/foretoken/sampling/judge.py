"""Which guesses are kept, and the token after them: from the target's logits to the verdict.

A judge is chosen once per call, by its rule, and handed to the step. It runs no model and knows no
texts. Nothing here waits for a device.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from foretoken.errors import ForetokenError, RefusedError, one_line, shown
from foretoken.sampling.comparators import COMPARATORS
from foretoken.sampling.distributions import laws, likeliest
from foretoken.sampling.draw import Draw, LenientDraw, SharedDraw
from foretoken.sampling.lenience import lenient, near_best
from foretoken.sampling.verify import RULES, Outcome, Rule, greedy, leading, overlap, overlap_greedy

NAMED: dict[str, Rule] = {**RULES, **COMPARATORS}


@dataclass(frozen=True, slots=True)
class JudgedBlock:
    """Guesses for every row and the target's logits at them. What lies past a row's length has no
    influence."""

    logits: Tensor  # [B, G+1, V]
    x: Tensor  # [B, G], the guesses
    lengths: Tensor  # [B], how many each row has
    q: Tensor | None  # [B, G, V], the laws they were drawn from; None: proposed for certain

    def of(self, rows: list[int]) -> JudgedBlock:
        """The same of some of the rows."""
        q = None if self.q is None else self.q[rows]
        return JudgedBlock(self.logits[rows], self.x[rows], self.lengths[rows], q)


class Verdict(NamedTuple):
    """A judge's decision for every row; tensors on the logits' device."""

    n: Tensor  # [B]: guesses kept
    t: Tensor  # [B]: the token after them
    beta: Tensor  # [B, G], float64: sum min(p, q) at every guess, p being the law judged by
    bias: Tensor | None = None  # [B, G], float64: that law's total variation from the target's
    p: Tensor | None = None  # [B, G+1, V], the target's laws; None where only the argmax counts


class Judge(Protocol):
    """Decides a block of every row."""

    @property
    def draws(self) -> type[Draw]:
        """How drafters and the judge itself draw."""
        ...

    def __call__(self, block: JudgedBlock, draw: Draw) -> Verdict:
        """The verdict under each row's `draw.params`; each number it needs is drawn by `draw`."""
        ...


@dataclass(frozen=True, slots=True)
class Greedy:
    """Temperature 0, where every rule is the same: the guesses that equal the argmax, without a
    softmax."""

    @property
    def draws(self) -> type[Draw]:
        return Draw

    def __call__(self, block: JudgedBlock, draw: Draw) -> Verdict:
        best = likeliest(block.logits)  # [B, G+1]
        n = greedy(best, block.x, block.lengths)
        return Verdict(n, _after(best, n), overlap_greedy(best, block.q, block.x))


@dataclass(frozen=True, slots=True)
class Sampled:
    """A rule's outcome, drawn (paper, Algorithm 1). A rule may judge by another law than the
    target's: its outcome's p."""

    rule: Rule

    @property
    def draws(self) -> type[Draw]:
        return Draw

    def __call__(self, block: JudgedBlock, draw: Draw) -> Verdict:
        q, x = block.q, block.x
        p = laws(block.logits, draw.params)
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

    lenience: float

    @property
    def draws(self) -> type[Draw]:
        return LenientDraw

    def __call__(self, block: JudgedBlock, draw: Draw) -> Verdict:
        x, q, G = block.x, block.q, block.x.shape[1]
        best = likeliest(block.logits)  # [B, G+1]
        near = near_best(block.logits[:, :G], self.lenience)  # [B, G, V]
        accepted = near.gather(2, x[..., None]).squeeze(2)
        n = leading(accepted, block.lengths)
        beta = accepted.double() if q is None else (q * near).sum(-1).double()
        return Verdict(n, _after(best, n), beta, (accepted & (x != best[:, :G])).double())


@dataclass(frozen=True, slots=True)
class Coupled:
    """Draft and target draw by the same noise: guesses are kept while they are the tokens that the
    target draws itself (Daliri, Musco, Suresh 2024, arXiv 2408.07978).

    So the text follows from the seed and the target's laws alone, whatever drafter, gamma or batch.
    """

    @property
    def draws(self) -> type[Draw]:
        return SharedDraw

    def __call__(self, block: JudgedBlock, draw: Draw) -> Verdict:
        assert isinstance(draw, SharedDraw)
        p = laws(block.logits, draw.params)
        winners = draw.winners(p)  # [B, G+1]
        n = greedy(winners, block.x, block.lengths)
        draw.masses.append(_after(p.sum(-1, dtype=torch.float64), n))
        return Verdict(n, _after(winners, n), overlap(p, block.q, block.x), p=p)


@dataclass(frozen=True, slots=True)
class ByTemperature:
    """One judge for the rows at temperature 0, another for the rest."""

    greedy: Judge
    sampled: Judge

    @property
    def draws(self) -> type[Draw]:
        return LenientDraw if self.greedy.draws.lenient else self.sampled.draws

    def __call__(self, block: JudgedBlock, draw: Draw) -> Verdict:
        rows: tuple[list[int], list[int]] = ([], [])
        for b, params in enumerate(draw.params):
            rows[not params.greedy].append(b)
        if not all(rows):  # all are of one kind, as most often
            return (self.greedy if rows[0] else self.sampled)(block, draw)
        verdicts = [
            _full(judge(block.of(some), draw.of(some)), block.of(some), draw.of(some))
            for judge, some in zip((self.greedy, self.sampled), rows, strict=True)
        ]
        order = torch.tensor([*rows[0], *rows[1]], device=block.x.device).argsort()
        return Verdict(*(torch.cat(parts)[order] for parts in zip(*verdicts, strict=True)))


@dataclass(frozen=True, slots=True)
class OwnRule:
    """A rule of the user's own: what goes wrong in it is the end of the rows that asked for it."""

    rule: Rule

    def __call__(self, p: Tensor, q: Tensor | None, x: Tensor, lengths: Tensor) -> Outcome:
        try:
            return self.rule(p, q, x, lengths)
        except ForetokenError:
            raise
        except Exception as error:
            reason = f"{type(error).__name__}: {one_line(error)}"
            raise RefusedError(f"the rule {shown(self.rule)} failed: {reason}") from error


def choose(rule: Rule, lenience: float = 1.0) -> Judge:
    """The judge of a call; exact at lenience 1."""
    if lenience == 1:
        return ByTemperature(Greedy(), Sampled(rule))
    return ByTemperature(LenientGreedy(lenience), Sampled(lenient(rule, lenience)))


COUPLED: Judge = ByTemperature(Greedy(), Coupled())


def _full(verdict: Verdict, block: JudgedBlock, draw: Draw) -> Verdict:
    """A verdict with what its judge leaves out."""
    bias = torch.zeros_like(verdict.beta) if verdict.bias is None else verdict.bias
    p = laws(block.logits, draw.params) if verdict.p is None else verdict.p
    return verdict._replace(bias=bias, p=p)


def _after(values: Tensor, n: Tensor) -> Tensor:
    """Of `values [B, G+1]` those behind the n guesses that each row keeps, `[B]`."""
    return values.gather(1, n[:, None]).squeeze(1)
