"""Layers of experts: a token's bits do not depend on which others' tokens are with its experts."""

from __future__ import annotations

import pytest
import torch

import tiny_families
from foretoken.models.native.conversion import NativeConversion

pytestmark = [pytest.mark.cpu_only, pytest.mark.native]
TEXT = [(7 * i * i + 3 * i) % 61 + 2 for i in range(90)]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8", "int4"])
def test_rows_do_not_depend_on_their_company(dtype: str) -> None:
    model = NativeConversion(None, dtype, lambda: tiny_families.build("Mixtral")).model()
    model.start([[]])
    alone = model.score([TEXT], [len(TEXT)])[0].clone()
    model.permute([])
    model.start([[], TEXT[:40]])
    for at, size in ((0, 1), (1, 1), (2, 7), (9, 60)):
        logits = model.score([TEXT[at : at + size], TEXT[40:43]], [size, 3])
        assert torch.equal(logits[0, :size], alone[at : at + size])
        assert torch.equal(logits[1, :3], alone[40:43])
        model.set_lengths([at + size, 40])
