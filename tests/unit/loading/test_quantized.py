"""Checkpoints in few bits are read as the plain weights that they stand for, or refused by name."""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

import foretoken
from foretoken.errors import InputError, RefusedError
from loads import refused
from tiny_families import build

BLOCK = 16


def saved(folder: Path, method: dict[str, Any]) -> tuple[Any, dict[str, torch.Tensor]]:
    """A tiny Llama in a folder whose config names that method; it and its weights."""
    model = build("Llama")
    model.generation_config.eos_token_id = None
    model.save_pretrained(folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": method}))
    return model, load_file(folder / "model.safetensors")


def in_blocks(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Its eight-bit floats, and a scale for each block."""
    rows, columns = weight.shape
    blocks = weight.reshape(rows // BLOCK, BLOCK, columns // BLOCK, BLOCK)
    scale = blocks.abs().amax((1, 3)) / 448
    floats = (blocks / scale[:, None, :, None]).to(torch.float8_e4m3fn)
    return floats.reshape(rows, columns), scale


def test_eight_bit_floats_are_the_values_that_are_stored(tmp_path: Path) -> None:
    method = {"quant_method": "fp8", "weight_block_size": [BLOCK, BLOCK]}
    model, weights = saved(tmp_path, method | {"activation_scheme": "dynamic"})
    plain = dict(weights)
    for name in [name for name in weights if "proj" in name]:
        floats, scale = in_blocks(weights[name])
        weights[name], weights[f"{name}_scale_inv"] = floats, scale
        wide = scale.repeat_interleave(BLOCK, 0).repeat_interleave(BLOCK, 1)
        plain[name] = floats.float() * wide
    save_file(weights, tmp_path / "model.safetensors", {"format": "pt"})
    model.load_state_dict(plain, strict=False)
    prompt = [5, 17, 33]
    expected = model.generate(torch.tensor([prompt]), max_new_tokens=12, do_sample=False)[0]
    spec = foretoken.load(tmp_path, "lookup", runtime="transformers")
    assert torch.equal(
        spec.target.model.get_parameter("model.layers.0.mlp.up_proj.weight"),
        plain["model.layers.0.mlp.up_proj.weight"],
    )
    (text,) = spec.generate(prompt, max_new_tokens=12, gamma=2, ignore_eos=True)
    assert list(text.tokens) == expected[3:].tolist()
    for dtype in ("bfloat16", "float64"):
        other = foretoken.load(tmp_path, "lookup", runtime="transformers", dtype=dtype)
        assert {w.dtype for w in other.target.model.parameters()} == {getattr(torch, dtype)}
        assert other.generate(prompt, max_new_tokens=2)
    weights.pop(next(name for name in weights if name.endswith("_scale_inv")))
    save_file(weights, tmp_path / "model.safetensors", {"format": "pt"})
    says = "in float8_e4m3fn without the scales of its values"
    refused(InputError, says, tmp_path, "lookup", runtime="transformers")


@pytest.mark.parametrize("name", ["gptq", "nobody's"])
def test_a_method_that_has_no_plain_weights_is_refused_by_name(tmp_path: Path, name: str) -> None:
    saved(tmp_path, {"quant_method": name, "bits": 4, "group_size": 32})
    says = f"is quantized by {name}, which transformers.*GGUF file"
    refused(RefusedError, says, tmp_path, "lookup", runtime="transformers")


@pytest.mark.skipif(find_spec("compressed_tensors") is not None, reason="it is installed")
def test_what_must_be_installed_is_said(tmp_path: Path) -> None:
    saved(tmp_path, {"quant_method": "compressed-tensors", "config_groups": {}})
    says = "compressed-tensors: .*pip install"
    refused(InputError, says, tmp_path, "lookup", runtime="transformers")


def four_bits(codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """The values of MXFP4, `[experts, rows, blocks, 32]`: two codes in a byte, the lower one first,
    and a power of two for each block."""
    values = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
    values = torch.cat([values, -values])
    both = torch.stack([codes & 15, codes >> 4], -1).flatten(-2).long()
    return values[both] * torch.exp2(scales.float() - 127)[..., None]


def save_four_bit_floats(folder: Path) -> dict[str, torch.Tensor]:
    """Write a GPT-OSS with random experts in MXFP4; return these as numbers, by name."""
    config = transformers.GptOssConfig(
        vocab_size=64, hidden_size=32, intermediate_size=32, num_hidden_layers=2, head_dim=16,
        num_attention_heads=2, num_key_value_heads=1, num_local_experts=4, pad_token_id=0,
    )  # fmt: skip
    transformers.GptOssForCausalLM(config).save_pretrained(folder)
    weights = load_file(folder / "model.safetensors")
    dice, plain = torch.Generator().manual_seed(0), {}
    for name in [n for n in weights if n.endswith(("experts.gate_up_proj", "experts.down_proj"))]:
        experts, columns, rows = weights.pop(name).shape  # inputs come first there
        codes = torch.randint(0, 256, (experts, rows, columns // 32, 16), generator=dice)
        scales = torch.randint(118, 124, (experts, rows, columns // 32), generator=dice)
        weights[f"{name}_blocks"], weights[f"{name}_scales"] = codes.byte(), scales.byte()
        plain[name] = four_bits(codes, scales).flatten(-2).transpose(1, 2)
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    named = json.loads((folder / "config.json").read_text())
    named["quantization_config"] = {"quant_method": "mxfp4"}
    (folder / "config.json").write_text(json.dumps(named))
    return plain


@pytest.mark.native
def test_four_bit_floats_of_experts_are_the_values_that_are_stored(tmp_path: Path) -> None:
    """And stay four bits natively."""
    plain = save_four_bit_floats(tmp_path)
    model = foretoken.load(tmp_path, "lookup", runtime="transformers").target.model
    for name, expected in plain.items():
        assert torch.equal(model.get_parameter(name), expected)
    for dtype in ("float32", "int4"):
        target: Any = foretoken.load(tmp_path, "lookup", runtime="native", dtype=dtype).target
        experts = [layer["experts"] for layer in target.passes.facts["layers"]]
        parts = [x for each in experts for name in ("gate", "up", "down") for x in each[name]]
        assert {part["kind"] for part in parts} == {"fp4"}
