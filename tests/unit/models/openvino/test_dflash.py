"""Drafts by blocks on OpenVINO guess as they do on torch, whatever their rows go through."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import MuseGlimmerAssistantConfig

import tiny
from blocks import CONFIDENT, DSPARK, LAYERS, ZLAB, filed, speculators, tensors
from foretoken.models.openvino import conversion
from foretoken.models.openvino.dflash import CompiledBlocks
from foretoken.models.openvino.export_dflash import HeadedBlocks
from foretoken.models.stock.dflash import BlockRows, StockBlocks

pytestmark = pytest.mark.cpu_only
TARGET = tiny.llama(40, seed=5)
WINDOWED = {**LAYERS, "layer_types": ["sliding_attention", "full_attention"]}
WINDOWED |= {"use_sliding_window": True, "sliding_window": 3}
LAYOUT: dict[str, Any] = {**LAYERS, "layer_types": WINDOWED["layer_types"]}
MUSE = MuseGlimmerAssistantConfig(
    **LAYOUT,
    sliding_window=4,
    block_size=6,
    mask_token_id=3,
    target_layer_ids=[0, 1],
).to_dict()
CONFIGS = {
    "zlab": ZLAB,
    "speculators": speculators(transformer_layer_config=WINDOWED),
    "both ways": speculators(transformer_layer_config=WINDOWED, sliding_window_non_causal=True),
    "dspark": DSPARK,
    "gated": {**CONFIDENT, "markov_head_type": "gated"},
    "rnn": {**CONFIDENT, "markov_head_type": "rnn"},
    "confident": speculators("dspark", markov_rank=0, confidence_head_with_markov=False),
    "muse": MUSE,
}


def compiled(config: dict[str, Any], given: dict[str, Tensor], dtype: str) -> CompiledBlocks:
    def network() -> HeadedBlocks:
        fresh = filed(config, TARGET, given)
        return HeadedBlocks(fresh.network, fresh.head)

    graphs = conversion.Conversion(None, dtype, network).graphs(conversion.BLOCKS)
    return CompiledBlocks(filed(config, TARGET, given), *graphs)


def played(model: BlockRows) -> list[Tensor]:
    """All that a model says of rows that read, guess, join, move, and leave."""
    made = torch.Generator().manual_seed(3)
    said: list[Tensor] = []

    def read(*counts: int) -> None:
        model.read([torch.randn(n, 32 * len(model.taps), generator=made) for n in counts])

    def guess(anchors: list[int], counts: list[int]) -> None:
        states, logits = model.guess(anchors, counts)
        before, memory = torch.tensor(anchors), None
        for i in range(max(counts)):
            scores, sure, memory = model.follow(states[:, i], logits[:, i], before, memory)
            before = (before + 7 * i) % 40
            rows = [b for b, count in enumerate(counts) if i < count]
            said.extend(x[rows] for x in (states[:, i], scores, sure) if x is not None)

    model.start(2)
    read(70, 5)  # more than one unit of capacity
    guess([4, 5], [model.most, 2])
    read(2, 0)
    model.start(2)
    read(0, 1, 9, 0)
    guess([1, 2, 3, 4], [1, 3, model.most, 2])
    model.permute([2, 0, 1, 2])
    read(3, 1, 0, 2)
    model.leave([1])
    guess([6, 7, 8], [3, 3, 1])
    read(1, 4, 2)
    model.leave([0, 2])
    guess([9], [model.most])
    assert model.lengths == [10]
    return said


@pytest.mark.prove
@pytest.mark.parametrize("name", CONFIGS)
def test_rows_guess_as_on_torch(name):
    config = CONFIGS[name]
    given = tensors(config, TARGET)
    own = played(StockBlocks(filed(config, TARGET, given)))
    model = compiled(config, given, "float32")
    assert (model.runtime, model.computed) == ("openvino", "float32")
    for found, expected in zip(played(model), own, strict=True):
        assert torch.allclose(found, expected, atol=1e-4)


@pytest.mark.parametrize("dtype", ["int8", "int4"])
def test_rounded_weights_guess_nearly_the_same(dtype):
    layers = {"hidden_size": 32, "intermediate_size": 1024, "num_attention_heads": 32}
    config = {**DSPARK, **layers, "num_key_value_heads": 32, "head_dim": 64}
    given = tensors(config, TARGET)
    own = played(StockBlocks(filed(config, TARGET, given)))
    model = compiled(config, given, dtype)
    found = played(model)
    assert model.computed == dtype
    off = max(float((x - y).norm() / y.norm()) for x, y in zip(found, own, strict=True))
    assert 1e-4 < off < {"int8": 0.05, "int4": 0.5}[dtype], off
