"""A sample of every layer's weights, which tells models apart in whatever precision they are.

It does not know what the sketch is for.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor
from transformers import PreTrainedModel

from foretoken.models.stock.packed import PackedLinear

PER_WEIGHT = 16  # values of every weight, evenly spaced
ROUNDING = 2**-7  # relative: one model in float32, bfloat16 and float16 differs by less


@torch.no_grad()
def sketch(model: PreTrainedModel) -> Tensor:
    """Values of all weights in the order of the modules, `[N]`, float32 on the CPU."""
    return torch.cat([_sample(weight) for weight in _weights(model)]).cpu()


def alike(a: Tensor, b: Tensor) -> bool:
    """Whether two sketches are of one model."""
    return a.shape == b.shape and torch.allclose(a, b, rtol=ROUNDING, atol=1e-6)


def _weights(model: PreTrainedModel) -> Iterator[Tensor]:
    for module in model.modules():
        layer = module.unpacked() if isinstance(module, PackedLinear) else module
        yield from layer.parameters(recurse=False)


def _sample(weight: Tensor) -> Tensor:
    steps = torch.arange(PER_WEIGHT, device=weight.device)
    return weight.flatten()[steps * (weight.numel() - 1) // (PER_WEIGHT - 1)].float()
