"""Verifiers compute, from the target's logits, the number of accepted draft tokens and the token
after the accepted draft tokens.

A generation call makes one verifier from its acceptance method and uses it in every step. Verifiers
do not make the host wait for a device.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from foretoken.errors import ForetokenError, RefusedError, format_value, to_one_line
from foretoken.kernels import tokens
from foretoken.sampling.acceptance_rules import (
    EXACT_RULES,
    Outcome,
    Rule,
    count_greedy,
    count_leading,
    overlap,
    overlap_greedy,
)
from foretoken.sampling.comparators import COMPARATORS
from foretoken.sampling.distributions import argmax_ids, compute_row_probabilities
from foretoken.sampling.draw import Draw, LenientDraw, SharedDraw
from foretoken.sampling.lenience import find_near_best, make_lenient

RULES_BY_NAME: dict[str, Rule] = {**EXACT_RULES, **COMPARATORS}
# rules that the kernels implement, with the sampling of their outcomes
COMPILED_RULES = {EXACT_RULES[name]: name for name in tokens.KERNEL_RULES}


@dataclass(frozen=True, slots=True)
class ScoredBlock:
    """The draft tokens of every sequence, and the target's logits at each draft token and after the
    last draft token. Entries beyond a sequence's length are padding and have no influence."""

    logits: Tensor  # [B, G+1, V]
    x: Tensor  # [B, G], the draft tokens
    lengths: Tensor  # [B], draft tokens per sequence
    # [B, G, V], the distributions that x was sampled from; None: one-hot on x
    q: Tensor | None

    def select(self, rows: list[int]) -> ScoredBlock:
        """Return the block with only these sequences."""
        q = None if self.q is None else self.q[rows]
        return ScoredBlock(self.logits[rows], self.x[rows], self.lengths[rows], q)


class Verification(NamedTuple):
    """A verifier's result for every sequence; tensors on the logits' device."""

    n: Tensor  # [B]: number of accepted draft tokens
    t: Tensor  # [B]: the token after the accepted draft tokens
    # [B, G], float64: sum min(p, q) at every draft token, for the `p` of the rule's outcome
    beta: Tensor
    # [B, G], float64: total variation distance of that `p` from the target's; None: 0
    bias: Tensor | None = None
    # [B, G+1, V], the target's distributions; None if the verifier needs only the argmax
    p: Tensor | None = None


class Verifier(Protocol):
    """A function that verifies the draft tokens of every sequence."""

    @property
    def draw_class(self) -> type[Draw]:
        """The class of `Draw` that drafters and this verifier must use."""
        ...

    def __call__(self, block: ScoredBlock, draw: Draw) -> Verification:
        """Verify a block with each sequence's sampling params (`draw.params`) and the random
        numbers of `draw`."""
        ...


@dataclass(frozen=True, slots=True)
class GreedyVerifier:
    """The verifier for temperature 0 with any rule: it accepts draft tokens that equal the argmax,
    and computes no softmax."""

    draw_class: type[Draw] = Draw

    def __call__(self, block: ScoredBlock, draw: Draw) -> Verification:
        best = argmax_ids(block.logits)  # [B, G+1]
        n = count_greedy(best, block.x, block.lengths)
        return Verification(n, _gather_after(best, n), overlap_greedy(best, block.q, block.x))


@dataclass(frozen=True, slots=True)
class SampledVerifier:
    """The verifier that applies a rule and samples from its outcome (paper, Algorithm 1). A lenient
    rule verifies against its outcome's `p`, which is not the target's distribution."""

    rule: Rule
    draw_class: type[Draw] = Draw

    def __call__(self, block: ScoredBlock, draw: Draw) -> Verification:
        q, x = block.q, block.x
        p = compute_row_probabilities(block.logits, draw.params)
        if self.rule in COMPILED_RULES and tokens.can_compute(p, q):
            name, numbers = COMPILED_RULES[self.rule], draw.draw_verification_numbers()
            made = tokens.verify(name, p, q, x, block.lengths, *numbers)
            draw.masses.append(made.masses)
            return Verification(made.n, made.t, made.beta, p=p)
        outcome = self.rule(p, q, x, block.lengths)
        n = draw.draw_accepted(outcome)
        t, beta = (
            draw.draw_next_token(outcome.compute_next_distribution(n)),
            overlap(outcome.p, q, x),
        )
        if outcome.p is p:
            return Verification(n, t, beta, p=p)
        bias = (outcome.p - p)[:, : x.shape[1]].abs().sum(-1).double() / 2
        return Verification(n, t, beta, bias, p)


@dataclass(frozen=True, slots=True)
class LenientGreedyVerifier:
    """The verifier for temperature 0 with lenience (paper, appendix A.5): it accepts a draft token
    if the token's probability at temperature 1 is at least l times the highest probability. The
    token after the accepted draft tokens is the argmax. The bias is 1 at each accepted draft token
    that is not the argmax."""

    lenience: float
    draw_class: type[Draw] = LenientDraw

    def __call__(self, block: ScoredBlock, draw: Draw) -> Verification:
        x, q, G = block.x, block.q, block.x.shape[1]
        best = argmax_ids(block.logits)  # [B, G+1]
        near = find_near_best(block.logits[:, :G], self.lenience)  # [B, G, V]
        accepted = near.gather(2, x[..., None]).squeeze(2)
        n = count_leading(accepted, block.lengths)
        beta = accepted.double() if q is None else (q * near).sum(-1).double()
        return Verification(
            n, _gather_after(best, n), beta, (accepted & (x != best[:, :G])).double()
        )


