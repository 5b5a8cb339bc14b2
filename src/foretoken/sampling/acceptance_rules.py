"""Acceptance methods: the rules that decide how many draft tokens are accepted (paper, section
2.3).

A rule is a pure function `rule(p, q, x, lengths) -> Outcome`. It samples nothing, but returns two
distributions: the distribution of n, the number of accepted draft tokens, and the distribution of
the next token given n. The verifier samples from both distributions. A test can therefore prove a
rule lossless by enumeration.

Shapes: p [B, G+1, V], q [B, G, V] or None (q is one-hot on x), x [B, G] (draft tokens), lengths [B]
(draft tokens per sequence). Entries past a sequence's length are padding and have no influence.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Outcome:
    """The result of a rule: the distribution of n, the number of accepted draft tokens, and the
    distribution of the next token given n."""

    survival: Tensor  # [B, G], float64: P(n > i) in column i, never increasing with i
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
        """Sample n, `[B]`, with one uniform number u in [0, 1) per sequence: the number of draft
        tokens i with u < P(n > i). A draft token with acceptance probability 0 is never
        accepted."""
        return (uniforms[:, None] < self.survival).sum(1)

    def compute_next_distribution(self, n: Tensor) -> Tensor:
        """Return the distribution of the token after n accepted draft tokens, `[B, V]`: p if all
        were accepted, else a residual."""
        if not self.x.shape[1]:
            return self.p[:, 0]
        rows = torch.arange(len(n), device=n.device)
        p = _pick_rows(self.p, rows, n)
        rejected = n < self.lengths
        # on a device, `rejected.any()` would make the host wait
        if p.is_cpu and not bool(rejected.any()):
            return p
        at = n.clamp(max=self.x.shape[1] - 1)
        q = None if self.q is None else _pick_rows(self.q, rows, at)
        residual = _residual(p, q, self.x[rows, at], self.scale[rows, n])
        mass = residual.sum(-1, keepdim=True)
        # mass is 0 after a rejection only because of rounding
        return torch.where(rejected[:, None] & (mass > 0), residual.div_(mass), p)


Rule = Callable[[Tensor, Tensor | None, Tensor, Tensor], Outcome]


def verify_without_draft(p: Tensor, q: Tensor | None, x: Tensor, lengths: Tensor) -> Outcome:
    """Return the outcome for blocks without draft tokens, in few operations. All rules have this
    outcome: the next token has distribution p."""
    one = torch.ones(len(x), 1, dtype=torch.float64, device=x.device)
    return Outcome(one[:, :0], p, q, x, lengths, one)


def speculative(p: Tensor, q: Tensor | None, x: Tensor, lengths: Tensor) -> Outcome:
    """Algorithm 1: accept draft token i with probability min(1, p(x_i)/q(x_i)), stop at the first
    rejection."""
    if not x.shape[1]:
        return verify_without_draft(p, q, x, lengths)
    px, qx = _gather_probabilities(p[:, : x.shape[1]], x), _gather_probabilities(q, x)
    accept = torch.where(qx > 0, torch.minimum(px, qx) / qx.where(qx > 0, 1.0), 0.0)
    survival = accept.where(find_drafted(x, lengths), 0.0).cumprod(1)
    return Outcome(survival, p, q, x, lengths, survival.new_ones(len(x), x.shape[1] + 1))


def block(p: Tensor, q: Tensor | None, x: Tensor, lengths: Tensor) -> Outcome:
    """Block verification (Sun et al. 2025, arXiv 2403.10444): verify the draft tokens of a block
    jointly.

    On average this rule accepts at least as many draft tokens as `speculative`; outputs have the
    same distribution with both rules.
    """
    G = x.shape[1]
    if not G:
        return verify_without_draft(p, q, x, lengths)
    px, qx = _gather_probabilities(p[:, :G], x), _gather_probabilities(q, x)
    qx = qx.where(qx > 0, torch.inf)  # a draft token of probability 0 under q is rejected
    a = [px.new_ones(len(x))]  # a_i = min(1, a_{i-1} p(x_i)/q(x_i))
    for pxi, qxi in zip(px.unbind(1), qx.unbind(1), strict=True):
        a.append((a[-1] * pxi / qxi).clamp(max=1.0))
    weight = torch.stack(a, 1)  # [B, G+1]
    h = _stop_probabilities(p, q, x, weight)
    last = torch.arange(1, G + 1, device=x.device) == lengths[:, None]
    h = torch.where(last, weight[:, 1:], h).where(find_drafted(x, lengths), 0.0)
    survival = 1 - (1 - h).flip(1).cumprod(1).flip(1)  # P(n > i) = 1 - prod_{j >= i} (1 - h_j)
    return Outcome(survival, p, q, x, lengths, weight)


def _stop_probabilities(p: Tensor, q: Tensor | None, x: Tensor, weight: Tensor) -> Tensor:
    """Return h_i = S_i / (S_i + 1 - a_i) of block verification for i = 1..G, `[B, G]`; S_i is the
    mass of (a_i p - q)+ at the next draft token."""
    G = x.shape[1]
    if not G:
        return weight[:, 1:]
    a = weight[:, 1:G]
    following = None if q is None else q[:, 1:]
    S = _residual(p[:, 1:-1], following, x[:, 1:], a).sum(-1).double()
    rest = S + (1 - a)  # in this order, rounding cannot make it less than S
    h = torch.where(rest > 0, S / rest.where(rest > 0, 1.0), 1.0)
    return torch.cat([h, weight[:, G:]], 1)


def _residual(p: Tensor, q: Tensor | None, x: Tensor, a: Tensor) -> Tensor:
    """Return (a p - q)+, `[..., V]`, for p, q `[..., V]` and x, a `[...]`. q None: one-hot on x."""
    residual = p * a[..., None].to(p.dtype)
    if q is None:
        return residual.scatter_(-1, x[..., None], 0.0)
    return residual.sub_(q).clamp_(min=0)


def _pick_rows(distributions: Tensor, rows: Tensor, i: Tensor) -> Tensor:
    """Return `distributions[rows, i]`, `[n, V]`, in a tenth of the time of torch's indexing."""
    return distributions.flatten(0, 1).index_select(0, rows * distributions.shape[1] + i)


