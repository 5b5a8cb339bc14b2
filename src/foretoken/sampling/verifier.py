"""Which draft tokens are kept, and the token after them: from the target's logits to the
verification.

A verifier is chosen once per call, by its rule, and handed to the step. It runs no model and knows
no texts. Nothing here waits for a device.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from foretoken.errors import ForetokenError, RefusedError, one_line, shown
from foretoken.kernels import tokens
from foretoken.sampling.comparators import COMPARATORS
from foretoken.sampling.distributions import likeliest, row_probabilities
from foretoken.sampling.draw import Draw, LenientDraw, SharedDraw
from foretoken.sampling.lenience import lenient, near_best
from foretoken.sampling.verify import RULES, Outcome, Rule, greedy, leading, overlap, overlap_greedy

NAMED: dict[str, Rule] = {**RULES, **COMPARATORS}
COMPILED = {RULES[name]: name for name in tokens.KERNEL_RULES}  # those that the kernels apply and draw by


@dataclass(frozen=True, slots=True)
class ScoredBlock:
    """Guesses for every row and the target's logits at them. Entries past a row's length have
    no influence."""

    logits: Tensor  # [B, G+1, V]
    x: Tensor  # [B, G], the draft tokens
    lengths: Tensor  # [B], how many each row has
    # [B, G, V], the distributions they were drawn from; None: proposed for certain
    q: Tensor | None

    def of(self, rows: list[int]) -> ScoredBlock:
        """The same of some of the rows."""
        q = None if self.q is None else self.q[rows]
        return ScoredBlock(self.logits[rows], self.x[rows], self.lengths[rows], q)


class Verification(NamedTuple):
    """A verifier's decision for every row; tensors on the logits' device."""

    n: Tensor  # [B]: draft tokens accepted
    t: Tensor  # [B]: the token after them
    # [B, G], float64: sum min(p, q) at every draft token, p being the distribution judged by
    beta: Tensor
    # [B, G], float64: that distribution's total variation from the target's
    bias: Tensor | None = None
    # [B, G+1, V], the target's distributions; None where only the argmax counts
    p: Tensor | None = None


class Verifier(Protocol):
    """Decides a block of every row."""

    @property
    def draws(self) -> type[Draw]:
        """The class by which drafters and the verifier itself draw."""
        ...

    def __call__(self, block: ScoredBlock, draw: Draw) -> Verification:
        """The verification under each row's `draw.params`; each number it needs is drawn by
        `draw`."""
        ...


@dataclass(frozen=True, slots=True)
class Greedy:
    """Temperature 0, where every rule is the same: the draft tokens that equal the argmax, without
    a softmax."""

    draws: type[Draw] = Draw

    def __call__(self, block: ScoredBlock, draw: Draw) -> Verification:
        best = likeliest(block.logits)  # [B, G+1]
        n = greedy(best, block.x, block.lengths)
        return Verification(n, _after(best, n), overlap_greedy(best, block.q, block.x))


@dataclass(frozen=True, slots=True)
class Sampled:
    """A rule's outcome, drawn (paper, Algorithm 1). A rule may judge by another distribution than
    the target's: its outcome's p."""

    rule: Rule
    draws: type[Draw] = Draw

    def __call__(self, block: ScoredBlock, draw: Draw) -> Verification:
        q, x = block.q, block.x
        p = row_probabilities(block.logits, draw.params)
        if self.rule in COMPILED and tokens.can_compute(p, q):
            name, numbers = COMPILED[self.rule], draw.for_verification()
            made = tokens.verify(name, p, q, x, block.lengths, *numbers)
            draw.masses.append(made.masses)
            return Verification(made.n, made.t, made.beta, p=p)
        outcome = self.rule(p, q, x, block.lengths)
        n = draw.accepted(outcome)
        t, beta = draw.next_token(outcome.next_distribution(n)), overlap(outcome.p, q, x)
        if outcome.p is p:
            return Verification(n, t, beta, p=p)
        bias = (outcome.p - p)[:, : x.shape[1]].abs().sum(-1).double() / 2
        return Verification(n, t, beta, bias, p)


@dataclass(frozen=True, slots=True)
class LenientGreedy:
    """Temperature 0 with lenience (appendix A.5): guesses with at least l times the probability of
    the likeliest token, at temperature 1; after them the argmax. The bias is 1 at each draft token
    accepted that is not the argmax."""

    lenience: float
    draws: type[Draw] = LenientDraw

    def __call__(self, block: ScoredBlock, draw: Draw) -> Verification:
        x, q, G = block.x, block.q, block.x.shape[1]
        best = likeliest(block.logits)  # [B, G+1]
        near = near_best(block.logits[:, :G], self.lenience)  # [B, G, V]
        accepted = near.gather(2, x[..., None]).squeeze(2)
        n = leading(accepted, block.lengths)
        beta = accepted.double() if q is None else (q * near).sum(-1).double()
        return Verification(n, _after(best, n), beta, (accepted & (x != best[:, :G])).double())


@dataclass(frozen=True, slots=True)
class Coupled:
    """Draft and target draw by the same noise: draft tokens are kept while they are the tokens that
    the target draws itself (Daliri, Musco, Suresh 2024, arXiv 2408.07978).

    So the text follows from the seed and the target's distributions alone, whatever drafter, gamma
    or batch.
    """

    draws: type[Draw] = SharedDraw

    def __call__(self, block: ScoredBlock, draw: Draw) -> Verification:
        assert isinstance(draw, SharedDraw)
        p = row_probabilities(block.logits, draw.params)
        winners = draw.winners(p)  # [B, G+1]
        n = greedy(winners, block.x, block.lengths)
        draw.masses.append(_after(p.sum(-1, dtype=torch.float64), n))
        return Verification(n, _after(winners, n), overlap(p, block.q, block.x), p=p)


@dataclass(frozen=True, slots=True)
class ByTemperature:
    """One verifier for the rows at temperature 0, another for the rest."""

    greedy: Verifier
    sampled: Verifier

    @property
    def draws(self) -> type[Draw]:
        return LenientDraw if self.greedy.draws.lenient else self.sampled.draws

    def __call__(self, block: ScoredBlock, draw: Draw) -> Verification:
        rows: tuple[list[int], list[int]] = ([], [])
        for b, params in enumerate(draw.params):
            rows[not params.greedy].append(b)
        if not all(rows):  # all are of one kind, as most often
            return (self.greedy if rows[0] else self.sampled)(block, draw)
        verifications = [
            _full(verifier(block.of(some), draw.of(some)), block.of(some), draw.of(some))
            for verifier, some in zip((self.greedy, self.sampled), rows, strict=True)
        ]
        order = torch.tensor([*rows[0], *rows[1]], device=block.x.device).argsort()
        return Verification(
            *(torch.cat(parts)[order] for parts in zip(*verifications, strict=True))
        )


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


def choose(rule: Rule, lenience: float = 1.0) -> Verifier:
    """The verifier of a call; exact at lenience 1."""
    if lenience == 1:
        return ByTemperature(Greedy(), Sampled(rule))
    return ByTemperature(LenientGreedy(lenience), Sampled(lenient(rule, lenience)))


def compares(verifier: Verifier, draw: Draw) -> bool:
    """Tell whether draft tokens of these rows are only compared with the argmax."""
    one = verifier.greedy if isinstance(verifier, ByTemperature) and draw.greedy else verifier
    return isinstance(one, Greedy)


COUPLED: Verifier = ByTemperature(Greedy(), Coupled())


def _full(verification: Verification, block: ScoredBlock, draw: Draw) -> Verification:
    """A verification with what its verifier leaves out."""
    bias = torch.zeros_like(verification.beta) if verification.bias is None else verification.bias
    p = row_probabilities(block.logits, draw.params) if verification.p is None else verification.p
    return verification._replace(bias=bias, p=p)


def _after(values: Tensor, n: Tensor) -> Tensor:
    """Return the entries of `values [B, G+1]` after the n accepted draft tokens of each row,
    `[B]`."""
    return values.gather(1, n[:, None]).squeeze(1)


def draws(verifier: Verifier, draw: Draw) -> bool:
    """Tell whether these rows are judged by a rule that the kernels apply, all at a temperature: so
    exactly, and by distributions in which invalid logits show."""
    one = verifier.sampled if isinstance(verifier, ByTemperature) else verifier
    sampled = isinstance(one, Sampled) and one.rule in COMPILED
    return sampled and not any(params.greedy for params in draw.params)
