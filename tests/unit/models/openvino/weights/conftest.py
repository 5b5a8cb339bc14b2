"""A small model in a folder of its own, to be rounded."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from foretoken.models.stock import selfcheck
from foretoken.models.stock.selfcheck import stir


@pytest.fixture
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(selfcheck, "FOUND", {})
    torch.manual_seed(0)
    sizes = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2}
    config = LlamaConfig(vocab_size=256, num_attention_heads=4, eos_token_id=None, **sizes)
    model = LlamaForCausalLM(config)
    stir(model)
    model.save_pretrained(tmp_path / "m")
    return str(tmp_path / "m")
