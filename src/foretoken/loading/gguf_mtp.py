"""Layers for multi-token prediction (MTP) in GGUF files.

llama.cpp's converter (conversion/qwen.py) numbers an MTP layer after the model's layers, adds 1 to
its norms, and has tensors `nextn` for the parts that other layers lack.
"""

from __future__ import annotations

import re
from pathlib import Path

import torch
from torch import Tensor

from foretoken.errors import RefusedError, format_value
from foretoken.loading import gguf

ARCHITECTURES = ("qwen35", "qwen35moe")  # the only ones with MTP that transformers loads
NORMS = {
    "nextn.enorm": "enorm",
    "nextn.hnorm": "hnorm",
    "nextn.shared_head_norm": "shared_head.norm",
    "attn_norm": "input_layernorm",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "post_attention_norm": "post_attention_layernorm",
}
PROJECTIONS = {
    "nextn.eh_proj": "eh_proj",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "ffn_gate_inp": "mlp.gate",
    "ffn_gate_shexp": "mlp.shared_expert.gate_proj",
    "ffn_up_shexp": "mlp.shared_expert.up_proj",
    "ffn_down_shexp": "mlp.shared_expert.down_proj",
    "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
}


def has_mtp_layer(file: Path) -> bool:
    """Return whether a GGUF file has an MTP layer of a supported architecture. Raises the reader's
    errors for a damaged file."""
    header = gguf.read_header(file)
    supported = header.fields["general.architecture"].contents() in ARCHITECTURES
    return supported and any(".nextn." in each.name for each in header.tensors)


def read_mtp_weights(name: str, file: Path, num_layers: int) -> dict[str, Tensor]:
    """Return the weights of a model's first MTP layer by their names in safetensors files, in
    float32; {} if there is no such layer.

    Args:
        name: The model's name, for error messages.
        file: The GGUF file.
        num_layers: The number of the model's layers without MTP layers.

    Raises:
        RefusedError: The file has an MTP layer of an unsupported architecture.
    """
    header, block = gguf.read_header(file), f"blk.{num_layers}."
    stored = {each.name for each in header.tensors if each.name.startswith(block)}
    if not any(".nextn." in key for key in stored):
        return {}
    if (kind := header.fields["general.architecture"].contents()) not in ARCHITECTURES:
        raise RefusedError(
            f"{name} is a GGUF file of architecture {format_value(kind)}, whose layer for "
            f"multi-token prediction is not supported (only {' and '.join(ARCHITECTURES)}); give "
            "the model's safetensors files, or another draft than 'mtp'"
        )
    weights: dict[str, Tensor] = {}
    for key in stored:
        part, values = key.removeprefix(block).removesuffix(".weight"), gguf.read_weight(file, key)
        assert values is not None
        if part in NORMS:
            weights[f"{NORMS[part]}.weight"] = values - 1
        elif part in PROJECTIONS:
            weights[f"{PROJECTIONS[part]}.weight"] = torch.atleast_2d(values)
        elif match := re.fullmatch("ffn_(gate|up|down)_exps", part):
            weights[match[1]] = values
    if "down" in weights:  # transformers joins the experts' first two projections
        weights["mlp.experts.down_proj"] = weights.pop("down")
        both = [weights.pop("gate"), weights.pop("up")]
        weights["mlp.experts.gate_up_proj"] = torch.cat(both, 1)
    return {f"layers.{num_layers}.{key}": x for key, x in weights.items()}
