"""Inputs of tokens that each layer reads beside states (Gemma 4), from transformers' modules: a
table, a product with embeddings, and an MLP of each layer."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from foretoken.models.native.network import LayerInput, LayerInputs
from foretoken.models.native.packing import LANES

if TYPE_CHECKING:
    from foretoken.models.native.reading import NetworkReader

PRODUCT, NORM = "per_layer_model_projection", "per_layer_projection_norm"


def read_inputs(reader: NetworkReader) -> LayerInputs | None:
    """Return the inputs of all layers; None for a network without."""
    base = reader.base
    width = int(getattr(base, "hidden_size_per_layer_input", 0) or 0)
    if not width:
        return None
    reader.require(hasattr(base, f"{PRODUCT}_scale"), "inputs of layers of another kind")
    table, product = base.embed_tokens_per_layer, reader.linear(getattr(base, PRODUCT))
    embeddings: Any = reader.network.get_input_embeddings()
    vocabulary = embeddings.weight.shape[0]
    known = width % LANES == 0 and table.weight.shape == (vocabulary, len(product.weight))
    reader.require(known and product.bias is None, "inputs of layers of other shapes")
    reader.read.add(id(table.weight))
    return LayerInputs(
        width,
        reader.plain(table.weight),
        product,
        reader.norm(getattr(base, NORM), width),
        float(table.embed_scale),
        float(getattr(base, f"{PRODUCT}_scale")),
        float(base.per_layer_input_scale),
    )


def read_input(reader: NetworkReader, layer: Any, number: int, width: int) -> LayerInput:
    """Return what a layer makes of its part."""
    same = reader.activation(layer) == reader.activation(layer.mlp)
    reader.require(same, "inputs of another activation")
    gate, out = layer.per_layer_input_gate, layer.per_layer_projection
    norm = reader.norm(layer.post_per_layer_input_norm)
    return LayerInput(reader.linear(gate), reader.linear(out), norm, number * width)
