"""Makes the kernels' `Experts` from transformers' modules. The router's rule is found by its
results on random inputs."""

from __future__ import annotations

import inspect
from collections.abc import Generator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from foretoken.models.native.network import (
    CLAMPED,
    RELATIVE_TOLERANCE,
    Experts,
    GatedMLP,
    Routing,
    make_random_states,
    to_float_array,
)

if TYPE_CHECKING:
    from foretoken.models.native.network_reader import NetworkReader

ROUTER_NAMES = "gate", "router"
ROUTER_WEIGHT_NAMES = "gate", "wg"  # if the router's weight is in a linear layer of this name
# names of a bias that is added to scores to choose experts, but not to compute their weights
SCORE_BIAS_NAMES = "e_score_correction_bias", "expert_bias"
SHARED_EXPERT_NAMES = "shared_expert", "shared_experts", "shared_mlp"
MAX_EXPERTS = 1024  # the kernels' limit
NUM_TRIAL_TOKENS = 64


def read_experts(reader: NetworkReader, part: Any, shared: Any) -> tuple[Experts, GatedMLP | None]:
    """Return a block's experts, and the shared MLP, which runs for all tokens (None: no such MLP).

    part: The block, which may contain the shared MLP and its gate. shared: The shared MLP if it is
    in the layer instead of the block, else None.
    """
    router = reader.find_part(part, ROUTER_NAMES, "router")
    owner = router
    if not hasattr(router, "weight"):
        owner = reader.find_part(router, ROUTER_WEIGHT_NAMES, "weight of its router")
    weight, bias = owner.weight, getattr(owner, "bias", None)
    known = isinstance(weight, nn.Parameter) and weight.ndim == 2 and len(weight) <= MAX_EXPERTS
    reader.require(known, "experts of another kind")
    reader.read_weights |= {id(x) for x in (weight, bias) if x is not None}
    rows = reader.make_linear(weight, bias)
    score_bias = _find_score_bias(reader, part, router)
    with _fill_randomly(score_bias):
        numbers = None if score_bias is None else score_bias.detach().flatten().float()
        routing = _infer_routing(reader, router, weight, bias, numbers)
    shared_part = next(
        (p for name in SHARED_EXPERT_NAMES if (p := getattr(part, name, None)) is not None), None
    )
    reader.require(shared_part is None or shared is None, "two shared experts")
    gate = getattr(part, "shared_expert_gate", None)
    if gate is not None:
        last = reader.read_linear(gate)
        reader.require(len(last.weight) == 1, "a shared expert's gate with several outputs")
        rows = rows.concatenate([last])
    each = _read_expert_mlps(reader, part.experts)
    shared_part = shared if shared_part is None else shared_part
    experts = Experts(
        rows,
        each,
        routing,
        gate is not None,
        None if score_bias is None else to_float_array(score_bias).ravel(),
    )
    return experts, None if shared_part is None else reader.read_mlp(shared_part)


def _read_expert_mlps(reader: NetworkReader, experts: Any) -> list[GatedMLP]:
    plain = hasattr(experts, "up_proj")
    both: Any = getattr(experts, "up_proj" if plain else "gate_up_proj", None)
    down: Any = getattr(experts, "down_proj", None)
    known = all(isinstance(x, nn.Parameter) and x.ndim == 3 for x in (both, down))
    reader.require(known, "experts of another kind")
    reader.read_weights |= {id(both), id(down)}
    if hasattr(experts, "gate_up_proj_bias"):
        return _read_clamped_mlps(reader, experts, both, down)
    reader.require(both.shape[1] == (2 - plain) * down.shape[2], "experts of other shapes")
    activation, curve = reader.read_activation(experts)
    made = list[GatedMLP]()
    for first, second in zip(both, down, strict=True):
        *gate, up = (reader.make_linear(x) for x in first.chunk(2 - plain))
        gated = gate[0] if gate else None
        made.append(GatedMLP(gated, up, reader.make_linear(second), activation, curve))
    return made


