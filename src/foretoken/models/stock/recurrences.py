"""Recurrences of hybrid families over the ragged cache.

A family's mixer (Mamba, delta nets) calls functions of known names and parameters for its
convolution and its recurrence. In a twin, these names refer to the functions below, which load and
store each sequence's state; the rest is the family's own code. A mixer that calls other functions
is not supported.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import lru_cache
from types import FunctionType, MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import PreTrainedModel
from transformers.activations import ACT2FN

from foretoken.errors import RefusedError
from foretoken.models.stock.positions import FORWARD_CONTEXT

Limits = tuple[float, float]


def delta_rule(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    g: Tensor,
    beta: Tensor,
    use_qk_l2norm_in_kernel: bool = False,
    **kwargs: Any,
) -> tuple[Tensor, Tensor]:
    """Compute the gated delta rule, with one decay for each head (Gated DeltaNet) or for each
    channel (Kimi). `query` is `[B, W, heads, Dk]`; several value heads may share one query head."""
    q, k, v = (_upcast(x).transpose(1, 2) for x in (query, key, value))
    if use_qk_l2norm_in_kernel:
        q, k = (x * torch.rsqrt((x * x).sum(-1, keepdim=True) + 1e-6) for x in (q, k))
    decay = _upcast(g).transpose(1, 2)
    decay = decay if decay.dim() == 4 else decay[..., None]
    b = _upcast(beta).transpose(1, 2)[..., None]
    out = _run_recurrence(q * int(q.shape[-1]) ** -0.5, k, v, decay, b)
    return out.transpose(1, 2).to(query.dtype).contiguous(), out


def mamba2(
    hidden_states: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None = None,
    dt_bias: Tensor | None = None,
    dt_softplus: bool = False,
    dt_limit: Limits = (0.0, float("inf")),
    **kwargs: Any,
) -> tuple[Tensor, Tensor]:
    """Compute Mamba2's recurrence. `hidden_states` is `[B, W, heads, P]`; B and C are `[B, W,
    groups, N]`."""
    x, dt = _upcast(hidden_states), _upcast(dt)
    dt = dt if dt_bias is None else dt + _upcast(dt_bias)
    dt = (F.softplus(dt) if dt_softplus else dt).clamp(*dt_limit)
    k, q = (_upcast(y).transpose(1, 2) for y in (B, C))
    v, decay = (x * dt[..., None]).transpose(1, 2), (dt * _upcast(A)).transpose(1, 2)[..., None]
    out = _run_recurrence(q, k, v, decay, None)
    y = out.transpose(1, 2)
    y = y if D is None else y + x * _upcast(D)[:, None]
    return y.to(hidden_states.dtype).contiguous(), out


def mamba(
    hidden_states: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None = None,
    z: Tensor | None = None,
    delta_bias: Tensor | None = None,
    delta_softplus: bool = False,
    return_last_state: bool = True,
    **kwargs: Any,
) -> tuple[Tensor, Tensor]:
    """Compute Mamba's selective scan. `hidden_states`, dt and the gate z are `[B, C, W]`; B and C
    are `[B, N, W]`. Some families call this function once for each head."""
    x, dt, k, q = (_upcast(y).transpose(1, 2) for y in (hidden_states, dt, B, C))
    dt = dt if delta_bias is None else dt + _upcast(delta_bias)
    dt = F.softplus(dt) if delta_softplus else dt
    y = FORWARD_CONTEXT.get().cache.advance_scan(q, k, x * dt, dt, _upcast(A))
    y = y if D is None else y + x * _upcast(D)
    y = y if z is None else y * F.silu(_upcast(z).transpose(1, 2))
    return y.transpose(1, 2).to(hidden_states.dtype), y


def convolution(
    hidden_states: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: str | None = None,
    **kwargs: Any,
) -> Tensor:
    """Compute a causal convolution of each channel. The inputs `[B, C, taps - 1 + W]` begin with
    the taps - 1 inputs before the block; `weight` is `[C, taps]`."""
    x = hidden_states.to(weight.dtype)
    out = F.conv1d(x, weight[:, None], bias, groups=len(weight))
    out = out if activation is None else ACT2FN[activation](out)
    return out.to(hidden_states.dtype)


RECURRENCE_REPLACEMENTS: dict[str, Callable[..., Any]] = {
    "torch_chunk_gated_delta_rule": delta_rule,
    "chunk_kimi_delta_attention": delta_rule,
    "mamba2_chunk_scan": mamba2,
    "mamba_selective_scan": mamba,
    "causal_conv1d_fn": convolution,
}


def _upcast(x: Tensor) -> Tensor:
    """Return x in float32; if its dtype is wider, return x unchanged."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def _run_recurrence(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor | None) -> Tensor:
    return FORWARD_CONTEXT.get().cache.advance_recurrence(q, k, v, g, beta)


def install_row_recurrences(model: PreTrainedModel) -> None:
    """Run the recurrences of a twin's mixers over the ragged cache. Raises RefusedError for a mixer
    whose forward was replaced, which would start each block from an empty state."""
    for part in model.modules():
        if (own := _make_row_forward(type(part))) is not None:
            if "forward" in vars(part):
                raise RefusedError(
                    f"the forward of {type(part).__name__} was replaced, so its recurrent states "
                    "cannot be cached here; give the model as transformers makes it, on one device"
                )
            part.forward = MethodType(own, part)


@lru_cache
def _make_row_forward(kind: type[nn.Module]) -> FunctionType | None:
    """Return the forward of a mixer class, with our recurrence functions in place of the class's;
    None for other modules."""
    forward: Any = inspect.unwrap(kind.forward)
    code = getattr(forward, "__code__", None)
    replacements: dict[str, Any] = {
        name: RECURRENCE_REPLACEMENTS[name]
        for name in RECURRENCE_REPLACEMENTS
        if code and name in code.co_names
    }
    if not replacements:
        return None
    names = {**forward.__globals__, **replacements}
    own = FunctionType(
        forward.__code__, names, forward.__name__, forward.__defaults__, forward.__closure__
    )
    own.__kwdefaults__ = forward.__kwdefaults__
    return own
