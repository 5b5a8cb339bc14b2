"""Turn logits into a distribution, and sample tokens from it (paper, section 2.2).

Drafting, verification, the next token and plain decoding all use `probabilities`, and therefore the
same distribution. All sampling by an inverted CDF uses `locate`, which turns one number in [0, 1)
into one token.
"""
# torch does not annotate from_numpy() and tolist()
# pyright: reportUnknownMemberType=false

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import chain
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from foretoken.errors import NumericsError
from foretoken.kernels import tokens
from foretoken.sampling.params import SamplingParams, WarpingParams

EXTRA_WARPERS_OFF = SamplingParams(1.0).standard[4:]  # typical, epsilon, eta: not in the kernels


def probabilities(logits: Tensor, params: SamplingParams) -> Tensor:
    """Return the distribution that a token is sampled from, `[..., V]` in float32 or float64.

    For greedy params, the distribution is one-hot on the argmax. On ties, which the paper does not
    mention, the argmax is the lowest id.
    """
    if params.greedy:
        return one_hot(argmax_ids(logits), logits.shape[-1]).to(get_working_dtype(logits.dtype))
    logits, standard = logits.to(get_working_dtype(logits.dtype)), params.standard
    if tokens.can_compute(logits) and standard[4:] == EXTRA_WARPERS_OFF:
        return tokens.softmax(logits, *standard[:4])
    return warp_logits(logits, standard).softmax(-1)


def warp_logits(logits: Tensor, params: WarpingParams) -> Tensor:
    """Return the scores whose softmax is the distribution, with -inf for probability 0.
    Temperature, top-k, top-p, min-p, typical, epsilon and eta are applied in this order, as in
    transformers. Temperature 0 is not supported."""
    scores = logits.to(get_working_dtype(logits.dtype))
    if params.temperature != 1:
        scores = scores / params.temperature
    if params.top_k:
        scores = _top_k(scores, params.top_k)
    if params.top_p < 1:
        scores = _top_p(scores, params.top_p)
    if params.min_p > 0:
        scores = _min_p(scores, params.min_p)
    if params.typical_p < 1:
        scores = _typical(scores, params.typical_p)
    if params.epsilon_cutoff:
        scores = _drop_below(scores, scores.softmax(-1), params.epsilon_cutoff)
    if params.eta_cutoff:
        scores = _eta(scores, params.eta_cutoff)
    return scores


def warp_by_tensors(logits: Tensor, filters: Tensor, *, ranked: bool) -> Tensor:
    """Do as `warp_logits`, but with the numbers in a tensor on the logits' device, so that a
    recorded CUDA graph is valid for any numbers. No operation waits for the device, and no shape
    depends on the numbers.

    filters: `[B, 4]` in float64, for logits `[B, V]`: temperature, top-k, top-p and min-p of each
    row. ranked: False if no row uses top-k or top-p, which need sorted scores.
    """
    scores, V = logits.to(get_working_dtype(logits.dtype)), logits.shape[-1]
    temperature, top_k, top_p, min_p = filters[..., None].unbind(1)
    scores = scores / temperature.to(scores.dtype)
    if ranked:
        ordered = scores.sort(-1).values
        num_dropped = torch.where(top_k > 0, V - top_k, 0).clamp(min=0)
        edge = ordered.gather(-1, num_dropped.long())
        scores, ordered = (_mask_out(x, x < edge) for x in (scores, ordered))
        scores = _drop_mass(scores, ordered, (1 - top_p).to(scores.dtype))
    return _min_p(scores, min_p.to(scores.dtype))


def compute_row_probabilities(logits: Tensor, params: Sequence[SamplingParams]) -> Tensor:
    """Return `probabilities` of logits `[B, ..., V]`, with separate params for each row."""
    first = params[0]
    if all(each is first or each.standard == first.standard for each in params):
        return probabilities(logits, first)
    alike: dict[WarpingParams, list[int]] = {}
    for b, each in enumerate(params):
        alike.setdefault(each.standard, []).append(b)
    out = torch.empty(logits.shape, dtype=get_working_dtype(logits.dtype), device=logits.device)
    for rows in alike.values():
        out[rows] = probabilities(logits[rows], params[rows[0]])
    return out


