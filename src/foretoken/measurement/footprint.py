"""Sizes of models: their parameters, the bytes of their weights, and the bytes that a forward pass
over one token loads. Loaded bytes / memory bandwidth is a lower bound of the pass's time."""

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

PYTHON_RUNTIME = "python"  # `runtime` of a drafter without a model


@dataclass(frozen=True, slots=True)
class Footprint:
    """Sizes of a model, or of a drafter that has no model. A size is None if unknown."""

    name: str
    runtime: str
    dtype: str  # of the weights
    encoder_decoder: bool
    parameters: int | None
    operations: int | None  # of the matrix products, per token (section 3.4)
    weight_bytes: int | None = None
    pass_bytes: int | None = None  # of the weights that a forward pass over one token loads


def compute_model_footprint(
    model: Model, name: str, dtype: str, revision: str | None = None, *, trust: bool = False
) -> Footprint:
    """Return the sizes of a model.

    Args:
        model: The loaded model.
        name: Folder or hub id from which it was loaded.
        dtype: The dtype with which it was loaded.
        revision: The revision with which it was loaded.
        trust: True if the model's own code may run.

    On the native decoder, the bytes of the packed weights are counted; on other backends, bytes
    are computed from the shapes of the parameters.
    """
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
    """Return the bytes of a model's packed weights on the native decoder, and how many of them a
    forward pass over one token loads; None for other backends."""
    return model.passes.bytes if isinstance(model, NativeModel) else None


INT4_BYTES_PER_WEIGHT = 0.5 + 2 / 64  # bytes of a weight, with its share of a group's scale


def _count_bytes(num_weights: int, num_embedded: int, kind: torch.dtype, dtype: str) -> int:
    """Return the bytes of `num_weights` weights of the torch dtype `kind`. In int4,
    `num_embedded` of the weights (embeddings and output layer) have eight bits."""
    if dtype == "int4":
        return round((num_weights - num_embedded) * INT4_BYTES_PER_WEIGHT) + num_embedded
    return num_weights * kind.itemsize


def compute_drafter_footprint(
    drafter: Drafter, name: str, dtype: str, revision: str | None = None, *, trust: bool = False
) -> Footprint:
    """Return the sizes of a drafter's model; most are unknown if the drafter has no model.
    Arguments as for `compute_model_footprint`."""
    if drafter.model is not None:
        place = str(named_models.find_draft_folder(name) or name)
        model = compute_model_footprint(drafter.model, place, dtype, revision, trust=trust)
        return replace(model, name=name)
    # A drafter with another `runtime` computes matrix products that are not counted here
    operations = 0 if drafter.runtime == PYTHON_RUNTIME else None
    return Footprint(name, drafter.runtime, "", False, None, operations)


def _get_network(
    model: Model, name: str, revision: str | None, trust: bool
) -> PreTrainedModel | None:
    """Return the model's PyTorch module. On a backend without PyTorch modules, return a module of
    the same structure without weights; None if transformers cannot build it, and for a table
    model."""
    network = model.model
    if isinstance(network, PreTrainedModel):
        return network
    if model.runtime == "table":
        return None
    try:
        return find_source(name, revision, trust).structure
    except ForetokenError:  # the sizes are then unknown
        return None


def _count_multiplied_weights(network: PreTrainedModel) -> int:
    """Return the number of weights that a decoder multiplies per token.

    Embeddings count only if they are also the output layer. Experts' weights count in proportion to
    the share of experts that a token uses, or fully if this share is unknown. The projections of
    cross-attention's keys and values count, although they run once per source.
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
    """Return the `id` of each weight of the encoder, which runs once per source and not per
    token."""
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
