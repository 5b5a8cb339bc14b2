"""The draft that ships for SmolLM2-135M-Instruct: whole, small, and for a target of its shape."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import load_file
from transformers import LlamaConfig, LlamaForCausalLM

from foretoken.models.stock import pair_files

FOLDER = Path(__file__).parents[4] / "src/foretoken/assets/smollm2-draft"
SIZES = {
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "vocab_size": 49152,
}
HEADS = {"num_attention_heads": 9, "num_key_value_heads": 3}


def test_it_is_read() -> None:
    with torch.device("meta"):
        target = LlamaForCausalLM(LlamaConfig(**SIZES, **HEADS, tie_word_embeddings=True))
    file = FOLDER / "model.safetensors"
    assert file.stat().st_size < 8e6
    config = json.loads((FOLDER / "config.json").read_text())
    rows = torch.zeros(49152, 576)
    draft = pair_files.build_eagle("it", config, load_file(file), target, lambda: rows)
    assert draft.ids is not None and len(draft.ids) == 8192
    assert draft.taps == (2, 15, 27) and draft.other_taps == ()
