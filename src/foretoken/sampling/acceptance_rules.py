"""Section 2.3: the rules that decide which draft tokens are kept.

A rule is a pure function `rule(p, q, x, lengths) -> Outcome` and returns the *distribution* of what
happens: how likely it is that n draft tokens are kept, and for a given n the distribution of the
next token. It draws nothing, runs no model and moves no device, so that every rule is proved
lossless by enumeration. The step draws n and the next token.

Shapes: p [B, G+1, V], q [B, G, V] or None (guesses proposed for certain), x [B, G], lengths [B]
(guesses per row). Entries past a row's length are padding and have no influence.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Outcome:
    """The distribution of a verification: of n, the number of draft tokens accepted, and of the
    next token given n."""

    survival: Tensor  # [B, G], float64: P(n > i) in column i; it never rises from left to right
    p: Tensor
    q: Tensor | None
    x: Tensor
    lengths: Tensor
    scale: Tensor  # [B, G+1], float64: the weight of p in the residual at each n

    @property
    def n_distribution(self) -> Tensor:
        """P(n = k) for k = 0..G, `[B, G+1]`."""
        one = torch.ones_like(self.scale[:, :1])
        at_least = torch.cat([one, self.survival, torch.zeros_like(one)], 1)
        return at_least[:, :-1] - at_least[:, 1:]

    def n(self, uniforms: Tensor) -> Tensor:
        """The n that one number in [0, 1) per row picks: accept while u < P(n > i), so never at
        probability 0."""
        return (uniforms[:, None] < self.survival).sum(1)

    def next_distribution(self, n: Tensor) -> Tensor:
        """The distribution of the token after the n accepted draft tokens, `[B, V]`: p where all
        were kept, else a residual."""
        if not self.x.shape[1]:
            return self.p[:, 0]
        rows = torch.arange(len(n), device=n.device)
        p = _pick_rows(self.p, rows, n)
        rejected = n < self.lengths
        # reading `rejected` from a device would make the host wait
        if p.is_cpu and not bool(rejected.any()):
            return p
        at = n.clamp(max=self.x.shape[1] - 1)
        q = None if self.q is None else _pick_rows(self.q, rows, at)
        residual = _residual(p, q, self.x[rows, at], self.scale[rows, n])
        mass = residual.sum(-1, keepdim=True)
        # only rounding can reject a draft token where nothing is left
        return torch.where(rejected[:, None] & (mass > 0), residual.div_(mass), p)


Rule = Callable[[Tensor, Tensor | None, Tensor, Tensor], Outcome]


def verify_without_draft(p: Tensor, q: Tensor | None, x: Tensor, lengths: Tensor) -> Outcome:
    """Without draft tokens, as every rule does it, in few operations: the next token is p's."""
    one = torch.ones(len(x), 1, dtype=torch.float64, device=x.device)
    return Outcome(one[:, :0], p, q, x, lengths, one)


def speculative(p: Tensor, q: Tensor | None, x: Tensor, lengths: Tensor) -> Outcome:
    """Algorithm 1: keep draft token i with probability min(1, p(x_i)/q(x_i)), stop at the first
    rejection."""
    if not x.shape[1]:
        return verify_without_draft(p, q, x, lengths)
    px, qx = _gather_probabilities(p[:, : x.shape[1]], x), _gather_probabilities(q, x)
    accept = torch.where(qx > 0, torch.minimum(px, qx) / qx.where(qx > 0, 1.0), 0.0)
    survival = accept.where(draft_mask(x, lengths), 0.0).cumprod(1)
    return Outcome(survival, p, q, x, lengths, survival.new_ones(len(x), x.shape[1] + 1))


