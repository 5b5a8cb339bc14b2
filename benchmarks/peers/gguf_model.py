"""A Llama's folder as the one GGUF file that llama.cpp reads: f32, bf16, q8_0 or q4_0 matrices.

Beside q4_0 the embeddings and the output layer are q8_0, as the package's are beside int4.

Token ids only: the file has no tokenizer. Runs in llama.cpp's venv, without torch.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from answer import Refused
from gguf import GGMLQuantizationType, GGUFWriter, LlamaFileType
from gguf.quants import quantize

KINDS = {
    "float32": (GGMLQuantizationType.F32, LlamaFileType.ALL_F32),
    "bfloat16": (GGMLQuantizationType.BF16, LlamaFileType.MOSTLY_BF16),
    "int8": (GGMLQuantizationType.Q8_0, LlamaFileType.MOSTLY_Q8_0),
    "int4": (GGMLQuantizationType.Q4_0, LlamaFileType.MOSTLY_Q4_0),
}
NAMES = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
ENDS = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}
STORED = {"F32": np.float32, "F16": np.float16, "BF16": np.uint16}


def write(folder: Path, file: Path, dtype: str) -> None:
    """Write the model in `folder` to `file`."""
    config = json.loads((folder / "config.json").read_text())
    rope = config.get("rope_parameters") or {}
    if config["model_type"] != "llama" or rope.get("rope_type", "default") != "default":
        raise Refused(f"{folder} is no plain Llama; llama.cpp's file is written for that only")
    kind, label = KINDS[dtype]
    writer = GGUFWriter(file, "llama")
    writer.add_file_type(label)
    _shape(writer, config, float(rope.get("rope_theta", 10000.0)))
    for name, values in tensors(folder):
        if name == "lm_head.weight" and config.get("tie_word_embeddings"):
            continue
        values = _paired(name, values, config)
        raw = GGMLQuantizationType.F32 if values.ndim == 1 else kind
        if dtype == "int4" and name in ENDS and values.ndim > 1:
            raw = GGMLQuantizationType.Q8_0
        quantized = values if raw == GGMLQuantizationType.F32 else quantize(values, raw)
        writer.add_tensor(_name(name), quantized, raw_dtype=raw)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _shape(writer: GGUFWriter, config: dict[str, Any], theta: float) -> None:
    heads = config["num_attention_heads"]
    width = config.get("head_dim") or config["hidden_size"] // heads
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(config.get("num_key_value_heads") or heads)
    writer.add_key_length(width)
    writer.add_value_length(width)
    writer.add_rope_dimension_count(width)
    writer.add_rope_freq_base(theta)
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_vocab_size(config["vocab_size"])
    writer.add_tokenizer_model("no_vocab")


def _name(name: str) -> str:
    if name in ENDS:
        return ENDS[name]
    _, _, layer, part = name.split(".", 3)
    return f"blk.{layer}.{NAMES[part.removesuffix('.weight')]}.weight"


def _paired(name: str, values: np.ndarray, config: dict[str, Any]) -> np.ndarray:
    """llama.cpp turns neighbours, transformers turns a head's halves against each other."""
    if not name.endswith(("q_proj.weight", "k_proj.weight")):
        return values
    heads = config["num_attention_heads"]
    if ".k_proj" in name:
        heads = config.get("num_key_value_heads") or heads
    halves = values.reshape(heads, 2, -1, values.shape[1])
    return np.ascontiguousarray(halves.swapaxes(1, 2)).reshape(values.shape)


def tensors(folder: Path) -> Iterator[tuple[str, np.ndarray]]:
    """Every tensor of a saved model by name, float32."""
    for file in sorted(folder.glob("*.safetensors")):
        data = np.memmap(file, dtype=np.uint8, mode="r")
        start = 8 + int(data[:8].view(np.uint64)[0])
        header = json.loads(bytes(data[8:start]))
        for name, entry in header.items():
            if name == "__metadata__":
                continue
            begin, end = entry["data_offsets"]
            array = np.array(data[start + begin : start + end]).view(STORED[entry["dtype"]])
            if entry["dtype"] == "BF16":  # the upper half of a float32
                array = (array.astype(np.uint32) << 16).view(np.float32)
            yield name, array.astype(np.float32).reshape(entry["shape"])
