"""Makes the kernels' `RecurrentMixer` from transformers' modules: short convolutions (LFM2), gated
delta rules (Qwen3-Next, Qwen3.5, OLMo hybrid) and Mamba2 (Granite 4, Bamba).

The outputs of the projections are, in this order: queries, keys, values and gates. In a layer
without a recurrence (LFM2), they are the two factors whose product is the convolution's input, then
gates. Each head is padded to a multiple of the width of the kernels' vectors.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
from torch import nn

from foretoken.models.native.network import (
    CONVOLUTION,
    DELTA,
    SCAN,
    Attention,
    Linear,
    RecurrentMixer,
    RowIndices,
    pad_head_rows,
    take_rows,
    to_float_array,
)
from foretoken.models.native.packing import LANES
from foretoken.models.quantized_blocks import Floats

if TYPE_CHECKING:
    from foretoken.models.native.network_reader import NetworkReader

MAX_CONVOLUTION_TAPS = 8  # the ring of a sequence's states has room for no more
MIXER_NAMES = "linear_attn", "conv", "mamba"


def read_recurrence(reader: NetworkReader, part: Any) -> RecurrentMixer:
    """Return a layer's short convolution and recurrence. Raises RefusedError for a kind that the
    kernels do not support."""
    convolution: Any = getattr(part, "conv1d", getattr(part, "conv", None))
    weight = convolution.weight
    taps = weight.shape[-1]
    plain = weight.shape[1] == 1 and convolution.stride == convolution.dilation == (1,)
    reader.require(plain and taps <= MAX_CONVOLUTION_TAPS, "a convolution of another kind")
    reader.read_weights |= {id(x) for x in convolution.parameters()}
    filters = to_float_array(weight)[:, 0]
    added = None if convolution.bias is None else to_float_array(convolution.bias)
    if not hasattr(part, "A_log"):
        return _read_convolution(reader, part, filters, added)
    return (_read_scan if hasattr(part, "D") else _read_delta_rule)(reader, part, filters, added)


def _read_convolution(
    reader: NetworkReader, part: Any, filters: Floats, bias: Floats | None
) -> RecurrentMixer:
    both, out = reader.read_linear(part.in_proj), reader.read_linear(part.out_proj)
    channels = len(filters)
    fits = len(both.weight) == 3 * channels == 3 * out.weight.shape[1] and channels % LANES == 0
    reader.require(fits, "a convolution of another shape")
    first, gate, second = np.split(np.arange(3 * channels), 3)
    projections = [both.select_outputs(np.concatenate([first, second, gate]))]
    width = next(n for n in (64, 32, 16) if channels % n == 0)
    heads = channels // width
    return RecurrentMixer(
        CONVOLUTION, projections, out, heads, width, np.ascontiguousarray(filters.T), bias, heads
    )


def _read_delta_rule(
    reader: NetworkReader, part: Any, filters: Floats, bias: Floats | None
) -> RecurrentMixer:
    key_heads, key_width = part.num_k_heads, part.head_k_dim
    heads, width = part.num_v_heads, part.head_v_dim
    known = part.activation == "silu" and heads % key_heads == 0
    reader.require(known, "a delta rule of another kind")
    values, n = pad_head_rows(heads, width), key_heads * key_width
    keys = [pad_head_rows(key_heads, key_width, start) for start in (0, n)]
    order = np.concatenate([*keys, pad_head_rows(heads, width, 2 * n)])
    if hasattr(part, "in_proj_qkvz"):
        projections, steps = _split_by_key_head(reader, part)
    else:
        names = ("in_proj_qkv",) if hasattr(part, "in_proj_qkv") else ("q_proj", "k_proj", "v_proj")
        parts = [reader.read_linear(getattr(part, name)) for name in names]
        gate = reader.read_linear(getattr(part, "in_proj_z", getattr(part, "g_proj", None)))
        projections = [parts[0].concatenate(parts[1:]), gate]
        named = [getattr(part, f"in_proj_{x}", getattr(part, f"{x}_proj", None)) for x in "ab"]
        steps = [reader.read_linear(one) for one in named]
    norm: Any = getattr(part, "norm", getattr(part, "o_norm", None))
    out = reader.read_linear(getattr(part, "out_proj", getattr(part, "o_proj", None)))
    decay, step_bias = _read_decays(reader, part)
    reader.read_weights.add(id(norm.weight))
    decays, beta = (one.select_outputs(pad_head_rows(1, heads)) for one in steps)
    return RecurrentMixer(
        DELTA,
        [projections[0].select_outputs(order), projections[1].select_outputs(values)],
        out.select_inputs(values),
        heads,
        width + -width % LANES,
        np.ascontiguousarray(take_rows(filters, order).T),
        None if bias is None else take_rows(bias, order),
        key_heads,
        key_width,
        decays.concatenate([beta]),
        decay,
        step_bias,
        norm=np.tile(np.pad(to_float_array(norm.weight), (0, -width % LANES)), heads),
        groups=heads,
        count=width,
        epsilon=norm.variance_epsilon,
        beta_scale=2.0 if getattr(part, "allow_neg_eigval", False) else 1.0,
    )


def _split_by_key_head(reader: NetworkReader, part: Any) -> tuple[list[Linear], list[Linear]]:
    """Return Qwen3-Next's projections, and the linear layers of its decays and betas, with rows in
    the kernels' order. In the model's fused weights, rows are grouped by key head."""
    key_heads, key_width = part.num_k_heads, part.head_k_dim
    both, group = reader.read_linear(part.in_proj_qkvz), part.num_v_heads // key_heads
    values = group * part.head_v_dim
    rows = np.arange(len(both.weight)).reshape(key_heads, -1)
    cuts = np.cumsum([key_width, key_width, values])
    q, k, v, z = (x.ravel() for x in np.split(rows, cuts, 1))
    steps = reader.read_linear(part.in_proj_ba)
    beta, decays = np.split(np.arange(len(steps.weight)).reshape(key_heads, -1), 2, 1)
    projections = [both.select_outputs(np.concatenate([q, k, v])), both.select_outputs(z)]
    return projections, [steps.select_outputs(decays.ravel()), steps.select_outputs(beta.ravel())]


def _read_scan(
    reader: NetworkReader, part: Any, filters: Floats, bias: Floats | None
) -> RecurrentMixer:
    reader.require(hasattr(part, "num_heads"), "a scan without heads")
    heads, width = part.num_heads, part.head_dim
    key_heads, key_width, inner = part.n_groups, part.ssm_state_size, heads * width
    both = reader.read_linear(part.in_proj)
    if hasattr(part, "mup_vector"):
        both = both.scale_by(part.ssm_in_multiplier, to_float_array(part.mup_vector))
    n = key_heads * key_width
    fits = len(both.weight) == 2 * inner + 2 * n + heads and len(filters) == inner + 2 * n
    fits = fits and part.activation == "silu" and heads % key_heads == 0
    reader.require(fits, "a scan of another kind")
    values = pad_head_rows(heads, width)

    def order_rows(start: int) -> RowIndices:
        """Return the convolution's channels in the kernels' order (queries, keys, values), as
        indices into the module's order (values, keys, queries), which begins at `start`."""
        keys = [pad_head_rows(key_heads, key_width, start + at) for at in (inner + n, inner)]
        return np.concatenate([*keys, pad_head_rows(heads, width, start)])

    order = order_rows(0)
    norm: Any = getattr(part, "norm", None)
    norm = None if isinstance(norm, nn.Identity) else norm
    facts: dict[str, Any] = {}
    if norm is not None:
        reader.read_weights.add(id(norm.weight))
        own = take_rows(to_float_array(norm.weight), values)
        size = getattr(norm, "group_size", inner)
        reader.require(size % width == 0, "norms of groups that split heads")
        facts = {"norm": own, "groups": inner // size, "count": size}
        facts |= {"gate_first": True, "epsilon": norm.variance_epsilon}
    decay, step_bias = _read_decays(reader, part)
    reader.read_weights.add(id(part.D))
    min_step, max_step = part.time_step_limit
    return RecurrentMixer(
        SCAN,
        # the module's projection begins with the gates
        [both.select_outputs(order_rows(inner)), both.select_outputs(values)],
        reader.read_linear(part.out_proj).select_inputs(values),
        heads,
        width + -width % LANES,
        np.ascontiguousarray(take_rows(filters, order).T),
        None if bias is None else take_rows(bias, order),
        key_heads,
        key_width,
        both.select_outputs(pad_head_rows(1, heads, 2 * inner + 2 * n)),
        decay,
        step_bias,
        np.pad(to_float_array(part.D), (0, -heads % LANES)),
        min_step=min_step,
        max_step=max_step,
        **facts,
    )


def _read_decays(reader: NetworkReader, part: Any) -> tuple[Floats, Floats]:
    """Return two arrays, each padded to a multiple of `LANES`: -exp(A_log), by which steps are
    multiplied to make log decays, and the bias of steps."""
    reader.read_weights |= {id(part.A_log), id(part.dt_bias)}
    padding = (0, -len(part.A_log) % LANES)
    return np.pad(to_float_array(-part.A_log.float().exp()), padding), np.pad(
        to_float_array(part.dt_bias), padding
    )


def scale_attention(layer: Any, part: Attention) -> Attention:
    """Return Falcon-H1's attention, with weights that include the family's factors of inputs, keys
    and outputs."""
    q, k, v = part.projections
    first, own = layer.attention_in_multiplier, layer.self_attn.key_multiplier
    projections = [q.scale_by(first), k.scale_by(first, own), v.scale_by(first)]
    out = part.out and part.out.scale_by(1.0, layer.attn_out_multiplier)
    return replace(part, projections=projections, out=out)


def scale_mixer(layer: Any, part: RecurrentMixer) -> RecurrentMixer:
    """Return Falcon-H1's recurrence, which is parallel to attention, with output weights that
    include the family's output factor."""
    return replace(part, out=part.out.scale_by(1.0, layer.ssm_out_multiplier))
