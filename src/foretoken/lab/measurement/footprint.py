"""Sizes of models: parameters, bytes that a forward reads, operations and cache bytes per token.

They are counted from parameter shapes and the config, not measured: the same on every runtime.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel

from foretoken.drafters.base import Drafter
from foretoken.drafters.ngram import NGramDrafter
from foretoken.errors import ForetokenError
from foretoken.loading.options import ROUNDED
from foretoken.loading.sources import source
from foretoken.models.base import Model

PYTHON = "python"  # the runtime of a drafter without a model
FOUR_BITS = 0.5 + 2 / 64  # bytes of a weight, with its share of a group's scale


@dataclass(frozen=True, slots=True)
class Footprint:
    """Sizes of a model, or of a drafter without one; None where a figure is unknown."""

    name: str
    runtime: str
    dtype: str  # of the weights
    encoder_decoder: bool
    parameters: int | None
    weight_bytes: int | None
    pass_bytes: int | None  # weights that a pass over one token reads
    operations: int | None  # of the matrix products, per token (section 3.4)
    cache_bytes: int | None  # per token that a row holds


def of_model(
    model: Model, name: str, dtype: str, revision: str | None = None, *, trust: bool = False
) -> Footprint:
    """Return the footprint of a model that was loaded with these options."""
    network = _network(model, name, revision, trust)
    facts = (name, model.runtime)
    if network is None:
        return Footprint(*facts, dtype, model.encoder_decoder, *[None] * 5)
    stored_dtype = (
        getattr(network.config, "dtype", None) if dtype == "auto" else getattr(torch, dtype)
    )
    kind = stored_dtype if isinstance(stored_dtype, torch.dtype) else torch.float32
    products = _products(network)
    numbers = sum(weight.numel() for weight in network.parameters())
    cached = kind if kind.is_floating_point else torch.float32  # weights alone are integers
    head = getattr(network.get_output_embeddings(), "weight", None)
    heads = {} if head is None else {id(head): head.numel()}
    embedded = heads | {id(weight): weight.numel() for weight in _embeddings(network)}
    return Footprint(
        *facts,
        dtype if dtype in ROUNDED else str(kind).removeprefix("torch."),
        model.encoder_decoder,
        parameters=numbers,
        weight_bytes=_bytes(numbers, sum(embedded.values()), kind, dtype),
        pass_bytes=_bytes(products, sum(heads.values()), kind, dtype),
        operations=2 * products,
        cache_bytes=getattr(model, "token_bytes", None)
        or _cache_bytes(network.config, cached.itemsize),
    )


def _bytes(numbers: int, embedded: int, kind: torch.dtype, dtype: str) -> int:
    """Return the bytes of weights; `embedded` of them keep eight bits where others have four."""
    if dtype == "int4":
        return round((numbers - embedded) * FOUR_BITS) + embedded
    return numbers * kind.itemsize


def of_drafter(
    drafter: Drafter, name: str, dtype: str, revision: str | None = None, *, trust: bool = False
) -> Footprint:
    """Return the footprint of a drafter; one without a model has no products and no cache."""
    if drafter.model is not None:
        return of_model(drafter.model, name, dtype, revision, trust=trust)
    weight_bytes = 0
    if isinstance(drafter, NGramDrafter):
        table = drafter.table
        arrays = [getattr(lv, field) for lv in table.levels for field in lv.__slots__]
        weight_bytes = sum(array.nbytes for array in [table.unigram, *arrays])
    return Footprint(name, PYTHON, "", False, None, weight_bytes, 0, 0, 0)


def _network(model: Model, name: str, revision: str | None, trust: bool) -> PreTrainedModel | None:
    """Return the network, or one without weights; None where transformers cannot build it."""
    network = getattr(model, "model", None)
    if isinstance(network, PreTrainedModel):
        return network
    if getattr(model, "runtime", None) == "table":
        return None
    try:
        return source(name, revision, trust).empty
    except ForetokenError:  # the figures are then unknown
        return None


def _products(network: PreTrainedModel) -> int:
    """Count the weights that are multiplied with one token of a decoder's text.

    Without embeddings, unless they are the output layer too, and with the share of experts that a
    token goes through. Cross-attention's keys and values, made once per source, are counted.
    """
    head = network.get_output_embeddings()
    skipped = {id(weight) for weight in _embeddings(network)} | _encoder(network)
    skipped -= {id(head.weight)} if isinstance(head, nn.Linear) else set()
    share = _experts_share(network.config)
    total = 0.0
    for name, weight in network.named_parameters():
        if weight.ndim >= 2 and id(weight) not in skipped:
            total += weight.numel() * (share if ".experts." in name else 1.0)
    return round(total)


def _embeddings(network: PreTrainedModel) -> list[Tensor]:
    return [part.weight for part in network.modules() if isinstance(part, nn.Embedding)]


def _encoder(network: PreTrainedModel) -> set[int]:
    """Ids of the encoder's weights, which run once per source."""
    if not network.config.is_encoder_decoder:
        return set()
    return {id(weight) for weight in network.get_encoder().parameters()}


def _experts_share(config: PreTrainedConfig) -> float:
    config = config.get_text_config(decoder=True)
    used = getattr(config, "num_experts_per_tok", None)
    for name in ("num_local_experts", "num_experts", "n_routed_experts"):
        experts = getattr(config, name, None)
        if used and experts:
            return used / experts
    return 1.0


def _cache_bytes(config: PreTrainedConfig, itemsize: int) -> int | None:
    """Bytes of keys and values of one token in all layers of the decoder."""
    config = config.get_text_config(decoder=True)
    layers = _first(config, "num_decoder_layers", "decoder_layers", "num_hidden_layers")
    query = _first(config, "decoder_attention_heads", "num_attention_heads")
    heads = _first(config, "num_key_value_heads") or query
    width = _first(config, "hidden_size")
    size = _first(config, "head_dim") or (width // query if width and query else None)
    return 2 * layers * heads * size * itemsize if layers and heads and size else None


def _first(config: PreTrainedConfig, *names: str) -> int | None:
    return next((value for name in names if (value := getattr(config, name, None))), None)
