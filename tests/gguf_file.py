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
