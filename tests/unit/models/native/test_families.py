"""Each thing that the native decoder knows of families, by the self-check of one that has it: its
logits are transformers', and equal to the bit on every instruction set."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from transformers import PreTrainedModel

import tiny_families
from foretoken.models.native.conversion import NativeConversion
from foretoken.models.native.model import NativeModel
from foretoken.models.stock.selfcheck import TOLERANCE, deviation, stir
from tiny_families import LEARNED, MIXED, ROPE

pytestmark = [pytest.mark.cpu_only, pytest.mark.native]

HALF = {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}}
NARROW = {"hidden_size": 40, "num_attention_heads": 2}  # heads of 20 numbers
FALCON = LEARNED | {"alibi": False}
GROWING = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 8.0, "llama_4_scaling_beta": 0.5}
GROWING |= {"original_max_position_embeddings": 16, "mscale": 1.0, "mscale_all_dim": 1.0}
YARN = {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0}}
YARN["rope_parameters"] |= {"original_max_position_embeddings": 32}
LLAMA3 = {"rope_type": "llama3", "rope_theta": 1e4, "factor": 8.0, "low_freq_factor": 1.0}
LLAMA3 |= {"high_freq_factor": 4.0, "original_max_position_embeddings": 32}
GRANITE = {"embedding_multiplier": 3.0, "logits_scaling": 2.0, "residual_multiplier": 0.5}
GRANITE |= {"attention_multiplier": 0.2, "sliding_window": 8}

# What is proved: the classes' prefix, and the settings of a tiny model
SHORT: dict[str, tuple[str, str, dict[str, Any]]] = {
    "norms of all heads together": ("Olmo2Config", "Olmo2ForCausalLM", ROPE),
    "norms of each head, parallel parts": (
        "CohereConfig", "CohereForCausalLM", ROPE | {"use_qk_norm": True, "logit_scale": 0.5}
    ),
    "norms behind the turn": ("HunYuanDenseV1Config", "HunYuanDenseV1ForCausalLM", ROPE | {"head_dim": 8}),
    "no norms' weights, clipped": ("OlmoConfig", "OlmoForCausalLM", ROPE | {"clip_qkv": 0.5}),
    "learned positions": ("OPTConfig", "OPTForCausalLM", tiny_families.OPT),
    "ALiBi, embeddings normed": ("BloomConfig", "BloomForCausalLM", LEARNED | {"n_head": 4, "n_layer": 2}),
    "groups of queries in one product": (
        "FalconConfig", "FalconForCausalLM",
        FALCON | {"new_decoder_architecture": True, "num_kv_heads": 2},
    ),
    "xIELU": ("ApertusConfig", "ApertusForCausalLM", ROPE | {"hidden_act": "xielu"}),
    "sinks, multipliers": ("GraniteSWAConfig", "GraniteSWAForCausalLM", ROPE | GRANITE),
    "queries that grow": ("Ministral3Config", "Ministral3ForCausalLM", ROPE | {"rope_parameters": GROWING, "head_dim": 8}),
    "caps, windows": ("Gemma2Config", "Gemma2ForCausalLM", MIXED),
    "values normed, factors of layers": (
        "Gemma4TextConfig", "Gemma4ForCausalLM",
        MIXED | {"hidden_size_per_layer_input": 0, "num_kv_shared_layers": 0,
                 "vocab_size_per_layer_input": 64, "attention_k_eq_v": True,
                 "num_global_key_value_heads": 1, "global_head_dim": 16},
    ),
    "layers without positions": (
        "SmolLM3Config", "SmolLM3ForCausalLM", ROPE | {"no_rope_layers": [1, 0]}
    ),
}  # fmt: skip
LONG: dict[str, tuple[str, str, dict[str, Any]]] = {
    "GPT-2 by layers": ("GPT2Config", "GPT2LMHeadModel", LEARNED | {"scale_attn_by_inverse_layer_idx": True}),
    "GPT-Neo": ("GPTNeoConfig", "GPTNeoForCausalLM", {
        "vocab_size": 64, "hidden_size": 32, "num_layers": 2, "num_heads": 4, "window_size": 8,
        "attention_types": [[["global", "local"], 1]], "max_position_embeddings": 128,
        "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 1}),
    "GPT-J": ("GPTJConfig", "GPTJForCausalLM", LEARNED | {"rotary_dim": 4, "n_inner": 48}),
    "CodeGen": ("CodeGenConfig", "CodeGenForCausalLM", LEARNED | {"rotary_dim": 4, "n_inner": 48}),
    "BigCode": ("GPTBigCodeConfig", "GPTBigCodeForCausalLM", LEARNED),
    "BigCode of many": ("GPTBigCodeConfig", "GPTBigCodeForCausalLM", LEARNED | {"multi_query": False}),
    "GPT-NeoX in turn": ("GPTNeoXConfig", "GPTNeoXForCausalLM",
                         LEARNED | HALF | {"use_parallel_residual": False, "intermediate_size": 48}),
    "MPT": ("MptConfig", "MptForCausalLM", {
        "vocab_size": 64, "d_model": 32, "n_heads": 4, "n_layers": 2, "max_seq_len": 128,
        "attn_config": {"clip_qkv": 0.5}}),
    "MPT of six": ("MptConfig", "MptForCausalLM", {
        "vocab_size": 64, "d_model": 48, "n_heads": 6, "n_layers": 2, "max_seq_len": 128}),
    "Falcon 7b": ("FalconConfig", "FalconForCausalLM", FALCON),
    "Falcon in turn": ("FalconConfig", "FalconForCausalLM",
                       FALCON | {"multi_query": False, "parallel_attn": False, "bias": True}),
    "Falcon 11b": ("FalconConfig", "FalconForCausalLM", FALCON | {
        "new_decoder_architecture": True, "num_kv_heads": 2, "num_ln_in_parallel_attn": 1}),
    "StableLM": ("StableLmConfig", "StableLmForCausalLM", ROPE | HALF | {"qk_layernorm": True}),
    "StableLM at once": ("StableLmConfig", "StableLmForCausalLM",
                         ROPE | HALF | {"use_parallel_residual": True, "use_qkv_bias": True}),
    "Phi": ("PhiConfig", "PhiForCausalLM", ROPE | HALF | {"qk_layernorm": True}),
    "Phi-4": ("Phi3Config", "Phi3ForCausalLM", ROPE | HALF),
    "Nemotron": ("NemotronConfig", "NemotronForCausalLM", ROPE | HALF),
    "Persimmon": ("PersimmonConfig", "PersimmonForCausalLM", LEARNED | HALF | {"intermediate_size": 48}),
    "Cohere 2": ("Cohere2Config", "Cohere2ForCausalLM", MIXED),
    "OLMo 3": ("Olmo3Config", "Olmo3ForCausalLM", MIXED),
    "EXAONE 4": ("Exaone4Config", "Exaone4ForCausalLM", MIXED),
    "GLM": ("GlmConfig", "GlmForCausalLM", ROPE | HALF | {"head_dim": 8}),
    "GLM 4": ("Glm4Config", "Glm4ForCausalLM", ROPE | HALF | {"head_dim": 8}),
    "Helium": ("HeliumConfig", "HeliumForCausalLM", ROPE | {"head_dim": 8}),
    "ERNIE 4.5": ("Ernie4_5Config", "Ernie4_5ForCausalLM", ROPE | {"head_dim": 8}),
    "Starcoder 2": ("Starcoder2Config", "Starcoder2ForCausalLM", tiny_families.WINDOWED),
    "Seed-OSS": ("SeedOssConfig", "SeedOssForCausalLM", ROPE | {"head_dim": 8}),
    "Llama of narrow heads": ("LlamaConfig", "LlamaForCausalLM", ROPE | NARROW),
    "Llama with biases": ("LlamaConfig", "LlamaForCausalLM", ROPE | {"attention_bias": True, "mlp_bias": True}),
    "Llama 3": ("LlamaConfig", "LlamaForCausalLM", ROPE | {"rope_parameters": LLAMA3}),
    "YaRN": ("LlamaConfig", "LlamaForCausalLM", ROPE | YARN),
    "Gemma": ("GemmaConfig", "GemmaForCausalLM", ROPE | {"head_dim": 8}),
    "BioGPT": ("BioGptConfig", "BioGptForCausalLM", LEARNED | {"intermediate_size": 48}),
    "XGLM": ("XGLMConfig", "XGLMForCausalLM", {
        "vocab_size": 64, "d_model": 32, "num_layers": 2, "attention_heads": 4, "ffn_dim": 48,
        "max_position_embeddings": 128, "pad_token_id": 1, "eos_token_id": 2}),
}  # fmt: skip
DENSE = [n for n in tiny_families.FAMILIES if n not in ("Mixtral", "T5", "T5 v1.1", "mT5", "BART", "Marian")]
EVERY = SHORT | {
    name: each
    for name, each in (tiny_families.FAMILIES | LONG).items()
    if name in LONG or name in DENSE
}  # fmt: skip


def built(name: str) -> PreTrainedModel:
    config, model, settings = EVERY[name]
    torch.manual_seed(0)
    made = getattr(transformers, model)(getattr(transformers, config)(**settings)).eval()
    stir(made)
    with torch.no_grad():  # no norm, bias or factor is what it is in a new model
        for weight in made.state_dict(keep_vars=True).values():
            if weight.ndim == 1 and weight.is_floating_point():
                weight.add_(0.3 * torch.randn(weight.shape))
    return made


def native(network: PreTrainedModel) -> NativeModel:
    return NativeConversion(None, "float32", lambda: network).model()


@pytest.mark.parametrize(
    "name", [*SHORT, *(pytest.param(n, marks=pytest.mark.prove) for n in EVERY if n not in SHORT)]
)
@torch.inference_mode()
def test_logits_are_transformers(name: str) -> None:
    model = built(name)
    assert deviation(model, native(model)) < TOLERANCE