def argmax_ids(logits: Tensor) -> Tensor:
    """Return the argmax of `[..., V]`, the lowest id on ties."""
    if logits.is_cpu:  # NumPy needs 2 us for V = 32,000, torch 50
        return torch.as_tensor(as_array(logits).argmax(-1))
    return logits.argmax(-1)


def find_peaks(logits: Tensor, V: int | None = None) -> tuple[list[list[int]], list[list[float]]]:
    """Return the argmax ids of logits `[B, n, ..]` among the first V ids, and the logits of these
    ids, as lists on the host. The logit of an argmax id is NaN or infinite exactly if the logits of
    its position are invalid, so no second pass over all logits is needed to check them."""
    scores = as_array(logits)[..., :V]
    best = cast(list[list[int]], scores.argmax(-1).tolist())  # the first NaN, if there is one
    rows = zip(scores, best, strict=True)
    return best, [[float(row[i, x]) for i, x in enumerate(ids)] for row, ids in rows]


def as_array(tensor: Tensor) -> NDArray[Any]:
    """Return a CPU tensor as a NumPy array, in float64 if that is its dtype, else in float32."""
    return (tensor if tensor.dtype in (torch.float32, torch.float64) else tensor.float()).numpy()


def one_hot(ids: Tensor, V: int) -> Tensor:
    """Return one-hot distributions on `ids [...]`, `[..., V]` in float32."""
    return torch.zeros(*ids.shape, V, device=ids.device).scatter_(-1, ids[..., None], 1.0)


def compute_cdf(distributions: Tensor) -> Tensor:
    """Return the CDF that `sample` inverts, `[B, V]` in float64."""
    return distributions.to(torch.float64, copy=True).cumsum_(-1)  # in place: fresh memory is slow


def sample(distributions: Tensor, uniforms: Tensor, cdf: Tensor | None = None) -> Tensor:
    """Sample one id per row of `distributions [B, V]`: invert the CDF in float64 at one number in
    [0, 1) per row. Return the ids, `[B]`.

    An id of probability 0 is never returned, in spite of rounding. Raises NumericsError for an
    invalid distribution. cdf: the result of `compute_cdf`, which takes most of the time; None:
    computed here.
    """
    ids, masses = locate(distributions, uniforms, cdf)
    require_mass(_to_floats(masses))
    return ids


