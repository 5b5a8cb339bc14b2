"""What speculative sampling is compared with (appendix A.2, related work), under its own name.

Three kinds. Rules that keep the target's law and can be asked for by name, `match` and
`rejection`: exact like Algorithm 1, and never keeping more. The iterative rejection sampler, exact
too, but of another form: it decides one token and may need any number of draws. Blockwise parallel
decoding's criteria for temperature 0, of which only the exact match keeps the target's text. How
likely each keeps a guess: `theory.match_beta`, `theory.rejection_beta`. The other comparator,
Shallow Aggressive Decoding, is a drafter: `drafters.copying`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from foretoken.errors import InputError, RefusedError, whole
from foretoken.sampling.distributions import sample
from foretoken.sampling.verify import Outcome, Rule, leading, live, speculative

ROUNDING = 1e-2  # of the sum of a law, in the lowest precision


def match(p: Tensor, q: Tensor | None, x: Tensor, lengths: Tensor) -> Outcome:
    """Token matching ("sample and match"): y is drawn from p at every position, and guesses are
    kept as long as they equal it; the first y that does not comes after them.

    A guess is kept with probability p(x), sum p q on average, against sum min(p, q). That is
    Algorithm 1 told that every guess was certain: what y is like where it is not x is p off x.
    """
    return speculative(p, None, x, lengths)


def rejection(p: Tensor, q: Tensor | None, x: Tensor, lengths: Tensor) -> Outcome:
    """Rejection sampling with a single try: keep x with probability p(x) / (M q(x)), M = max p/q,
    and else draw from p itself (appendix A.2, "non-iterative").

    A guess is kept with probability 1/M = min q/p, whatever p and q have in common elsewhere:
    never where p gives something that q cannot, so never a guess that was certain unless p is too.
    """
    G = x.shape[1]
    if q is None:
        q = torch.zeros_like(p[:, :G]).scatter_(2, x[..., None], 1.0)
    at = x[..., None]
    px, qx = (law.gather(2, at).squeeze(2).double() for law in (p[:, :G], q))
    ratio = px / qx.where(qx > 0, torch.inf)  # a guess that q cannot make is not kept
    accept = (ratio * _least_ratio(p[:, :G], q)).clamp(max=1.0)
    survival = accept.where(live(x, lengths), 0.0).cumprod(1)
    nothing = q.new_zeros(1).expand(q.shape)  # is taken from p after a rejection
    return Outcome(survival, p, nothing, x, lengths, survival.new_ones(len(x), G + 1))


COMPARATORS: dict[str, Rule] = {"match": match, "rejection": rejection}


class Tried(NamedTuple):
    """A token, and how many draws from q it took."""

    token: int
    tries: int


def rejection_sample(p: Tensor, q: Tensor, uniforms: Iterator[float]) -> Tried:
    """Rejection sampling as it is usually meant: draw x from q until r < p(x) / (M q(x)) (appendix
    A.2). One token in the law p, by M = max p/q draws on average; p, q `[V]`.

    Two numbers in [0, 1) are taken from `uniforms` for every try. Raises RefusedError where p gives
    what q cannot: M is infinite, and no try would ever do; InputError for what is no law.
    """
    for name, law in (("p", p), ("q", q)):
        total = float(law.sum())
        if not (bool((law >= 0).all()) and abs(total - 1) < ROUNDING):
            raise InputError(f"{name} sums to {total}; give numbers of 0 or more that sum to 1")
    least = float(_least_ratio(p, q))
    if not least > 0:
        raise RefusedError("p gives a token that q cannot (M is infinite); give a q that covers p")
    tries = 0
    while True:
        tries += 1
        u, r = next(uniforms), next(uniforms)
        x = int(sample(q[None], torch.tensor([u], dtype=torch.float64)))
        if r * float(q[x]) < float(p[x]) * least:
            return Tried(x, tries)


def blockwise_top_k(logits: Tensor, x: Tensor, lengths: Tensor, k: int) -> Tensor:
    """Blockwise parallel decoding's looser criterion (Stern et al. 2018, arXiv 1811.03115, section
    5.1): n [B], the leading guesses that are each among the k likeliest of `logits [B, G+1, V]`,
    the lowest index first on ties.

    Not the target's text, but at k = 1, the exact match: that is `verify.greedy`. InputError where
    a guess is judged by NaN.
    """
    V = logits.shape[-1]
    if not whole(k) or not 1 <= k <= V:
        raise InputError(f"k is {k!r:.60}; give 1 to {V}, the number of tokens")
    scores, at = logits[:, : x.shape[1]], x[..., None]
    if bool((scores.isnan().any(-1) & live(x, lengths)).any()):
        raise InputError(
            "logits hold NaN, which has no place among the likeliest; look at the model"
        )
    own = scores.gather(2, at)
    ahead = (scores > own) | ((scores == own) & (torch.arange(V, device=x.device) < at))
    return leading(ahead.sum(-1) < k, lengths)


def blockwise_near(best: Tensor, x: Tensor, lengths: Tensor, distance: int) -> Tensor:
    """Its criterion for tokens that are quantities, such as brightness (section 5.2): n [B], the
    leading guesses within `distance` of the argmax `best [B, G+1]`. Not the target's output."""
    if distance < 0:
        raise InputError(f"distance is {distance}; give 0 (exact) or more")
    return leading((best[:, : x.shape[1]] - x).abs() <= distance, lengths)


def _least_ratio(p: Tensor, q: Tensor) -> Tensor:
    """1/M = min q/p over what p can give, `[...]` in float64."""
    ratio = torch.where(p > 0, q.double() / p.double(), torch.inf)
    return ratio.amin(-1).clamp(max=1.0)  # but for rounding
