"""A GGUF file of a tiny Llama, as llama.cpp's converter writes them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGMLQuantizationType, GGUFWriter, quants
from torch import Tensor
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

LAYER = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
}
NORMAL, CONTROL = 1, 3  # kinds of tokens


def write_gguf(
    file: Path,
    model: LlamaForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    kind: GGMLQuantizationType = GGMLQuantizationType.Q8_0,
    template: str | None = None,
    ends: dict[str, int] | None = None,
    layers: int | None = None,
) -> None:
    """Write a model and its tokenizer of bytes; matrices in blocks of this kind. ends: the ids of
    the fields eos, eot and eom; None: eos is 0. layers: their number by the header; None: the
    model's."""
    writer, config = GGUFWriter(file, "llama"), model.config
    writer.add_name("tiny")
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers if layers is None else layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_rope_dimension_count(config.hidden_size // config.num_attention_heads)
    writer.add_vocab_size(config.vocab_size)
    _words(writer, tokenizer, config.vocab_size)
    for name, token in ({"eos": 0} if ends is None else ends).items():
        writer.add_uint32(f"tokenizer.ggml.{name}_token_id", token)
    if template is not None:
        writer.add_chat_template(template)
    for name, values in _tensors(model).items():
        if values.ndim == 1:
            writer.add_tensor(name, values)
        else:
            writer.add_tensor(name, quants.quantize(values, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


QWEN = {
    **{name: own for name, own in LAYER.items() if name != "ffn_norm"},
    "post_attention_norm": "post_attention_layernorm",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "attn_qkv": "linear_attn.in_proj_qkv",
    "attn_gate": "linear_attn.in_proj_z",
    "ssm_alpha": "linear_attn.in_proj_a",
    "ssm_beta": "linear_attn.in_proj_b",
    "ssm_conv1d": "linear_attn.conv1d",
    "ssm_norm": "linear_attn.norm",
    "ssm_out": "linear_attn.out_proj",
    "ffn_gate_inp": "mlp.gate",
    "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
    "ffn_gate_shexp": "mlp.shared_expert.gate_proj",
    "ffn_up_shexp": "mlp.shared_expert.up_proj",
    "ffn_down_shexp": "mlp.shared_expert.down_proj",
}
NEXTN = {
    "enorm": "nextn.enorm",
    "hnorm": "nextn.hnorm",
    "eh_proj": "nextn.eh_proj",
    "post_norm": "nextn.shared_head_norm",
}


def write_qwen(
    file: Path, model: Any, tokenizer: PreTrainedTokenizerFast, mtp: dict[str, Tensor]
) -> None:
    """Write a Qwen3.5 or its mixture of experts, in float32. mtp: its layer for multi-token
    prediction by transformers' names, or {}. There are as many heads of values as of keys, which
    llama.cpp would otherwise reorder."""
    c = model.config
    kind = "qwen35" if c.model_type == "qwen3_5_text" else "qwen35moe"
    writer = GGUFWriter(file, kind)
    writer.add_context_length(c.max_position_embeddings)
    writer.add_embedding_length(c.hidden_size)
    writer.add_block_count(c.num_hidden_layers + bool(mtp))
    writer.add_nextn_predict_layers(int(bool(mtp)))
    writer.add_head_count(c.num_attention_heads)
    writer.add_head_count_kv(c.num_key_value_heads)
    writer.add_key_length(c.head_dim)
    writer.add_layer_norm_rms_eps(c.rms_norm_eps)
    writer.add_full_attention_interval(c.num_hidden_layers)
    writer.add_rope_freq_base(c.rope_parameters["rope_theta"])
    writer.add_rope_dimension_count(int(c.head_dim * c.rope_parameters["partial_rotary_factor"]))
    writer.add_rope_dimension_sections([11, 11, 10, 0])
    writer.add_ssm_conv_kernel(c.linear_conv_kernel_dim)
    writer.add_ssm_state_size(c.linear_key_head_dim)
    writer.add_ssm_group_count(c.linear_num_key_heads)
    writer.add_ssm_time_step_rank(c.linear_num_value_heads)
    writer.add_ssm_inner_size(c.linear_num_value_heads * c.linear_value_head_dim)
    if kind == "qwen35":
        writer.add_feed_forward_length(c.intermediate_size)
    else:
        writer.add_expert_feed_forward_length(c.moe_intermediate_size)
        writer.add_expert_shared_feed_forward_length(c.shared_expert_intermediate_size)
        writer.add_expert_count(c.num_experts)
        writer.add_expert_used_count(c.num_experts_per_tok)
    _words(writer, tokenizer, c.vocab_size)
    writer.add_eos_token_id(0)
    own = {f"blk.{c.num_hidden_layers}.{k}": x for k, x in mtp.items()}
    for name, x in (model.state_dict() | own).items():
        for stored, values in _qwen_tensors(name, x.float()):
            writer.add_tensor(stored, values.contiguous().numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _qwen_tensors(name: str, x: Tensor) -> list[tuple[str, Tensor]]:
    """A weight by its names in the file, with its values there: norms around 1, and others."""
    ends = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
    part = name.removesuffix(".weight").replace("mtp_block.", "").replace("model.layers.", "blk.")
    if part in ends:
        return [(f"{ends[part]}.weight", x + ("norm" in part))]
    _, layer, leaf = part.split(".", 2)
    at = f"blk.{layer}."
    if leaf == "linear_attn.A_log":
        return [(f"{at}ssm_a", -x.exp())]
    if leaf == "linear_attn.dt_bias":
        return [(f"{at}ssm_dt.bias", x)]
    if leaf == "mlp.experts.gate_up_proj":
        gate, up = x.chunk(2, 1)
        return [(f"{at}ffn_gate_exps.weight", gate), (f"{at}ffn_up_exps.weight", up)]
    if leaf == "mlp.experts.down_proj":
        return [(f"{at}ffn_down_exps.weight", x)]
    stored = NEXTN.get(leaf) or next(key for key, own in QWEN.items() if own == leaf)
    centred = "norm" in leaf and leaf != "linear_attn.norm"
    return [(f"{at}{stored}.weight", (x + centred).squeeze())]


def _words(writer: GGUFWriter, tokenizer: PreTrainedTokenizerFast, V: int) -> None:
    model: Any = json.loads(tokenizer.backend_tokenizer.to_str())["model"]
    tokens = [tokenizer.convert_ids_to_tokens(i) or f"[UNUSED{i}]" for i in range(V)]
    special = {i for i, token in tokenizer.added_tokens_decoder.items() if token.special}
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("default")
    writer.add_token_list(tokens)
    writer.add_token_types([CONTROL if i in special else NORMAL for i in range(V)])
    writer.add_token_merges(
        [each if isinstance(each, str) else " ".join(each) for each in model["merges"]]
    )
    writer.add_bos_token_id(0)


def _tensors(model: LlamaForCausalLM) -> dict[str, np.ndarray]:
    weights = model.state_dict()
    config = model.config
    named = {"token_embd.weight": weights["model.embed_tokens.weight"]}
    named |= {
        "output_norm.weight": weights["model.norm.weight"],
        "output.weight": weights["lm_head.weight"],
    }
    for i in range(config.num_hidden_layers):
        for name, own in LAYER.items():
            values = weights[f"model.layers.{i}.{own}.weight"]
            heads = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads}
            named[f"blk.{i}.{name}.weight"] = (
                _turned(values, heads[name]) if name in heads else values
            )
    return {name: values.float().numpy() for name, values in named.items()}


def _turned(weight: Tensor, heads: int) -> Tensor:
    """The halves that rotary positions turn are interleaved in such files."""
    rows, columns = weight.shape
    return weight.view(heads, 2, rows // heads // 2, columns).transpose(1, 2).reshape(rows, columns)