def count_greedy(best: Tensor, x: Tensor, lengths: Tensor) -> Tensor:
    """Return n, `[B]`, at temperature 0 for any rule: the number of draft tokens before the first
    draft token that differs from the argmax ids `best [B, G+1]`."""
    return count_leading(best[:, : x.shape[1]] == x, lengths)


def count_leading(accepted: Tensor, lengths: Tensor) -> Tensor:
    """Return n, `[B]`: the number of draft tokens before the first False in `accepted [B, G]`."""
    return (accepted & find_drafted(accepted, lengths)).long().cumprod(1).sum(1)


def overlap(p: Tensor, q: Tensor | None, x: Tensor) -> Tensor:
    """Return beta at every draft token, `[B, G]`: the sum of min(p, q) over the vocabulary (Theorem
    3.5)."""
    if not x.shape[1]:
        return p.new_empty(x.shape, dtype=torch.float64)
    p = p[:, : x.shape[1]]
    if q is None:
        return _gather_probabilities(p, x)
    return torch.minimum(p, q).sum(-1).double().clamp(max=1.0)  # rounding can exceed 1


def overlap_greedy(best: Tensor, q: Tensor | None, x: Tensor) -> Tensor:
    """Return beta at temperature 0, `[B, G]`: p is one-hot on `best [B, G+1]`."""
    best = best[:, : x.shape[1]]
    return (best == x).double() if q is None else _gather_probabilities(q, best)


EXACT_RULES: dict[str, Rule] = {"speculative": speculative, "block": block}


def _gather_probabilities(distribution: Tensor | None, x: Tensor) -> Tensor:
    """Return the probability of each draft token in x, `[B, G]` in float64; 1 if `distribution` is
    None, which means one-hot on x."""
    if distribution is None:
        return torch.ones(x.shape, dtype=torch.float64, device=x.device)
    return distribution.gather(2, x[..., None]).squeeze(2).double()


def find_drafted(x: Tensor, lengths: Tensor) -> Tensor:
    """Return a mask `[B, G]`: True at draft tokens of x `[B, G]`, False at padding."""
    return torch.arange(x.shape[1], device=x.device) < lengths[:, None]
