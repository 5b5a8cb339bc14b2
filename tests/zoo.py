"""Every class of transformers' maps that generates text, as a tiny random model."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import torch
import transformers
from transformers import CONFIG_MAPPING, PreTrainedConfig, PreTrainedModel
from transformers.models.auto import modeling_auto as auto

from foretoken.models.stock.selfcheck import stir

MAPS = (
    auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES,
    auto.MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING_NAMES,
    auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
)
V, LARGEST = 64, 250_000_000
NAMES = {
    V: "vocab_size decoder_vocab_size vocab_size_per_layer_input",
    2: "num_hidden_layers num_layers encoder_layers decoder_layers num_decoder_layers "
    "num_encoder_layers n_layer n_layers depth num_encoder_blocks",
    4: "num_local_experts num_experts n_routed_experts moe_num_experts",
    1: "bos_token_id eos_token_id n_group topk_group",
    0: "pad_token_id decoder_start_token_id",
}
TOP = "num_experts_per_tok top_k num_experts_per_token moe_topk moe_k moe_top_k top_k_experts"
WIDTHS = {
    64: "hidden_size d_model n_embd embed_dim word_embed_proj_dim d_embed "
    "cross_attention_hidden_size",
    4: "num_attention_heads num_heads n_head n_heads encoder_attention_heads "
    "decoder_attention_heads",
    48: "intermediate_size ffn_dim encoder_ffn_dim decoder_ffn_dim d_ff n_inner "
    "moe_intermediate_size shared_expert_intermediate_size",
    16: "head_dim d_kv",
}
# What some configurations leave open, though the model cannot be built without
OPEN = {"head_dim": 16, "num_key_value_heads": 2, "n_routed_experts": 4, "num_experts": 4}
OPEN |= {"num_experts_per_tok": 2, "top_k_experts": 2, "n_shared_experts": 1, "n_group": 1}
OPEN |= {"topk_group": 1, "moe_intermediate_size": 48, "pad_token_id": 0}

# By class: settings of its parts beside these, by hand
AXES = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [16, 24, 24]}
INDEXER = {"indexer_n_heads": 2, "indexer_kv_heads": 1, "indexer_head_dim": 16}
STATE_SPACE = {"mamba_n_heads": 4, "mamba_d_head": 32, "mamba_d_state": 16}
PERIODS = {"attn_layer_period": 2, "attn_layer_offset": 1}
HYBRID = ["linear_attention", "full_attention"]
SETTINGS: dict[str, dict[str, Any]] = {
    "BambaForCausalLM": STATE_SPACE | {"attn_layer_indices": [1], "mamba_chunk_size": 8},
    "CodeGenForCausalLM": {"rotary_dim": 8},
    "GPTJForCausalLM": {"rotary_dim": 8},
    "GraniteMoeHybridForCausalLM": STATE_SPACE | {"layer_types": HYBRID},
    "JambaForCausalLM": PERIODS | {"mamba_dt_rank": 4},
    "KimiLinearForCausalLM": {
        "layer_types": HYBRID, "linear_head_dim": 16, "linear_num_heads": 4
    },
    "Lfm3ForCausalLM": {"layer_types": ["conv", "full_attention"]},
    "Mamba2ForCausalLM": {"num_heads": 4, "head_dim": 32, "n_groups": 2, "state_size": 16},
    "NemotronHForCausalLM": {
        "layers_block_type": HYBRID, "mamba_num_heads": 4, "mamba_head_dim": 32,
        "ssm_state_size": 16, "n_groups": 2,
    },
    "RwkvForCausalLM": {"attention_hidden_size": 64},
    "xLSTMForCausalLM": {"embedding_dim": 64, "num_blocks": 2},
    "BltForCausalLM": {"encoder_hash_byte_group_vocab": 128},
    "ChameleonForConditionalGeneration": {"vocabulary_map": {"<image>": 5, "IMGIMGA": 6}},
    "DeepseekOcr2ForConditionalGeneration": {"mlp_layer_types": ["dense", "sparse"]},
    "Gemma3nForCausalLM": {"num_kv_shared_layers": 0},
    "Gemma4UnifiedAssistantForCausalLM": {"num_kv_shared_layers": 0},
    "Granite4VisionForConditionalGeneration": {
        "deepstack_layer_map": [], "downsample_rate": "4/8", "spatial_target_layers": []
    },
    "KyutaiSpeechToTextForConditionalGeneration": {
        "audio_pad_token_id": 70, "codebook_vocab_size": 17
    },
    "Lfm2MoeForCausalLM": {"layer_types": ["full_attention", "conv"]},
    "Qwen2VLForConditionalGeneration": {"rope_parameters": AXES, "hidden_size": 512},
    "Qwen2_5_VLForConditionalGeneration": {"rope_parameters": AXES, "hidden_size": 512},
    "Qwen4ExpForCausalLM": INDEXER
    | {"indexer_budget": 16, "indexer_compress_ratio": 2, "ple_layer_ids": []},
    "Qwen4ExpForConditionalGeneration": INDEXER
    | {"indexer_budget": 16, "indexer_compress_ratio": 2, "ple_layer_ids": []},
}  # fmt: skip
DEFAULT = "transformers cannot build its default configuration, and no other is public"
TIMM = "its images are read by timm, which is no dependency"
LARGE = "its encoder of sounds or images has hundreds of millions of parameters at any setting here"
# Classes that are not tried, and why
NOT_BUILT = {
    "CohereCompassForCausalLM": DEFAULT,
    "CohereCompassForConditionalGeneration": DEFAULT,
    "DbrxForCausalLM": DEFAULT,
    "Ernie4_5_VLMoeForConditionalGeneration": "it builds at its full size only, 397M parameters",
    "Gemma4AssistantForCausalLM": DEFAULT,
    "MoonshineStreamingForConditionalGeneration": DEFAULT,
    "Emu3ForConditionalGeneration": LARGE,
    "VibeVoiceAsrForConditionalGeneration": LARGE,
    "VibeVoiceForConditionalGeneration": LARGE,
    "FastVlmForConditionalGeneration": TIMM,
    "Gemma3nForConditionalGeneration": TIMM,
    "PerceptionLMForConditionalGeneration": TIMM,
}


def classes() -> dict[str, str]:
    """Names of the classes, each with the type of its configuration."""
    return {
        name: kind
        for names in MAPS
        for kind, listed in names.items()
        for name in ([listed] if isinstance(listed, str) else listed)
    }


def build(name: str) -> PreTrainedModel:
    """A tiny model of that class, random and far from flat; raises whatever its code raises."""
    cls = getattr(transformers, name)
    config = (cls.config_class or CONFIG_MAPPING[classes()[name]])()
    problem: Exception | None = None
    for narrow in (True, False):
        try:
            small = tiny(config, narrow=narrow, **SETTINGS.get(name, {}))
            with torch.device("meta"):
                size = sum(weight.numel() for weight in cls(small).parameters())
            if size > LARGEST:
                raise MemoryError(f"{name} has {size} parameters")
            torch.manual_seed(0)
            model = cls(small).eval()
            stir(model)
            return _ended(model)
        except Exception as error:
            problem = problem or error
    assert problem is not None
    raise problem


def _ended(model: PreTrainedModel) -> PreTrainedModel:
    """With ids that a text of an encoder-decoder begins with, and none that end one."""
    config: Any = getattr(model, "generation_config", None)
    if config is None:
        return model
    config.eos_token_id = config.forced_eos_token_id = config.forced_bos_token_id = None
    config.pad_token_id, config.num_beams = 0, 1
    config.suppress_tokens = config.begin_suppress_tokens = None  # ids of the real vocabulary
    if model.config.is_encoder_decoder and config.decoder_start_token_id is None:
        config.decoder_start_token_id = 0
    return model


def tiny(config: PreTrainedConfig, *, narrow: bool, **settings: Any) -> PreTrainedConfig:
    """Two layers, few ids, and where `narrow` small widths."""
    config = copy.deepcopy(config)
    for part in _parts(config):
        _shorten(part)
        sizes = {name: value for value, names in NAMES.items() for name in names.split()}
        sizes |= dict.fromkeys(TOP.split(), 2)
        if narrow:
            sizes |= {name: value for value, names in WIDTHS.items() for name in names.split()}
            heads, keys = (_read(part, f"num_{x}_heads") for x in ("attention", "key_value"))
            sizes["num_key_value_heads"] = 4 if keys == heads else 2
            if _read(part, "qk_rope_head_dim"):  # latent attention: its heads have other names
                del sizes["head_dim"]
        sizes = {name: value for name, value in sizes.items() if type(_read(part, name)) is int}
        there = {name for name in dir(type(part)) if not name.startswith("_")}
        open_ = {name for name in there & {*OPEN} if _read(part, name) is None}
        sizes |= {name: OPEN[name] for name in open_}
        mine = part in (config, config.get_text_config(decoder=True))
        own = {n: v for n, v in settings.items() if mine and n in there}
        for name, value in (sizes | own).items():
            with suppress(AttributeError, NotImplementedError):  # it follows from others
                setattr(part, name, value)
    if not config.is_encoder_decoder and "is_decoder" in vars(config):
        config.is_decoder = True
    return config


def _parts(config: PreTrainedConfig) -> Iterator[PreTrainedConfig]:
    yield config
    for name in config.sub_configs:
        part = getattr(config, name, None)
        if isinstance(part, PreTrainedConfig):
            yield from _parts(part)


def _shorten(part: PreTrainedConfig) -> None:
    """Lists of a value for each layer keep the first and the last."""
    count = _read(part, "num_hidden_layers")
    for name, values in list(vars(part).items()):
        if isinstance(values, list | tuple) and len(values) == count and len(values) > 2:
            setattr(part, name, type(values)([values[0], values[-1]]))


def _read(part: PreTrainedConfig, name: str) -> Any:
    """None where it is missing, or where each layer has its own."""
    try:
        return getattr(part, name, None)
    except Exception:
        return None