def block(p: Tensor, q: Tensor | None, x: Tensor, lengths: Tensor) -> Outcome:
    """Block verification (Sun et al. 2025, arXiv 2403.10444): the longest prefix kept is chosen
    jointly.

    Keeps at least as many draft tokens as `speculative` on average, and the same distribution.
    """
    G = x.shape[1]
    if not G:
        return verify_without_draft(p, q, x, lengths)
    px, qx = _gather_probabilities(p[:, :G], x), _gather_probabilities(q, x)
    qx = qx.where(qx > 0, torch.inf)  # a draft token that q cannot make is not kept
    a = [px.new_ones(len(x))]  # a_i = min(1, a_{i-1} p(x_i)/q(x_i))
    for pxi, qxi in zip(px.unbind(1), qx.unbind(1), strict=True):
        a.append((a[-1] * pxi / qxi).clamp(max=1.0))
    weight = torch.stack(a, 1)  # [B, G+1]
    h = _stop_probabilities(p, q, x, weight)
    last = torch.arange(1, G + 1, device=x.device) == lengths[:, None]
    h = torch.where(last, weight[:, 1:], h).where(draft_mask(x, lengths), 0.0)
    survival = 1 - (1 - h).flip(1).cumprod(1).flip(1)  # P(n > i) = 1 - prod_{j >= i} (1 - h_j)
    return Outcome(survival, p, q, x, lengths, weight)


def _stop_probabilities(p: Tensor, q: Tensor | None, x: Tensor, weight: Tensor) -> Tensor:
    """h_i = S_i / (S_i + 1 - a_i) for i = 1..G, S_i the mass of (a_i p - q)+ at the following
    guess `[B, G]`."""
    G = x.shape[1]
    if not G:
        return weight[:, 1:]
    a = weight[:, 1:G]
    following = None if q is None else q[:, 1:]
    S = _residual(p[:, 1:-1], following, x[:, 1:], a).sum(-1).double()
    rest = S + (1 - a)  # so bracketed it is never below S
    h = torch.where(rest > 0, S / rest.where(rest > 0, 1.0), 1.0)
    return torch.cat([h, weight[:, G:]], 1)


def _residual(p: Tensor, q: Tensor | None, x: Tensor, a: Tensor) -> Tensor:
    """(a p - q)+ `[..., V]`, q being all on x where it is None; p, q `[..., V]`, x, a `[...]`."""
    residual = p * a[..., None].to(p.dtype)
    if q is None:
        return residual.scatter_(-1, x[..., None], 0.0)
    return residual.sub_(q).clamp_(min=0)


def _pick_rows(distributions: Tensor, rows: Tensor, i: Tensor) -> Tensor:
    """`distributions[rows, i]`, `[n, V]`, for which torch needs ten times as long."""
    return distributions.flatten(0, 1).index_select(0, rows * distributions.shape[1] + i)


def count_greedy(best: Tensor, x: Tensor, lengths: Tensor) -> Tensor:
    """T = 0, where every rule is the same: n is the number of leading draft tokens that equal `best
    [B, G+1]`."""
    return count_leading(best[:, : x.shape[1]] == x, lengths)


def count_leading(accepted: Tensor, lengths: Tensor) -> Tensor:
    """n where `accepted [B, G]` decides each draft token alone: the first that fails ends the
    block."""
    return (accepted & draft_mask(accepted, lengths)).long().cumprod(1).sum(1)


def overlap(p: Tensor, q: Tensor | None, x: Tensor) -> Tensor:
    """beta at every draft token: sum over the vocabulary of min(p, q), `[B, G]` (Theorem 3.5)."""
    if not x.shape[1]:
        return p.new_empty(x.shape, dtype=torch.float64)
    p = p[:, : x.shape[1]]
    if q is None:
        return _gather_probabilities(p, x)
    return torch.minimum(p, q).sum(-1).double().clamp(max=1.0)  # but for rounding


def overlap_greedy(best: Tensor, q: Tensor | None, x: Tensor) -> Tensor:
    """The same at T = 0, where p is all on `best [B, G+1]`."""
    best = best[:, : x.shape[1]]
    return (best == x).double() if q is None else _gather_probabilities(q, best)


EXACT_RULES: dict[str, Rule] = {"speculative": speculative, "block": block}


def _gather_probabilities(distribution: Tensor | None, x: Tensor) -> Tensor:
    """distribution(x) in float64; 1 where the draft token was certain."""
    if distribution is None:
        return torch.ones(x.shape, dtype=torch.float64, device=x.device)
    return distribution.gather(2, x[..., None]).squeeze(2).double()


def draft_mask(x: Tensor, lengths: Tensor) -> Tensor:
    """Where x `[B, G]` holds a draft token and not padding, `[B, G]`."""
    return torch.arange(x.shape[1], device=x.device) < lengths[:, None]