def locate(
    distributions: Tensor, uniforms: Tensor, cdf: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Return ids as `sample` does, and the total probability of each distribution, `[B]` each. The
    caller passes the total probabilities to `require_mass`: a check here would make the host wait
    for the device. For an invalid distribution, any id may be returned."""
    if cdf is None and tokens.can_compute(distributions):
        return tokens.draw(distributions, uniforms)
    if distributions.is_cpu:
        return _locate_on_host(distributions, uniforms, cdf)
    return locate_on_device(distributions, uniforms, cdf)


def locate_on_device(
    distributions: Tensor, uniforms: Tensor, cdf: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Do as `locate` by operations that a CUDA graph can contain."""
    cdf = compute_cdf(distributions) if cdf is None else cdf
    total = cdf[:, -1:].clone()  # a view would keep the whole CDF in memory
    mark = uniforms.to(cdf)[:, None] * total
    mark = mark.minimum(total.nextafter(torch.zeros_like(total)))
    ids = find_possible(distributions, torch.searchsorted(cdf, mark, right=True))
    return ids.squeeze(-1), total.squeeze(-1)


def _locate_on_host(
    distributions: Tensor, uniforms: Tensor, cdf: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Do as `locate` for CPU tensors. For small batches, NumPy on one row at a time takes a tenth
    of the time that torch takes."""
    rows, V = as_array(distributions), distributions.shape[-1]
    found: list[tuple[int, float]] = []
    for b, u in enumerate(cast(list[float], uniforms.tolist())):
        sums = rows[b].cumsum(dtype=np.float64) if cdf is None else cdf[b].numpy()
        total = float(sums[-1])
        # The sum does not grow at an id of probability 0, so "right" never finds such an id if the
        # mark is below the total
        mark = min(u * total, math.nextafter(total, 0.0))
        found.append((min(int(sums.searchsorted(mark, "right")), V - 1), total))
    ids, masses = zip(*found, strict=True) if found else ((), ())
    return torch.from_numpy(np.array(ids, np.int64)), torch.from_numpy(np.array(masses, np.float64))


def find_possible(distributions: Tensor, ids: Tensor) -> Tensor:
    """Return, for each of `ids [B, 1]`, the highest id that is not above it and has a probability
    above 0 in `distributions [B, V]`; if there is none, the lowest id with a probability above
    0."""
    V = distributions.shape[-1]
    every = torch.arange(V, device=distributions.device)
    key = torch.where(every <= ids, every, -1 - every)  # the maximum is the id to return
    best = torch.where(distributions > 0, key, -V).amax(-1, keepdim=True)
    return torch.where(best < 0, -1 - best, best)


def require_mass(masses: list[float]) -> None:
    """Raise NumericsError if a total probability is 0, infinite or NaN: then a distribution from
    which a token was sampled is invalid."""
    if not all(0 < mass < math.inf for mass in masses):
        raise NumericsError(
            "a distribution to sample from has no mass or holds NaN; check the logits or q"
        )


def require_valid_logits(logits: Tensor, whose: str, starts: list[int], counts: list[int]) -> None:
    """Raise NumericsError for invalid `logits [B, n, V]`: NaN, +inf, or nothing but -inf.

    Only the first `counts[b]` positions of row b are checked. Position 0 of row b is position
    `starts[b]` of the sequence. whose: "target" or "draft", for the message.
    """
    require_finite(cast(list[list[float]], logits.amax(-1).tolist()), whose, starts, counts)


def require_finite(
    tops: list[list[float]],
    whose: str,
    starts: list[int],
    counts: list[int],
    places: Sequence[int] | None = None,
) -> None:
    """Do as `require_valid_logits`, given the largest logit of each position in `tops`. This logit
    is NaN or infinite exactly if the logits of the position are invalid. places: for the message,
    the row of each sequence in the batch; None: 0, 1, ..."""
    if all(map(math.isfinite, chain.from_iterable(tops))):
        return
    for b, (row, count) in enumerate(zip(places or range(len(counts)), counts, strict=True)):
        for i, top in enumerate(tops[b][:count]):
            if not math.isfinite(top):
                raise make_invalid_error(top, whose, starts[b] + i, row)


def make_invalid_error(top: float, whose: str, position: int, row: int) -> NumericsError:
    """Return the error for logits with maximum `top`, at a position of sequence `row`."""
    kind = "NaN" if math.isnan(top) else "+inf" if top > 0 else "nothing but -inf"
    return NumericsError(
        f"the {whose}'s logits hold {kind} at position {position} of row {row}; "
        "try dtype='float32', and check the model for overflow",
        row,
        whose,
    )


def mask_invalid(logits: Tensor) -> tuple[Tensor, Tensor]:
    """Return `logits [..., V]` with zeros at positions with invalid logits, and the largest logit
    of each position before the replacement, `[...]`. The step later decides from the largest logits
    whether the invalid positions are an error."""
    tops = _max_logits(as_array(logits)) if logits.is_cpu else logits.amax(-1)
    if is_known_finite(tops):
        return logits, tops
    return torch.where(torch.isfinite(tops)[..., None], logits, 0.0), tops


def _max_logits(scores: NDArray[Any]) -> Tensor:
    """Return the largest score of each position, or NaN if one of its scores is NaN. NumPy's
    argmax, used here, takes a tenth of the time of NumPy's max."""
    flat = scores.reshape(-1, scores.shape[-1])
    tops = [row[i] for row, i in zip(flat, flat.argmax(-1).tolist(), strict=True)]
    return torch.from_numpy(np.array(tops, scores.dtype).reshape(scores.shape[:-1]))


def is_known_finite(tops: Tensor) -> bool:
    """Return whether all of `tops` are finite and on the host. On a device, return False, because
    reading `tops` would make the host wait."""
    # a list is faster than an array operation on a few numbers
    return tops.is_cpu and all(map(math.isfinite, _to_floats(tops.flatten())))


def _top_k(scores: Tensor, k: int) -> Tensor:
    edge = _sort_ascending(scores, min(k, scores.shape[-1]))[..., :1]
    return _mask_out(scores, scores < edge)


def _top_p(scores: Tensor, top_p: float) -> Tensor:
    """Mask out the lowest scores, up to a total probability of 1 - top_p. Among equal scores,
    scores of lower ids are masked out first. The highest score is never masked out."""
    ordered = _sort_ascending(scores, scores.shape[-1])
    return _drop_mass(scores, ordered, torch.full_like(ordered[..., :1], 1 - top_p))


def _drop_mass(scores: Tensor, ordered: Tensor, limit: Tensor) -> Tensor:
    """Mask out the lowest scores, up to a total probability of `limit [..., 1]`. `ordered`: the
    scores in ascending order."""
    edge, tied = _find_top_p_edge(ordered, limit)
    return _mask_out(scores, (scores < edge) | _keep_first(scores == edge, tied))


def _find_top_p_edge(ordered: Tensor, limit: Tensor) -> tuple[Tensor, Tensor]:
    """Return the lowest score that is not masked out, and the number of ids with this score that
    are masked out, `[..., 1]` each."""
    mass = ordered.softmax(-1).cumsum(-1)
    count = torch.searchsorted(mass, limit, right=True).clamp(max=ordered.shape[-1] - 1)
    edge = ordered.gather(-1, count)
    return edge, count - torch.searchsorted(ordered, edge)


def _keep_first(mask: Tensor, count: Tensor) -> Tensor:
    """Return `mask [..., V]` with only its first `count [..., 1]` True entries."""
    return mask & (mask.cumsum(-1) <= count)


def _min_p(scores: Tensor, min_p: float | Tensor) -> Tensor:
    p = scores.softmax(-1)
    return _mask_out(scores, p < min_p * p.amax(-1, keepdim=True))


def _typical(scores: Tensor, mass: float) -> Tensor:
    """Keep the ids whose information content, -log p, is nearest to the entropy, up to a total
    probability of `mass` (Meister et al. 2023, arXiv 2202.00666)."""
    log_p = scores.log_softmax(-1)
    p = log_p.exp()
    entropy = -(log_p * p).nansum(-1, keepdim=True)
    apart = (-log_p - entropy).abs()
    ordered, places = apart.sort(-1)
    before = (p.gather(-1, places).cumsum(-1) < mass).sum(-1, keepdim=True)
    edge = ordered.gather(-1, before.clamp(max=scores.shape[-1] - 1))
    return _mask_out(scores, apart > edge)


def _eta(scores: Tensor, epsilon: float) -> Tensor:
    """Mask out ids of a probability below min(epsilon, sqrt(epsilon) exp(-entropy)) (Hewitt et al.
    2022, arXiv 2210.15191)."""
    log_p = scores.log_softmax(-1)
    p = log_p.exp()
    entropy = -(log_p * p).nansum(-1, keepdim=True)
    return _drop_below(scores, p, (epsilon**0.5 * (-entropy).exp()).clamp(max=epsilon))


def _drop_below(scores: Tensor, p: Tensor, min_probability: Tensor | float) -> Tensor:
    """Mask out ids with a probability below `min_probability`, except the most probable ones."""
    return _mask_out(scores, (p < min_probability) & (scores < scores.amax(-1, keepdim=True)))


def _sort_ascending(scores: Tensor, k: int) -> Tensor:
    """Return the k largest scores in ascending order, `[..., k]`. NumPy sorts values 20 times as
    fast as torch sorts values with indices."""
    if not scores.is_cpu:
        return scores.topk(k).values.flip(-1)
    array = scores.numpy()
    if k < array.shape[-1]:
        array = np.partition(array, -k)[..., -k:]
    return torch.from_numpy(np.sort(array))


def _mask_out(scores: Tensor, drop: Tensor) -> Tensor:
    return scores.masked_fill(drop, -torch.inf)


def _to_floats(tensor: Tensor) -> list[float]:
    return cast(list[float], tensor.flatten().tolist())


def get_working_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which distributions of logits are computed."""
    return torch.float64 if dtype == torch.float64 else torch.float32