@dataclass(frozen=True, slots=True)
class CoupledVerifier:
    """The verifier of coupled mode: it samples tokens from the target with the noise with which the
    draft tokens were sampled, and accepts draft tokens as long as they equal the sampled tokens
    (Daliri, Musco, Suresh 2024, arXiv 2408.07978).

    The output depends only on the seed and the target's distributions, not on drafter, gamma or
    batch.
    """

    draw_class: type[Draw] = SharedDraw

    def __call__(self, block: ScoredBlock, draw: Draw) -> Verification:
        assert isinstance(draw, SharedDraw)
        p = compute_row_probabilities(block.logits, draw.params)
        winners = draw.find_winners(p)  # [B, G+1]
        n = count_greedy(winners, block.x, block.lengths)
        draw.masses.append(_gather_after(p.sum(-1, dtype=torch.float64), n))
        return Verification(n, _gather_after(winners, n), overlap(p, block.q, block.x), p=p)


@dataclass(frozen=True, slots=True)
class TemperatureVerifier:
    """A verifier for batches of mixed temperatures: `greedy` verifies the sequences at temperature
    0, and `sampled` verifies all other sequences."""

    greedy: Verifier
    sampled: Verifier

    @property
    def draw_class(self) -> type[Draw]:
        return LenientDraw if self.greedy.draw_class.lenient else self.sampled.draw_class

    def __call__(self, block: ScoredBlock, draw: Draw) -> Verification:
        rows: tuple[list[int], list[int]] = ([], [])
        for b, params in enumerate(draw.params):
            rows[not params.greedy].append(b)
        if not all(rows):  # the usual case: all sequences use the same verifier
            return (self.greedy if rows[0] else self.sampled)(block, draw)
        verifications = [
            _fill_in(
                verifier(block.select(some), draw.select(some)),
                block.select(some),
                draw.select(some),
            )
            for verifier, some in zip((self.greedy, self.sampled), rows, strict=True)
        ]
        order = torch.tensor([*rows[0], *rows[1]], device=block.x.device).argsort()
        return Verification(
            *(torch.cat(parts)[order] for parts in zip(*verifications, strict=True))
        )


@dataclass(frozen=True, slots=True)
class CustomRule:
    """An acceptance method of the user. An exception in the method becomes a RefusedError, which
    fails only the requests that use the method."""

    rule: Rule

    def __call__(self, p: Tensor, q: Tensor | None, x: Tensor, lengths: Tensor) -> Outcome:
        try:
            return self.rule(p, q, x, lengths)
        except ForetokenError:
            raise
        except Exception as error:
            reason = f"{type(error).__name__}: {to_one_line(error)}"
            raise RefusedError(f"the rule {format_value(self.rule)} failed: {reason}") from error


def make_verifier(rule: Rule, lenience: float = 1.0) -> Verifier:
    """Return the verifier for a rule and a lenience. The verifier is exact at lenience 1."""
    if lenience == 1:
        return TemperatureVerifier(GreedyVerifier(), SampledVerifier(rule))
    return TemperatureVerifier(
        LenientGreedyVerifier(lenience), SampledVerifier(make_lenient(rule, lenience))
    )


def compares_with_argmax(verifier: Verifier, draw: Draw) -> bool:
    """Return whether the verifier, for all sequences of `draw`, only compares the draft tokens with
    the argmax."""
    one = verifier.greedy if isinstance(verifier, TemperatureVerifier) and draw.greedy else verifier
    return isinstance(one, GreedyVerifier)


COUPLED_VERIFIER: Verifier = TemperatureVerifier(GreedyVerifier(), CoupledVerifier())


def _fill_in(verification: Verification, block: ScoredBlock, draw: Draw) -> Verification:
    """Return the verification with `bias` and `p` computed if they are None."""
    bias = torch.zeros_like(verification.beta) if verification.bias is None else verification.bias
    p = (
        compute_row_probabilities(block.logits, draw.params)
        if verification.p is None
        else verification.p
    )
    return verification._replace(bias=bias, p=p)


def _gather_after(values: Tensor, n: Tensor) -> Tensor:
    """Return `values[b, n[b]]` for each sequence b, `[B]`."""
    return values.gather(1, n[:, None]).squeeze(1)


def draws_by_kernel(verifier: Verifier, draw: Draw) -> bool:
    """Return whether all sequences are verified by a rule that the kernels implement. No sequence
    may be greedy then. A verification by the kernels is exact, and its `p` is NaN for invalid
    logits."""
    one = verifier.sampled if isinstance(verifier, TemperatureVerifier) else verifier
    sampled = isinstance(one, SampledVerifier) and one.rule in COMPILED_RULES
    return sampled and not any(params.greedy for params in draw.params)
