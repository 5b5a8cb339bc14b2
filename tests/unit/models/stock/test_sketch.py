"""Sketches tell models apart, but not one model in two precisions."""

from __future__ import annotations

import pytest
import torch

import tiny
from foretoken.models.stock.packed import PER_WEIGHT, PackedLinear, alike, pack, sketch


def test_a_few_values_of_every_weight():
    network = tiny.llama()
    values, weights = sketch(network), list(network.parameters())
    assert values.shape == (PER_WEIGHT * len(weights),) and values.dtype == torch.float32
    first = weights[0].detach().flatten()
    assert values[[0, PER_WEIGHT - 1]].tolist() == first[[0, -1]].tolist()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_the_same_target_in_another_precision(dtype):
    network = tiny.llama()
    assert alike(sketch(network), sketch(tiny.llama().to(dtype)))
    assert not alike(sketch(network), sketch(tiny.llama(seed=1).to(dtype)))


def test_the_same_target_with_packed_layers():
    network = tiny.llama(20_000)
    before = sketch(network)
    assert pack(network).layers and isinstance(network.lm_head, PackedLinear)
    assert torch.equal(before, sketch(network))
