"""Experts of a layer, read from transformers' modules: MLPs of which each token has a few, and how
a router chooses and weighs them, which is tried."""

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
    SAME,
    Experts,
    Gated,
    Routing,
    array,
    random_states,
)

if TYPE_CHECKING:
    from foretoken.models.native.reading import NetworkReader

ROUTERS = "gate", "router"
WEIGHTS = "gate", "wg"  # of a router that has it in a linear layer
ADDED = "e_score_correction_bias", "expert_bias"  # to the scores, for the choice
SHARED = "shared_expert", "shared_experts", "shared_mlp"
MOST_EXPERTS = 1024  # what kernels have room for
TRIED = 64  # tokens


def read_experts(reader: NetworkReader, part: Any, shared: Any) -> tuple[Experts, Gated | None]:
    """Return a block's experts, and the MLP that all tokens have beside them: a layer's own
    `shared` one, or the block's, which may have a gate."""
    router = reader.one(part, ROUTERS, "router")
    owner = router
    if not hasattr(router, "weight"):
        owner = reader.one(router, WEIGHTS, "weight of its router")
    weight, bias = owner.weight, getattr(owner, "bias", None)
    known = isinstance(weight, nn.Parameter) and weight.ndim == 2 and len(weight) <= MOST_EXPERTS
    reader.require(known, "experts of another kind")
    reader.read |= {id(x) for x in (weight, bias) if x is not None}
    rows = reader.plain(weight, bias)
    added = _added(reader, part, router)
    with _tried(added):
        numbers = None if added is None else added.detach().flatten().float()
        routing = _routing(reader, router, weight, bias, numbers)
    own = next((p for name in SHARED if (p := getattr(part, name, None)) is not None), None)
    reader.require(own is None or shared is None, "two shared experts")
    gate = getattr(part, "shared_expert_gate", None)
    if gate is not None:
        last = reader.linear(gate)
        reader.require(len(last.weight) == 1, "a gate of another kind")
        rows = rows.joined([last])
    each = _each(reader, part.experts)
    own = shared if own is None else own
    experts = Experts(
        rows, each, routing, gate is not None, None if added is None else array(added).ravel()
    )
    return experts, None if own is None else reader.gated(own)


def _each(reader: NetworkReader, each: Any) -> list[Gated]:
    plain = hasattr(each, "up_proj")
    both: Any = getattr(each, "up_proj" if plain else "gate_up_proj", None)
    down: Any = getattr(each, "down_proj", None)
    known = all(isinstance(x, nn.Parameter) and x.ndim == 3 for x in (both, down))
    reader.require(known, "experts of another kind")
    reader.read |= {id(both), id(down)}
    if hasattr(each, "gate_up_proj_bias"):
        return _clamped(reader, each, both, down)
    reader.require(both.shape[1] == (2 - plain) * down.shape[2], "experts of other shapes")
    activation, curve = reader.activation(each)
    made = list[Gated]()
    for first, second in zip(both, down, strict=True):
        *gate, up = (reader.plain(x) for x in first.chunk(2 - plain))
        gated = gate[0] if gate else None
        made.append(Gated(gated, up, reader.plain(second), activation, curve))
    return made


def _clamped(reader: NetworkReader, each: Any, both: Tensor, down: Tensor) -> list[Gated]:
    """GPT-OSS's: inputs before outputs, with biases, gates and their partners in turn."""
    known = hasattr(each, "alpha") and hasattr(each, "limit")
    reader.require(known and both.shape[2] == 2 * down.shape[1], "experts of other shapes")
    biases = each.gate_up_proj_bias, each.down_proj_bias
    reader.read |= {id(x) for x in biases}
    curve = float(each.alpha), float(each.limit), 0.0
    made = list[Gated]()
    for one, other, first, second in zip(both, down, *biases, strict=True):
        gate, up = (reader.plain(one[:, i::2].T, first[i::2]) for i in (0, 1))
        made.append(Gated(gate, up, reader.plain(other.T, second), CLAMPED, curve))
    return made


def _added(reader: NetworkReader, part: Any, router: Any) -> Tensor | None:
    for owner in (part, router, getattr(router, "moe_statics", None)):
        for name in ADDED:
            if (found := getattr(owner, name, None)) is not None:
                reader.read.add(id(found))
                return found
    return None


@contextmanager
def _tried(added: Tensor | None) -> Generator[None]:
    """Put random numbers in place meanwhile: a new network has zeros, which show nothing."""
    if added is None:
        yield
        return
    with torch.no_grad():
        own = added.detach().clone()
        added.copy_(random_states(*added.shape) / 4)
        try:
            yield
        finally:
            added.copy_(own)


def _routing(
    reader: NetworkReader, router: Any, weight: Tensor, bias: Tensor | None, added: Tensor | None
) -> Routing:
    """Return the rule that chooses and weighs experts as the router does, tried."""
    states = random_states(1, TRIED, weight.shape[1])
    given = [x for x in inspect.signature(router.forward).parameters if x in ADDED]
    groups = getattr(router, "num_group", None) or 1, getattr(router, "topk_group", None) or 1
    with torch.no_grad(), suppress(Exception):  # a family's own code raises anything
        try:
            _, weights, chosen = router(states[0], *([added] * len(given)))
        except ValueError:  # it reads a batch
            _, weights, chosen = router(states, *([added] * len(given)))
        k = chosen.shape[-1]
        order = chosen.reshape(TRIED, k).argsort(-1)
        chosen, weights = (x.reshape(TRIED, k).gather(-1, order) for x in (chosen, weights))
        logits = functional.linear(states[0], weight.detach(), bias)
        for sigmoids in (False, True):
            scores = logits.sigmoid() if sigmoids else logits.softmax(-1)
            best = _chosen(scores if added is None else scores + added, k, *groups).sort(-1).values
            if not torch.equal(best, chosen):
                continue
            masses = scores.gather(-1, best)
            for normalized in (True, False):
                own = masses / masses.sum(-1, keepdim=True) if normalized else masses
                scale = float((weights / own).median())
                if torch.allclose(weights.float(), own * scale, rtol=SAME, atol=SAME):
                    return Routing(k, sigmoids, normalized, scale, *groups)
    raise reader.refused("experts chosen in another way")


def _chosen(scores: Tensor, k: int, groups: int, chosen_groups: int) -> Tensor:
    """Return the experts of the highest scores, `[tokens, k]`, out of those groups whose two best
    add up to most."""
    if groups > 1:
        each = scores.unflatten(-1, (groups, -1))
        best = each.topk(2).values.sum(-1).topk(chosen_groups).indices
        stays = torch.zeros(each.shape[:2], dtype=torch.bool).scatter(1, best, True)
        scores = torch.where(stays[..., None], each, -torch.inf).flatten(1)
    return scores.topk(k).indices
