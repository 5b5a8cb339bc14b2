"""The families that foretoken is tested with, each as a tiny random model.

Other families are admitted by the self-check of their own copies.
"""

from __future__ import annotations

from typing import Any

import transformers
from transformers import PreTrainedModel

CAUSAL = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
CAUSAL |= {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 1}
LEARNED = CAUSAL | {"max_position_embeddings": 128}
ROPE = LEARNED | {"intermediate_size": 48, "num_key_value_heads": 2}
WINDOWED = ROPE | {"sliding_window": 8}
MIXED = WINDOWED | {"head_dim": 8, "layer_types": ["sliding_attention", "full_attention"]}
EXPERTS = ROPE | {"num_local_experts": 4, "num_experts_per_tok": 2}
OPT = LEARNED | {"ffn_dim": 48, "word_embed_proj_dim": 32}
T5 = {"vocab_size": 64, "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4}
T5 |= {"decoder_start_token_id": 0}
GATED = T5 | {"feed_forward_proj": "gated-gelu", "tie_word_embeddings": False}
BART = {"vocab_size": 64, "d_model": 32, "max_position_embeddings": 128, "pad_token_id": 0}
BART |= {"eos_token_id": 1, "decoder_start_token_id": 2}
for stack in ("encoder", "decoder"):
    BART |= {f"{stack}_layers": 2, f"{stack}_attention_heads": 4, f"{stack}_ffn_dim": 48}

FAMILIES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "Llama": ("LlamaConfig", "LlamaForCausalLM", ROPE),
    "Qwen2": ("Qwen2Config", "Qwen2ForCausalLM", ROPE),
    "Qwen3": ("Qwen3Config", "Qwen3ForCausalLM", ROPE | {"head_dim": 8}),
    "Mistral": ("MistralConfig", "MistralForCausalLM", WINDOWED),
    "Gemma 2": ("Gemma2Config", "Gemma2ForCausalLM", MIXED),
    "Gemma 3": ("Gemma3TextConfig", "Gemma3ForCausalLM", MIXED),
    "Phi-3": ("Phi3Config", "Phi3ForCausalLM", ROPE),
    "GPT-2": ("GPT2Config", "GPT2LMHeadModel", LEARNED),
    "GPT-NeoX": ("GPTNeoXConfig", "GPTNeoXForCausalLM", LEARNED | {"intermediate_size": 48}),
    "OPT": ("OPTConfig", "OPTForCausalLM", OPT),
    "Mixtral": ("MixtralConfig", "MixtralForCausalLM", EXPERTS),
    "T5": ("T5Config", "T5ForConditionalGeneration", T5),
    "T5 v1.1": ("T5Config", "T5ForConditionalGeneration", GATED),
    "mT5": ("MT5Config", "MT5ForConditionalGeneration", GATED),
    "BART": ("BartConfig", "BartForConditionalGeneration", BART),
    "Marian": ("MarianConfig", "MarianMTModel", BART | {"decoder_vocab_size": 64}),
}


def build(name: str) -> PreTrainedModel:
    """A tiny random model of a family in `FAMILIES`."""
    config, model, settings = FAMILIES[name]
    return getattr(transformers, model)(getattr(transformers, config)(**settings)).eval()
