"""The arithmetic of the native decoder, in NumPy, slow and simple. The kernels give exactly the
same bits with every instruction set.

`cpp/arithmetic.h` summarizes the arithmetic in ten lines.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

VECTOR_LANES, BLOCK_WEIGHTS, ATTENTION_BLOCK_POSITIONS = 16, 32, 128
MASS_BLOCK_IDS = 256  # size of the blocks of a distribution that are summed in float32
MAX_WEIGHT_SHARES = (1.0, 0.95, 0.9, 0.85, 0.8)  # see `round_weights`

Floats = NDArray[Any]  # of float32


def fma(a: Any, b: Any, c: Any) -> Floats:
    """Return a * b + c, rounded once to float32.

    The product of two float32 is exact in float64. The sum is rounded to odd in float64 (Boldo and
    Melquiond 2008), so that rounding it to float32 equals a single rounding.
    """
    a, b, c = (np.asarray(x, np.float32).astype(np.float64) for x in (a, b, c))
    product, shape = a * b, np.broadcast_shapes(a.shape, b.shape, c.shape)
    product, c = np.broadcast_to(product, shape), np.broadcast_to(c, shape)
    total = np.atleast_1d(product + c)
    part = total - product
    error = np.atleast_1d((product - (total - part)) + (c - part))  # Knuth's two-sum: exact
    bits = total.view(np.int64)
    inexact = np.isfinite(total) & (error != 0) & (bits & 1 == 0)
    towards = np.where((error > 0) == (total > 0), 1, -1)  # a larger or a smaller magnitude
    bits = np.where(inexact, bits + towards, bits)
    return bits.view(np.float64).astype(np.float32).reshape(shape)


def sum_lanes(x: Floats) -> Floats:
    """Return the sums of vectors `[..., 16]`, added in the kernels' order: the upper half is added
    to the lower half until one number is left."""
    for n in (8, 4, 2, 1):
        x = x[..., :n] + x[..., n : 2 * n]
    return x[..., 0]


def split_into_vectors(x: Floats) -> Floats:
    """Return `[..., n]` as vectors of 16, `[..., vectors, 16]`, padded with zeros."""
    return pad_to_multiple(x, VECTOR_LANES).reshape(*x.shape[:-1], -1, VECTOR_LANES)


def pad_to_multiple(x: Any, multiple: int) -> Any:
    """Return `[..., n]`, padded with zeros to a multiple of `multiple`."""
    width = -x.shape[-1] % multiple
    return np.concatenate([x, np.zeros((*x.shape[:-1], width), x.dtype)], -1)


def round_states(x: Floats) -> tuple[Any, Floats, Floats, Any]:
    """Round states `[n, K]` to int8 in blocks of 32. Returns the integers q, `[n, K]`; the scale d
    of each block, `[n, blocks]`; d times the sum of q over each block, `[n, blocks]`; and the sum
    of q over each half block of 16."""
    blocks = pad_to_multiple(x, BLOCK_WEIGHTS).reshape(len(x), -1, BLOCK_WEIGHTS)
    bits = (blocks.view(np.int32) & 0x7FFFFFFF).max(-1)
    largest = bits.view(np.float32)
    with np.errstate(all="ignore"):
        inverse = np.float32(127) / largest
        finite, large = bits < 0x7F800000, np.isfinite(inverse)
        scalable = finite & large
        scaled = np.where(
            scalable[..., None], blocks * np.where(scalable, inverse, 0)[..., None], 0
        )
        q = np.rint(scaled).astype(np.int8)
        d = np.where(scalable, largest / np.float32(127), np.where(finite, 0, np.nan)).astype(
            np.float32
        )
    z = q.reshape(len(x), -1, BLOCK_WEIGHTS // 2).sum(-1, dtype=np.int32)
    with np.errstate(all="ignore"):
        s = np.where(finite, d * (z[:, ::2] + z[:, 1::2]).astype(np.float32), d)
    return q.reshape(len(x), -1), d, s.astype(np.float32), z


def round_weights(blocks: Floats) -> tuple[NDArray[np.int8], NDArray[np.float16]]:
    """Round weights `[n, 32]` to integers from -8 to 7. Returns the integers and scales `[n, 1]`.

    For each share in MAX_WEIGHT_SHARES, the integers are computed with a scale that maps this share
    of the block's largest weight to -8, and then the scale is fitted to the integers by least
    squares. The share with the least squared error is used.
    """
    peak = np.take_along_axis(blocks, np.abs(blocks).argmax(1, keepdims=True), 1)
    best: tuple[Any, ...] = ()
    for share in MAX_WEIGHT_SHARES:
        first = -np.where(peak == 0, 1, peak) * (share / 8)
        k = np.clip(np.rint(blocks / first), -8, 7)
        squares = (k * k).sum(1, keepdims=True)
        scale = (blocks * k).sum(1, keepdims=True) / np.maximum(squares, 1)
        scale = scale.astype(np.float16)
        error = ((blocks - scale.astype(np.float32) * k) ** 2).sum(1, keepdims=True)
        new = error, k, scale
        better = error < best[0] if best else np.full_like(error, True, bool)
        best = tuple(np.where(better, x, y) for x, y in zip(new, best or new, strict=True))
    return best[1].astype(np.int8), best[2]


def multiply_levels(factors: Any, supers: Any) -> Floats:
    """Return scales (or offsets) that are stored in two levels: the int8 factor of each block,
    `[N, blocks]`, times the float16 number of its super-block, `[N, super-blocks]`. The products
    are exact in float32."""
    each = np.repeat(supers.astype(np.float32), factors.shape[1] // supers.shape[1], axis=1)
    return factors.astype(np.float32) * each


def multiply_integers(q: Any, scales: Floats, offsets: Floats | None, x: Floats) -> Floats:
    """Return the product `[n, N]` of states `[n, K]` and quantized weights `[N, K]`. Each weight is
    scale * q + offset; a block of 32 or 16 weights has the same scale and offset."""
    states, d, s, z = round_states(x)
    y = np.zeros((len(x), len(q)), np.float32)
    size = BLOCK_WEIGHTS // (2 if scales.shape[1] > d.shape[1] else 1)
    weights = pad_to_multiple(q, BLOCK_WEIGHTS).astype(np.int32)
    with np.errstate(all="ignore"):
        for b in range(scales.shape[1]):
            part, block = slice(b * size, (b + 1) * size), b * size // BLOCK_WEIGHTS
            sums = states[:, part].astype(np.int32) @ weights[:, part].T
            y = fma(sums.astype(np.float32), scales[:, b] * d[:, block, None], y)
            if offsets is not None:
                added = (
                    s[:, b] if size == BLOCK_WEIGHTS else d[:, block] * z[:, b].astype(np.float32)
                )
                y = fma(offsets[:, b], added[:, None], y)
    return y


def multiply_floats(w: Floats, x: Floats) -> Floats:
    """Return the product `[n, N]` of states `[n, K]` and float weights `[N, K]`."""
    y = np.zeros((len(x), len(w)), np.float32)
    for k in range(w.shape[1]):
        y = fma(w[:, k], x[:, k, None], y)
    return y


def exponential(x: Floats) -> Floats:
    """Return exp(x), with x clamped to [-87, 88]."""
    x = np.where(np.isnan(x), x, np.clip(x, np.float32(-87), np.float32(88)))
    with np.errstate(all="ignore"):
        r = np.rint(x * np.float32(1.44269504)).astype(np.float32)
        rest = fma(r, -1.42860677e-6, fma(r, -0.693145752, x))
        p = np.full_like(x, 1.98756912e-4)
        for factor in (1.39819994e-3, 8.33345186e-3, 4.16657962e-2, 1.66666657e-1, 0.5):
            p = fma(p, rest, factor)
        p = fma(p * rest, rest, rest)
        power = np.where(np.isnan(r), 1, np.ldexp(np.float32(1), np.nan_to_num(r).astype(int)))
        return ((p + np.float32(1)) * power.astype(np.float32)).astype(np.float32)


def softplus(x: Floats) -> Floats:
    """Return log(1 + exp(x)), computed by the series of artanh."""
    y = exponential(np.float32(0) - np.abs(x))
    z = y / (np.float32(2) + y)
    p, squared = np.full_like(x, 0.0769230769), z * z
    for factor in (0.0909090909, 0.111111111, 0.142857143, 0.2, 0.333333333, 1.0):
        p = fma(p, squared, factor)
    return np.where(x > 0, x, np.float32(0)) + (z + z) * p


def sigmoid(x: Floats) -> Floats:
    """Return 1 / (1 + exp(-x))."""
    return np.float32(1) / (np.float32(1) + exponential(np.float32(0) - x))


def tangent(x: Floats) -> Floats:
    """Return tanh(x)."""
    return np.float32(1) - np.float32(2) / (np.float32(1) + exponential(x + x))


def error_function(x: Floats) -> Floats:
    """Return erf(x), computed by formula 7.1.26 of Abramowitz and Stegun."""
    t = np.float32(1) / fma(0.3275911, np.abs(x), 1)
    p = np.full_like(x, 1.061405429)
    for factor in (-1.453152027, 1.421413741, -0.284496736, 0.254829592):
        p = fma(p, t, factor)
    tail = (p * t) * exponential(np.float32(0) - x * x)
    rest = np.float32(1) - tail
    return np.copysign(np.where(rest > 0, rest, np.where(np.isnan(rest), rest, 0)), x)


def activate(name: str, x: Floats, curve: Floats) -> Floats:
    """Return the activation called `name` of x. curve: the factors of squares, exponentials and x
    for "xielu"; the slope and the limit for "clamped"."""
    one, half = np.float32(1), np.float32(0.5)
    with np.errstate(all="ignore"):
        match name:
            case "silu":
                return x * sigmoid(x)
            case "gelu":
                return (half * x) * (one + error_function(x * np.float32(0.707106781)))
            case "gelu_tanh":
                inner = np.float32(0.797884561) * fma(0.044715, (x * x) * x, x)
                return (half * x) * (one + tangent(inner))
            case "relu":
                return np.where(x < 0, np.float32(0), x)
            case "relu_squared":
                positive = np.where(x < 0, np.float32(0), x)
                return positive * positive
            case "clamped":
                held = np.where(x < curve[1], x, np.float32(curve[1]))
                return held * sigmoid(np.float32(curve[0]) * held)
            case _:
                above, below = np.where(x < 0, np.float32(0), x), np.where(x > 0, np.float32(0), x)
                squares = fma(curve[0] * above, above, curve[2] * x)
                return fma(curve[1], (exponential(below) - one) - below, squares)


def normalize(x: Floats, weight: Floats, bias: Floats | None, epsilon: float, centred: bool) -> Any:
    """Return the LayerNorm (if `centred`) or RMSNorm of x, `[n, width]`."""
    n = np.float32(x.shape[-1])
    with np.errstate(all="ignore"):
        if centred:
            total = np.zeros((len(x), VECTOR_LANES), np.float32)
            for part in np.moveaxis(split_into_vectors(x), 1, 0):
                total = total + part
            x = x - (sum_lanes(total) / n)[:, None]
        squares = np.zeros((len(x), VECTOR_LANES), np.float32)
        for part in np.moveaxis(split_into_vectors(x), 1, 0):
            squares = fma(part, part, squares)
        root = np.sqrt(sum_lanes(squares) / n + np.float32(epsilon)).astype(np.float32)
        y = (x * (np.float32(1) / root)[:, None]) * weight
        return y if bias is None else y + bias


def attention(
    x: Floats,
    keys: Floats,
    values: Floats,
    at: int,
    window: int = 0,
    cap: float = 0,
    slopes: Floats | None = None,
    sinks: Floats | None = None,
    biases: Floats | None = None,
    *,
    attend_to_all: bool = False,
    window_at: int | None = None,
    kept_blocks: tuple[int, int] | None = None,
) -> Floats:
    """Return the attention of one key head for the token at position `at`. x: the scaled queries of
    that token, `[G, D]`. keys, values: `[positions, D]`. Softmax is computed in blocks of 128
    positions, each with its own maximum; then the blocks are combined.

    biases: Added to the scores, `[G, positions]`. attend_to_all: If True, attention is not causal,
    as in encoders and in block drafts. window_at: The position that the window ends at; None:
    that of the token. kept_blocks: If not None, a token attends only to this many first blocks, and
    to this many last blocks, including its own block.
    """
    begin = max(0, (at if window_at is None else window_at) - window + 1) if window else 0
    end = len(keys) if attend_to_all else at + 1
    maximum: Any = None
    total: Any = None
    result: Any = None
    for start in range(
        begin // ATTENTION_BLOCK_POSITIONS * ATTENTION_BLOCK_POSITIONS,
        end,
        ATTENTION_BLOCK_POSITIONS,
    ):
        first, last = max(begin, start), min(end, start + ATTENTION_BLOCK_POSITIONS)
        block, own_block = start // ATTENTION_BLOCK_POSITIONS, at // ATTENTION_BLOCK_POSITIONS
        if kept_blocks and kept_blocks[0] <= block <= own_block - kept_blocks[1]:
            continue
        scores = np.zeros((len(x), last - first), np.float32)
        for d in range(x.shape[1]):
            scores = fma(x[:, d, None], keys[first:last, d], scores)
        if cap:
            scores = np.float32(cap) * tangent(scores / np.float32(cap))
        if slopes is not None:
            distance = np.arange(first - at, last - at, dtype=np.float32)
            scores = fma(slopes[:, None], distance, scores)
        if biases is not None:
            scores = scores + biases[:, first:last]
        highest = scores.max(-1)
        weights = exponential(scores - highest[:, None])
        before = np.zeros((len(x), first % VECTOR_LANES), np.float32)
        added = np.zeros((len(x), VECTOR_LANES), np.float32)
        for part in np.moveaxis(split_into_vectors(np.concatenate([before, weights], 1)), 1, 0):
            added = added + part
        sums, summed = sum_lanes(added), np.zeros_like(x)
        for j in range(last - first):
            summed = fma(weights[:, j, None], values[first + j], summed)
        if maximum is None:
            maximum, total, result = highest, sums, summed
            continue
        joined = np.maximum(maximum, highest)
        old, new = exponential(maximum - joined), exponential(highest - joined)
        maximum, total = joined, fma(sums, new, total * old)
        result = fma(summed, new[:, None], result * old[:, None])
    factor = np.ones_like(maximum)
    if sinks is not None:
        joined = np.maximum(maximum, sinks)
        factor = exponential(maximum - joined)
        total = fma(total, factor, exponential(sinks - joined))
    return result * (factor / total)[:, None]


def convolution(x: Floats, filters: Floats, bias: Floats | None) -> Floats:
    """Return the causal convolution of states `[n, channels]` with filters `[taps, channels]`, for
    each channel separately. The last tap is applied to the token itself."""
    y = np.zeros_like(x) if bias is None else np.broadcast_to(bias, x.shape).copy()
    for tap, weight in enumerate(filters):
        back = len(filters) - 1 - tap
        y[back:] = fma(weight, x[: max(0, len(x) - back)], y[back:])
    return y


def apply_block_convolution(x: Floats, base: Floats, deltas: Floats) -> Floats:
    """Return the convolution of a block's states `[n, width]`, whose filters depend on the token:
    base `[taps, width]` plus deltas `[n, taps, groups]`. The first tap is applied to the token
    itself."""
    y, group = np.zeros_like(x), x.shape[1] // deltas.shape[2]
    for tap, weight in enumerate(base[: len(x)]):
        factors = weight + np.repeat(deltas[tap:, tap], group, axis=1)
        y[tap:] = fma(factors, x[: len(x) - tap], y[tap:])
    return y


def normalize_length(x: Floats, scale: float) -> Floats:
    """Return vectors `[.., width]`, each divided by its L2 norm and multiplied by `scale`."""
    squares = np.zeros((*x.shape[:-1], VECTOR_LANES), np.float32)
    for part in np.moveaxis(split_into_vectors(x), -2, 0):
        squares = fma(part, part, squares)
    root = np.sqrt(sum_lanes(squares) + np.float32(1e-6)).astype(np.float32)
    return x * (np.float32(1) / root * np.float32(scale))[..., None]


def recurrence(
    q: Floats, k: Floats, v: Floats, decay: Floats, beta: Floats, *, delta: bool
) -> Floats:
    """Return the outputs o_t = S_t^T q_t of a recurrence over tokens `[n, heads, ..]`. The state is
    S_t = decay S_(t-1) + k u^T, with u = beta v, or with u = beta (v - decay S_(t-1)^T k) if
    `delta` (the delta rule, arXiv 2412.06464)."""
    S, made = np.zeros((*k.shape[1:], v.shape[2]), np.float32), np.zeros_like(v)
    for t in range(len(v)):
        u, fade = np.zeros_like(v[t]), decay[t, :, None]
        if delta:
            for d in range(k.shape[2]):
                u = fma(k[t, :, d, None], S[:, d], u)
        u = beta[t, :, None] * (v[t] - u * fade if delta else v[t])
        for d in range(k.shape[2]):
            S[:, d] = fma(k[t, :, d, None], u, S[:, d] * fade)
            made[t] = fma(q[t, :, d, None], S[:, d], made[t])
    return made


def sum_blocks(x: Floats) -> Floats:
    """Return the sums of x `[n, V]` over blocks of 256 ids, `[n, blocks]`."""
    blocks = -(-x.shape[-1] // MASS_BLOCK_IDS)
    parts = pad_to_multiple(x, MASS_BLOCK_IDS).reshape(
        len(x), blocks, MASS_BLOCK_IDS // VECTOR_LANES, VECTOR_LANES
    )
    total = np.zeros((len(x), parts.shape[1], VECTOR_LANES), np.float32)
    for part in np.moveaxis(parts, 2, 0):
        total = total + part
    return sum_lanes(total)


def sum_mass(x: Floats) -> Floats:
    """Return the sums of x `[n, V]` over all ids, `[n]`; sums of blocks are added in float64."""
    return sum_blocks(x).cumsum(-1, dtype=np.float64)[:, -1]


def softmax(
    x: Floats, temperature: float, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0
) -> Floats:
    """Return the distributions of logits `[n, V]` at a temperature, after top-k, top-p and min-p.
    Rows with NaN, with +inf, or with only -inf give NaN."""
    with np.errstate(all="ignore"):
        scores = x * (np.float32(1) / np.float32(temperature))
        shifted = scores - np.fmax.reduce(scores, -1, keepdims=True)
        weights = exponential(shifted) - exponential(np.full(1, -87, np.float32))
        for row, w in zip(x, weights, strict=True):
            if not np.isnan(w).any():
                w[~filter_ids(row, w, top_k, top_p, min_p)] = 0
        return weights * (1 / sum_mass(weights)).astype(np.float32)[:, None]


def filter_ids(x: Floats, w: Floats, top_k: int, top_p: float, min_p: float) -> Any:
    """Return a mask `[V]` of the ids that remain after top-k, top-p and min-p. x: logits `[V]`; w:
    masses `[V]`. If top-p cuts through ids of equal logits, the highest of these ids remain."""
    order, num_kept = np.lexsort((np.arange(len(x)), x))[::-1], len(x)
    total = float(sum_mass(w[None])[0])
    if 0 < top_k < len(x):
        num_kept = int((x >= x[order[top_k - 1]]).sum())
        total = float(w[order[:num_kept]].cumsum(dtype=np.float64)[-1])
    if top_p < 1:
        rest = total - w[order[:num_kept]].cumsum(dtype=np.float64)
        enough = rest <= (1 - top_p) * total
        num_kept = int(enough.argmax()) + 1 if enough.any() else num_kept
    stay = np.zeros(len(x), bool)
    stay[order[:num_kept]] = True
    return stay & (w >= np.float32(min_p))


def locate(p: Floats, u: float) -> tuple[int, float]:
    """Return the first id at which the cumulative sum of masses p `[V]` exceeds u times their
    total, and the total."""
    masses = sum_blocks(p[None])[0].astype(np.float64)
    sums = masses.cumsum()
    total = float(sums[-1])
    mark = min(u * total, np.nextafter(total, 0))
    block = int(sums.searchsorted(mark, "right"))
    inner = p[block * MASS_BLOCK_IDS : (block + 1) * MASS_BLOCK_IDS].cumsum(dtype=np.float64)
    mark = (mark - (sums[block - 1] if block else 0)) / masses[block] * inner[-1]
    mark = min(mark, np.nextafter(inner[-1], 0))
    return block * MASS_BLOCK_IDS + int(inner.searchsorted(mark, "right")), total


def residual(p: Floats, q: Floats | None, x: int, a: float) -> Floats:
    """Return max(0, a p - q), `[V]`. If q is None, the draft token x has probability 1 in q."""
    rest = p * np.float32(a)
    if q is None:
        rest[x] = 0
        return rest
    return np.maximum(rest - q, np.float32(0))


def compute_acceptance(
    rule: str, p: Floats, q: Floats | None, x: list[int]
) -> tuple[Any, list[float]]:
    """Return two lists for the acceptance method `rule`: the probability P(n > i) that draft token
    i is accepted, for each i; and the factor of p in the residual, for each number n of accepted
    tokens. p: `[G+1, V]`; q: `[G, V]`, or None if the draft tokens x `[G]` are certain."""
    G = len(x)
    px = [float(p[i, x[i]]) for i in range(G)]
    qx = [1.0 if q is None else float(q[i, x[i]]) for i in range(G)]
    if rule == "speculative":
        alone = [min(a, b) / b if b > 0 else 0.0 for a, b in zip(px, qx, strict=True)]
        return np.cumprod(alone), [1.0] * (G + 1)
    a = [1.0]
    for one, other in zip(px, qx, strict=True):
        a.append(min(1.0, a[-1] * one / other) if other > 0 else 0.0)
    h = a[G:][:G]  # empty if there are no draft tokens
    for i in range(G - 1, 0, -1):
        rest = residual(p[i], None if q is None else q[i], x[i], a[i])
        S = float(sum_mass(rest[None])[0])
        h.append(S / (S + (1 - a[i])) if S + (1 - a[i]) > 0 else 1.0)
    return (1 - np.cumprod(1 - np.array(h)))[::-1], a


def verify(
    rule: str, p: Floats, q: Floats | None, x: list[int], accept: float, following: float
) -> tuple[int, int, Any, float]:
    """Verify the draft tokens x of a sequence. Return the number of accepted tokens, the token
    after the accepted ones, the sum of min(p, q) at each draft token, and the mass of the
    distribution from which the token after the accepted ones was drawn."""
    survival, a = compute_acceptance(rule, p, q, x)
    n = int((accept < survival).sum())
    t, total = 0, 0.0
    if n < len(x):
        rest = residual(p[n], None if q is None else q[n], x[n], a[n])
        total = float(sum_mass(rest[None])[0])
        t = locate(rest, following)[0] if total > 0 else 0
    if not total > 0:
        t, total = locate(p[n], following)
    certain = [float(p[i, one]) for i, one in enumerate(x)]
    both = np.array(certain) if q is None else sum_mass(np.minimum(p[: len(x)], q))
    return n, t, np.minimum(both, 1), total
