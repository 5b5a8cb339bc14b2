"""Sizes of models: parameters, bytes of weights, and how many of them a pass over one token reads,
so that a machine's memory bandwidth tells the least time that such a pass takes."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel

from foretoken.drafters.base import Drafter
from foretoken.errors import ForetokenError
from foretoken.loading import named_models
from foretoken.loading.sources import find_source
from foretoken.models.base import Model
from foretoken.models.native.model import NativeModel

PYTHON_RUNTIME = "python"  # the runtime of a drafter without a network


@dataclass(frozen=True, slots=True)
class Footprint:
    """A model, or a drafter without one, and its sizes; None where they are unknown."""

    name: str
    runtime: str
    dtype: str  # of the weights
    encoder_decoder: bool
    parameters: int | None
    operations: int | None  # of the matrix products, per token (section 3.4)
    weight_bytes: int | None = None
    pass_bytes: int | None = None  # of the weights that a pass over one token reads


def compute_model_footprint(
    model: Model, name: str, dtype: str, revision: str | None = None, *, trust: bool = False
) -> Footprint:
    """Return the sizes of a model that was loaded with these options, not measured: its bytes are
    those of its panels on the native decoder; elsewhere they follow from its parameters' shapes."""
    network = _get_network(model, name, revision, trust)
    facts = (name, model.runtime, dtype, model.encoder_decoder)
    if network is None:
        return Footprint(*facts, None, None)
    num_weights, num_multiplied = (
        sum(each.numel() for each in network.parameters()),
        _count_multiplied_weights(network),
    )
    weight_bytes, pass_bytes = _get_native_bytes(model) or (None, None)
    if pass_bytes is None:
        kind = getattr(network.config, "dtype", None) if dtype == "auto" else getattr(torch, dtype)
        kind = kind if isinstance(kind, torch.dtype) else torch.float32
        head = getattr(network.get_output_embeddings(), "weight", None)
        heads = {} if head is None else {id(head): head.numel()}
        embedded = heads | {id(each): each.numel() for each in _list_embeddings(network)}
        weight_bytes = _count_bytes(num_weights, sum(embedded.values()), kind, dtype)
        pass_bytes = _count_bytes(num_multiplied, sum(heads.values()), kind, dtype)
    return Footprint(*facts, num_weights, 2 * num_multiplied, weight_bytes, pass_bytes)


def _get_native_bytes(model: Model) -> tuple[int, int] | None:
    """Return the bytes of a model's panels on the native decoder, and those of them that a pass
    over one token reads; None elsewhere."""
    return model.passes.bytes if isinstance(model, NativeModel) else None


INT4_BYTES_PER_WEIGHT = 0.5 + 2 / 64  # bytes of a weight, with its share of a group's scale


def _count_bytes(num_weights: int, num_embedded: int, kind: torch.dtype, dtype: str) -> int:
    """Return the bytes of weights of which so many are embeddings or output layer, which stay in
    eight bits where the others have four."""
    if dtype == "int4":
        return round((num_weights - num_embedded) * INT4_BYTES_PER_WEIGHT) + num_embedded
    return num_weights * kind.itemsize


def compute_drafter_footprint(
    drafter: Drafter, name: str, dtype: str, revision: str | None = None, *, trust: bool = False
) -> Footprint:
    """Return the sizes of a drafter; of one that is no model they are not known."""
    if drafter.model is not None:
        place = str(named_models.find_draft_folder(name) or name)
        model = compute_model_footprint(drafter.model, place, dtype, revision, trust=trust)
        return replace(model, name=name)
    none = (
        0 if drafter.runtime == PYTHON_RUNTIME else None
    )  # else it has products that are not counted
    return Footprint(name, drafter.runtime, "", False, None, none)


def _get_network(
    model: Model, name: str, revision: str | None, trust: bool
) -> PreTrainedModel | None:
    """Return the network, or one without weights; None where transformers cannot build it."""
    network = model.model
    if isinstance(network, PreTrainedModel):
        return network
    if model.runtime == "table":
        return None
    try:
        return find_source(name, revision, trust).structure
    except ForetokenError:  # the figures are then unknown
        return None


def _count_multiplied_weights(network: PreTrainedModel) -> int:
    """Count the weights that are multiplied with one token of a decoder's text.

    Without embeddings, unless they are the output layer too, and with the share of experts that a
    token meets, or all. Cross-attention's keys and values, made once per source, are counted.
    """
    head = network.get_output_embeddings()
    skipped = {id(weight) for weight in _list_embeddings(network)} | _get_encoder_weight_ids(
        network
    )
    skipped -= {id(head.weight)} if isinstance(head, nn.Linear) else set()
    share = _compute_experts_share(network.config)
    total = 0.0
    for name, weight in network.named_parameters():
        if weight.ndim >= 2 and id(weight) not in skipped:
            total += weight.numel() * (share if ".experts." in name else 1.0)
    return round(total)


def _list_embeddings(network: PreTrainedModel) -> list[Tensor]:
    return [part.weight for part in network.modules() if isinstance(part, nn.Embedding)]


def _get_encoder_weight_ids(network: PreTrainedModel) -> set[int]:
    """Ids of the encoder's weights, which run once per source."""
    if not network.config.is_encoder_decoder:
        return set()
    return {id(weight) for weight in network.get_encoder().parameters()}


def _compute_experts_share(config: PreTrainedConfig) -> float:
    config = config.get_text_config(decoder=True)
    used = getattr(config, "num_experts_per_tok", None)
    for name in ("num_local_experts", "num_experts", "n_routed_experts"):
        experts = getattr(config, name, None)
        if used and experts:
            return used / experts
    return 1.0
