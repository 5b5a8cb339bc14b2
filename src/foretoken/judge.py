"""Which guesses are kept, and the token after them: from the target's logits to the verdict.

A judge is chosen once per call, from the temperature and the rule, and handed to the step. It runs
no model, and knows no rows and no texts. Nothing here waits for a device.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, Protocol

from torch import Tensor

from foretoken.distributions import SamplingParams, law, likeliest
from foretoken.draw import Draw
from foretoken.verify import Rule, greedy, overlap, overlap_greedy


class Verdict(NamedTuple):
    """What a judge says of every row; tensors on the logits' device."""

    n: Tensor  # [B]: guesses kept
    t: Tensor  # [B]: the token after them
    beta: Tensor  # [B, G], float64: sum min(p, q) at every guess


class Judge(Protocol):
    """Decides a block of every row."""

    def __call__(
        self,
        logits: Tensor,
        x: Tensor,
        lengths: Tensor,
        q: Tensor | None,
        params: SamplingParams,
        draw: Draw,
    ) -> Verdict:
        """logits [B, G+1, V] of the target, x [B, G] guesses, lengths [B] of them, q [B, G, V] or
        None (guesses proposed for certain). What lies past a row's length has no influence."""
        ...


@dataclass(frozen=True, slots=True)
class Greedy:
    """Temperature 0, where every rule is the same: the guesses that equal the argmax, without a
    softmax."""

    def __call__(
        self,
        logits: Tensor,
        x: Tensor,
        lengths: Tensor,
        q: Tensor | None,
        params: SamplingParams,
        draw: Draw,
    ) -> Verdict:
        best = likeliest(logits)  # [B, G+1]
        n = greedy(best, x, lengths)
        return Verdict(n, best.gather(1, n[:, None]).squeeze(1), overlap_greedy(best, q, x))


@dataclass(frozen=True, slots=True)
class Sampled:
    """A rule's outcome, drawn (paper, Algorithm 1)."""

    rule: Rule

    def __call__(
        self,
        logits: Tensor,
        x: Tensor,
        lengths: Tensor,
        q: Tensor | None,
        params: SamplingParams,
        draw: Draw,
    ) -> Verdict:
        p = law(logits, params)  # [B, G+1, V]
        outcome = self.rule(p, q, x, lengths)
        n = draw.kept(outcome)
        return Verdict(n, draw.next_token(outcome.next_law(n)), overlap(p, q, x))


def choose(rule: Rule, params: SamplingParams) -> Judge:
    """The judge of a call."""
    return Greedy() if params.greedy else Sampled(rule)
