"""A model's folder as the one GGUF file that llama.cpp reads: f32, bf16, q8_0 or q4_0 matrices.

Llama, and the text models of Qwen3.5: there the recurrence's keys are normed with the file's one
eps, which is 1e-6 in transformers.

Beside q4_0 the embeddings and the output layer are q8_0, as the package's are beside int4. In int8
and int4, matrices of q4_1 blocks stay so, as they do in the package: the same model. They are known
where each block has its least and its greatest integer, as files mostly have them. The kind "q4_0"
rounds them to blocks without offsets.

Token ids only: the file has no tokenizer. Runs in llama.cpp's venv, without torch.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from answer import Refused
from gguf import GGMLQuantizationType, GGUFWriter, LlamaFileType
from gguf.quants import dequantize, quantize

KINDS = {
    "float32": (GGMLQuantizationType.F32, LlamaFileType.ALL_F32),
    "bfloat16": (GGMLQuantizationType.BF16, LlamaFileType.MOSTLY_BF16),
    "int8": (GGMLQuantizationType.Q8_0, LlamaFileType.MOSTLY_Q8_0),
    "int4": (GGMLQuantizationType.Q4_0, LlamaFileType.MOSTLY_Q4_0),
    "q4_0": (GGMLQuantizationType.Q4_0, LlamaFileType.MOSTLY_Q4_0),
}
BOTH = {
    "input_layernorm.weight": "attn_norm.weight",
    "self_attn.q_proj.weight": "attn_q.weight",
    "self_attn.k_proj.weight": "attn_k.weight",
    "self_attn.v_proj.weight": "attn_v.weight",
    "self_attn.o_proj.weight": "attn_output.weight",
    "mlp.gate_proj.weight": "ffn_gate.weight",
    "mlp.up_proj.weight": "ffn_up.weight",
    "mlp.down_proj.weight": "ffn_down.weight",
}
LLAMA = BOTH | {"post_attention_layernorm.weight": "ffn_norm.weight"}
QWEN = BOTH | {
    "post_attention_layernorm.weight": "post_attention_norm.weight",
    "self_attn.q_norm.weight": "attn_q_norm.weight",
    "self_attn.k_norm.weight": "attn_k_norm.weight",
    "linear_attn.in_proj_qkv.weight": "attn_qkv.weight",
    "linear_attn.in_proj_z.weight": "attn_gate.weight",
    "linear_attn.in_proj_a.weight": "ssm_alpha.weight",
    "linear_attn.in_proj_b.weight": "ssm_beta.weight",
    "linear_attn.conv1d.weight": "ssm_conv1d.weight",
    "linear_attn.dt_bias": "ssm_dt.bias",
    "linear_attn.A_log": "ssm_a",
    "linear_attn.norm.weight": "ssm_norm.weight",
    "linear_attn.out_proj.weight": "ssm_out.weight",
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
    form = FORMS.get(config["model_type"])
    if form is None or rope.get("rope_type", "default") != "default":
        raise Refused(
            f"{folder} is no plain Llama and no text model of Qwen3.5; "
            "llama.cpp's file is written for those only"
        )
    kind, label = KINDS[dtype]
    writer = GGUFWriter(file, form.name)
    _shape(writer, config, rope)
    form.add(writer, config)
    kinds = set[GGMLQuantizationType]()
    for name, values in tensors(folder):
        if name == "lm_head.weight" and config.get("tie_word_embeddings"):
            continue
        place, values = _name(name, form.names), form.turned(name, values, config)
        raw = GGMLQuantizationType.F32 if values.ndim == 1 or "conv1d" in name else kind
        if dtype in ("int4", "q4_0") and name in ENDS and values.ndim > 1:
            raw = GGMLQuantizationType.Q8_0
        if dtype in ("int8", "int4") and raw != GGMLQuantizationType.F32 and _are_q4_1(values):
            raw = GGMLQuantizationType.Q4_1
        if values.ndim > 1 and name not in ENDS:
            kinds.add(raw)
        quantized = values if raw == GGMLQuantizationType.F32 else quantize(values, raw)
        writer.add_tensor(place, quantized, raw_dtype=raw)
    all_q4_1 = kinds == {GGMLQuantizationType.Q4_1}
    writer.add_file_type(LlamaFileType.MOSTLY_Q4_1 if all_q4_1 else label)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _are_q4_1(values: np.ndarray) -> bool:
    """Whether a matrix consists of such blocks, to the bit, as one from a GGUF file may."""
    kind = GGMLQuantizationType.Q4_1
    if values.ndim != 2 or values.shape[1] % 32:
        return False
    return bool((dequantize(quantize(values, kind), kind) == values).all())


def _shape(writer: GGUFWriter, config: dict[str, Any], rope: dict[str, Any]) -> None:
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
    writer.add_rope_dimension_count(int(width * rope.get("partial_rotary_factor", 1)))
    writer.add_rope_freq_base(float(rope.get("rope_theta", 10000.0)))
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_vocab_size(config["vocab_size"])
    # Its server needs a vocabulary; this kind may have no token that ends a sequence
    writer.add_tokenizer_model("rwkv")
    writer.add_token_list([f"t{i} " for i in range(config["vocab_size"])])


def _states(writer: GGUFWriter, config: dict[str, Any]) -> None:
    """Qwen3.5's layers: which ones keep states, and of what size."""
    width, heads = config["linear_key_head_dim"], config["linear_num_value_heads"]
    if config["linear_value_head_dim"] != width:
        raise Refused("llama.cpp's file has one width for keys and values of a recurrence")
    writer.add_ssm_conv_kernel(config["linear_conv_kernel_dim"])
    writer.add_ssm_state_size(width)
    writer.add_ssm_group_count(config["linear_num_key_heads"])
    writer.add_ssm_time_step_rank(heads)
    writer.add_ssm_inner_size(heads * width)
    recurrent = [kind == "linear_attention" for kind in config["layer_types"]]
    writer.add_array("qwen35.attention.recurrent_layers", recurrent)
    # Shares of time, height and width in a position: in a text they are the same number
    writer.add_rope_dimension_sections([11, 11, 10, 0])