def _read_clamped_mlps(
    reader: NetworkReader, experts: Any, both: Tensor, down: Tensor
) -> list[GatedMLP]:
    """Return the experts of GPT-OSS. Their weights are stored as `[inputs, outputs]`, with
    alternating outputs of gate and up."""
    known = hasattr(experts, "alpha") and hasattr(experts, "limit")
    reader.require(known and both.shape[2] == 2 * down.shape[1], "experts of other shapes")
    biases = experts.gate_up_proj_bias, experts.down_proj_bias
    reader.read_weights |= {id(x) for x in biases}
    curve = float(experts.alpha), float(experts.limit), 0.0
    made = list[GatedMLP]()
    for one, other, first, second in zip(both, down, *biases, strict=True):
        gate, up = (reader.make_linear(one[:, i::2].T, first[i::2]) for i in (0, 1))
        made.append(GatedMLP(gate, up, reader.make_linear(other.T, second), CLAMPED, curve))
    return made


def _find_score_bias(reader: NetworkReader, part: Any, router: Any) -> Tensor | None:
    for owner in (part, router, getattr(router, "moe_statics", None)):
        for name in SCORE_BIAS_NAMES:
            if (found := getattr(owner, name, None)) is not None:
                reader.read_weights.add(id(found))
                return found
    return None


@contextmanager
def _fill_randomly(bias: Tensor | None) -> Generator[None]:
    """Fill the bias with random numbers inside the context, then restore it: a new network's bias
    is zero, which would not show how it is used."""
    if bias is None:
        yield
        return
    with torch.no_grad():
        own = bias.detach().clone()
        bias.copy_(make_random_states(*bias.shape) / 4)
        try:
            yield
        finally:
            bias.copy_(own)


def _infer_routing(
    reader: NetworkReader,
    router: Any,
    weight: Tensor,
    bias: Tensor | None,
    score_bias: Tensor | None,
) -> Routing:
    """Return the rule by which the router chooses experts and their weights. It is found by
    comparing the router's results. Raises RefusedError if no known rule gives these results."""
    states = make_random_states(1, NUM_TRIAL_TOKENS, weight.shape[1])
    given = [x for x in inspect.signature(router.forward).parameters if x in SCORE_BIAS_NAMES]
    groups = getattr(router, "num_group", None) or 1, getattr(router, "topk_group", None) or 1
    with torch.no_grad(), suppress(Exception):  # a family's own code raises anything
        try:
            _, weights, chosen = router(states[0], *([score_bias] * len(given)))
        except ValueError:  # it takes [B, tokens, width]
            _, weights, chosen = router(states, *([score_bias] * len(given)))
        k = chosen.shape[-1]
        order = chosen.reshape(NUM_TRIAL_TOKENS, k).argsort(-1)
        chosen, weights = (
            x.reshape(NUM_TRIAL_TOKENS, k).gather(-1, order) for x in (chosen, weights)
        )
        logits = functional.linear(states[0], weight.detach(), bias)
        for sigmoids in (False, True):
            scores = logits.sigmoid() if sigmoids else logits.softmax(-1)
            best = (
                _choose_experts(scores if score_bias is None else scores + score_bias, k, *groups)
                .sort(-1)
                .values
            )
            if not torch.equal(best, chosen):
                continue
            masses = scores.gather(-1, best)
            for normalized in (True, False):
                own = masses / masses.sum(-1, keepdim=True) if normalized else masses
                scale = float((weights / own).median())
                if torch.allclose(
                    weights.float(), own * scale, rtol=RELATIVE_TOLERANCE, atol=RELATIVE_TOLERANCE
                ):
                    return Routing(k, sigmoids, normalized, scale, *groups)
    raise reader.make_refusal("experts chosen in another way")


def _choose_experts(scores: Tensor, k: int, groups: int, chosen_groups: int) -> Tensor:
    """Return the k experts with the highest scores, `[tokens, k]`. They are chosen only from the
    `chosen_groups` groups whose two best scores have the largest sums."""
    if groups > 1:
        each = scores.unflatten(-1, (groups, -1))
        best_groups = each.topk(2).values.sum(-1).topk(chosen_groups).indices
        stays = torch.zeros(each.shape[:2], dtype=torch.bool).scatter(1, best_groups, True)
        scores = torch.where(stays[..., None], each, -torch.inf).flatten(1)
    return scores.topk(k).indices
