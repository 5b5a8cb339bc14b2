"""Small random drafts by blocks, as their publishers' files have them."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from foretoken.drafters.dflash import BlockDrafter
from foretoken.models.base import Model
from foretoken.models.graph_blocks import GraphBlockModel
from foretoken.models.graphs import GraphModel
from foretoken.models.native.block_model import NativeBlockModel
from foretoken.models.native.block_reader import BlockDecoder
from foretoken.models.native.conversion import NativeConversion
from foretoken.models.stock.dflash import BlocksDraft, StockBlockModel
from foretoken.models.stock.dflash_files import (
    build_blocks_draft,
    build_network,
    parse_block_config,
)
from foretoken.models.stock.model import CausalModel

LAYERS = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "head_dim": 8}
LAYERS |= {"num_key_value_heads": 2, "intermediate_size": 48, "max_position_embeddings": 96}
ZLAB = {**LAYERS, "block_size": 5, "dflash_config": {"mask_token_id": 1, "target_layer_ids": [0]}}
DSPARK = {**LAYERS, "architectures": ["Qwen3DSparkModel"], "block_size": 4, "mask_token_id": 1}
DSPARK |= {"target_layer_ids": [-1, 0], "markov_rank": 3, "enable_confidence_head": False}
DFLASH2 = {**ZLAB, "architectures": ["DFlash2DraftModel"], "layer_types": ["sliding_attention"] * 2}
DFLASH2 |= {"sliding_window": 6, "use_sliding_window": True}
ADDED = {"conv_kernel_size": 2, "conv_group_size": 8, "selector_rank": 4, "selector_top_k": 2}
DFLASH2["dflash_config"] = {**ZLAB["dflash_config"], **ADDED}
PROJECTOR = {"projector_type": "domino", "gru_hidden_dim": 6, "emb_dim": 5, "shift_label": True}
DOMINO = {**ZLAB, "architectures": ["DominoDraftModel"]}
DOMINO["dflash_config"] = {**ZLAB["dflash_config"], **PROJECTOR, "pure_draft_prefix_len": 1}
CONFIDENT = {**DSPARK, "enable_confidence_head": True, "confidence_head_with_markov": True}


def speculators(kind: str = "dflash", **more: Any) -> dict[str, Any]:
    """The same DFlash in speculators' layout, which numbers layers by their inputs."""
    settings = {"speculators_model_type": kind, "transformer_layer_config": LAYERS}
    settings |= {"block_size": 5, "mask_token_id": 1, "aux_hidden_state_layer_ids": [1]}
    return {**settings, **more}


def tensors(config: dict[str, Any], target: PreTrainedModel, outputs: int | None = None):
    """Random ones, far from flat, by the names that DFlash's files have."""
    V, H = target.get_input_embeddings().weight.shape
    random = torch.Generator().manual_seed(7)
    network = build_network(parse_block_config(config), H, V, outputs or V)
    made: dict[str, Tensor] = {}
    for name, weight in network.state_dict().items():
        scale = 0.3 if weight.ndim == 1 else 2 * weight.shape[-1] ** -0.5
        made[name] = torch.randn(weight.shape, generator=random) * scale + (weight.ndim == 1)
    return made


def filed(config: dict[str, Any], target: PreTrainedModel, given: dict[str, Tensor]) -> BlocksDraft:
    """A draft of such files, for this target, as it is read."""
    ends = target.get_input_embeddings(), target.get_output_embeddings()
    return build_blocks_draft(config, given, target.config.hidden_size, *ends)


def draft(
    config: dict[str, Any], target: PreTrainedModel, given: dict[str, Tensor] | None = None
) -> StockBlockModel:
    """The same on torch, in the target's precision."""
    return StockBlockModel(ready(config, target, given))


def ready(
    config: dict[str, Any], target: PreTrainedModel, given: dict[str, Tensor] | None = None
) -> BlocksDraft:
    """The same as it is read, in the target's precision."""
    read = filed(config, target, tensors(config, target) if given is None else given)
    read.network.to(target.device, target.dtype)
    return read


def pair(
    config: dict[str, Any], network: PreTrainedModel, kind: type[BlockDrafter] = BlockDrafter
) -> tuple[Model, BlockDrafter]:
    """A target that shows its states, and a drafter upon it."""
    model = draft(config, network)
    target = CausalModel(network)
    target.tap(model.taps)
    return target, kind(target, model)


def graph_pair(
    config: dict[str, Any], network: PreTrainedModel, kind: type[BlockDrafter] = BlockDrafter
) -> tuple[Model, BlockDrafter]:
    """The same pair in fixed shapes."""
    model = GraphBlockModel(ready(config, network))
    target = GraphModel(network)
    target.tap(model.taps)
    return target, kind(target, model)


def native_draft(
    config: dict[str, Any],
    target: PreTrainedModel,
    dtype: str = "float32",
    given: dict[str, Tensor] | None = None,
) -> NativeBlockModel:
    """The same on the native decoder."""
    read = filed(config, target, tensors(config, target) if given is None else given)
    network: Any = BlockDecoder(read)
    return NativeConversion(None, dtype, lambda: copy.deepcopy(network)).load_block_model(read)


def native_pair(config: dict[str, Any], network: PreTrainedModel) -> tuple[Model, BlockDrafter]:
    """The same pair on the native decoder."""
    model = native_draft(config, network)
    conversion = NativeConversion(None, "float32", lambda: copy.deepcopy(network), taps=model.taps)
    target = conversion.load_model()
    return target, BlockDrafter(target, model)