def _name(name: str, names: dict[str, str]) -> str:
    if name in ENDS:
        return ENDS[name]
    _, _, layer, part = [*name.split(".", 3), "", "", ""][:4]
    if part not in names:
        raise Refused(f"llama.cpp's file has no place for {name}")
    return f"blk.{layer}.{names[part]}"


def _paired(name: str, values: np.ndarray, config: dict[str, Any]) -> np.ndarray:
    """llama.cpp turns neighbours, transformers turns a head's halves against each other."""
    if not name.endswith(("q_proj.weight", "k_proj.weight")):
        return values
    heads = config["num_attention_heads"]
    if ".k_proj" in name:
        heads = config.get("num_key_value_heads") or heads
    halves = values.reshape(heads, 2, -1, values.shape[1])
    return np.ascontiguousarray(halves.swapaxes(1, 2)).reshape(values.shape)


def _plain(name: str, values: np.ndarray, config: dict[str, Any]) -> np.ndarray:
    """Qwen3.5's norms as factors, its decays as such, one value head of each key head in turn."""
    part = name.removesuffix(".weight")
    if part.endswith("norm") and not part.endswith("linear_attn.norm"):
        return values + 1
    if ".linear_attn." not in name or part.endswith(".norm"):
        return values
    if part.endswith("A_log"):
        values = -np.exp(values)
    if part.endswith("conv1d"):
        values = values.squeeze(1)
    return _tiled(part, values, config)


def _tiled(part: str, values: np.ndarray, config: dict[str, Any]) -> np.ndarray:
    """transformers has the value heads of a key head side by side."""
    keys, heads = config["linear_num_key_heads"], config["linear_num_value_heads"]
    order = np.arange(heads).reshape(keys, -1).T.ravel()
    if part.endswith("out_proj"):
        return values.reshape(len(values), heads, -1)[:, order].reshape(values.shape)
    first = 0  # row of the values; before them are queries and keys
    if part.endswith(("in_proj_qkv", "conv1d")):
        first = 2 * keys * config["linear_key_head_dim"]
    rows = values[first:].reshape(heads, -1, *values.shape[1:])[order]
    return np.concatenate([values[:first], rows.reshape(values[first:].shape)])


class Form(NamedTuple):
    """How llama.cpp wants a family."""

    name: str
    names: dict[str, str]  # of a layer's tensors
    add: Callable[[GGUFWriter, dict[str, Any]], None]  # the settings that others have not
    turned: Callable[[str, np.ndarray, dict[str, Any]], np.ndarray]


FORMS = {
    "llama": Form("llama", LLAMA, lambda writer, config: None, _paired),
    "qwen3_5_text": Form("qwen35", QWEN, _states, _plain),
}


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
