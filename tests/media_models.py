"""Tiny random models that read pictures or sounds, each with inputs as its processor would make
them: a few kinds of families, as the census tries all. Nothing is downloaded."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
import transformers as t
from transformers import PreTrainedModel

from foretoken.models.stock.small_copy import randomize_weights

V, MARK = 100, 99  # ids, and the one that stands for a picture's tokens
ENDS: dict[str, Any] = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
TEXT: dict[str, Any] = {
    "vocab_size": V,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
    **ENDS,
}
LAYERS: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
}
PATCHES = LAYERS | {"image_size": 28, "patch_size": 14}  # 4 of a picture
SIDES: dict[str, Any] = {
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 2,
    "decoder_attention_heads": 2,
    "encoder_ffn_dim": 64,
    "decoder_ffn_dim": 64,
    "d_model": 32,
    "vocab_size": V,
}
Inputs = dict[str, torch.Tensor]
Made = tuple[Any, Inputs]


def ids(tokens: int, before: tuple[int, ...] = (1, 5), behind: tuple[int, ...] = (6, 7, 9)) -> Any:
    """A prompt with a picture of so many tokens."""
    return torch.tensor([[*before, *[MARK] * tokens, *behind]])


def pixels(*shape: int) -> torch.Tensor:
    return torch.randn(1, *shape)


def made(name: str, config: dict[str, Any], **inputs: Any) -> Made:
    """A model of that name and its inputs: tensors, shapes of random ones, or lengths of masks."""
    model = getattr(t, f"{name}ForConditionalGeneration")(getattr(t, f"{name}Config")(**config))
    for key, x in inputs.items():
        if isinstance(x, tuple):
            inputs[key] = pixels(*x)
        elif isinstance(x, int):
            inputs[key] = torch.ones(1, x).long()
        elif isinstance(x, list):
            inputs[key] = torch.tensor([x])
    return model, inputs


def llava() -> Made:
    config = {"vision_config": t.CLIPVisionConfig(**PATCHES), "text_config": t.LlamaConfig(**TEXT)}
    config |= {"image_token_id": MARK, "vision_feature_layer": -1}
    return made("Llava", config, input_ids=ids(4), pixel_values=(3, 28, 28))


def gemma3() -> Made:
    """Tokens of a picture attend to one another both ways, also within windows."""
    kinds, prompt = ["sliding_attention", "full_attention"], ids(4)
    config = {
        "text_config": t.Gemma3TextConfig(**TEXT, sliding_window=8, layer_types=kinds),
        "vision_config": t.SiglipVisionConfig(**PATCHES),
        "mm_tokens_per_image": 4,
        "image_token_index": MARK,
        "boi_token_index": 97,
        "eoi_token_index": 98,
    }
    types = (prompt == MARK).long()
    return made("Gemma3", config, input_ids=prompt, pixel_values=(3, 28, 28), token_type_ids=types)


def _of_qwen(name: str, text: dict[str, Any], vision: dict[str, Any]) -> Made:
    """Positions in three axes, and a picture of 16 patches that are 4 tokens."""
    rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3]}
    vision = {"depth": 2, "hidden_size": 32, "num_heads": 2, "patch_size": 4, **vision}
    marks = {"image_token_id": MARK, "video_token_id": 98}
    marks |= {"vision_start_token_id": 97, "vision_end_token_id": 96}
    text = {**TEXT, "rope_parameters": rope, **text}
    prompt = ids(4, (1, 5, 97), (96, 6, 7, 9))
    model, inputs = made(
        name,
        {"text_config": text, "vision_config": vision, **marks},
        input_ids=prompt,
        mm_token_type_ids=(prompt == MARK).long(),
        pixel_values=(16, 3 * 2 * 4 * 4),
        image_grid_thw=[1, 4, 4],
    )
    return model, inputs | {"pixel_values": inputs["pixel_values"][0]}


def qwen2_5_vl() -> Made:
    vision = {"out_hidden_size": 32, "intermediate_size": 64, "window_size": 16}
    return _of_qwen("Qwen2_5_VL", {}, vision | {"fullatt_block_indexes": [1]})


def qwen3_5() -> Made:
    """A hybrid."""
    vision = {"out_hidden_size": 32, "intermediate_size": 64, "num_position_embeddings": 16}
    text = {"layer_types": ["linear_attention", "full_attention"]}
    text |= {f"linear_num_{name}_heads": 2 for name in ("key", "value")}
    text |= {f"linear_{name}_head_dim": 16 for name in ("key", "value")}
    return _of_qwen("Qwen3_5", text, vision)


def lfm2_vl() -> Made:
    """A hybrid."""
    text = {name: value for name, value in TEXT.items() if name != "head_dim"}
    text |= {"model_type": "lfm2", "layer_types": ["conv", "full_attention"]}
    vision = {"model_type": "siglip2_vision_model", **LAYERS, "patch_size": 4, "num_patches": 16}
    config = {"vision_config": vision, "text_config": text, "downsample_factor": 2}
    seen = {"pixel_values": (16, 48), "pixel_attention_mask": 16, "spatial_shapes": [4, 4]}
    return made("Lfm2Vl", config | {"image_token_id": MARK}, input_ids=ids(4), **seen)


def qwen2_audio() -> Made:
    audio = {"d_model": 32, "encoder_ffn_dim": 64, "encoder_layers": 2, "num_mel_bins": 8}
    audio |= {"encoder_attention_heads": 2, "max_source_positions": 40}
    config = {"audio_config": audio, "text_config": {"model_type": "qwen2", **TEXT}}
    heard = {"input_features": (8, 80), "feature_attention_mask": 80}
    return made("Qwen2Audio", config | {"audio_token_index": MARK}, input_ids=ids(20), **heard)


def whisper() -> Made:
    config = {**SIDES, **ENDS, "num_mel_bins": 8, "decoder_start_token_id": 3}
    config |= {"max_source_positions": 20, "max_target_positions": 128}
    config |= {"suppress_tokens": None, "begin_suppress_tokens": None}
    return made("Whisper", config, input_features=(8, 40), decoder_input_ids=[3, 7, 8])


def speech2text() -> Made:
    config = {**SIDES, "input_feat_per_channel": 8, "conv_channels": 16}
    config |= {"max_source_positions": 200, "max_target_positions": 128}
    heard = {"input_features": (50, 8), "attention_mask": 50}
    return made("Speech2Text", config, **heard, decoder_input_ids=[2, 7])


def moonshine() -> Made:
    config = {"vocab_size": V, "hidden_size": 32, "intermediate_size": 64, **ENDS}
    for side in ("encoder", "decoder"):
        for what in ("hidden_layers", "attention_heads", "key_value_heads"):
            config[f"{side}_num_{what}"] = 2
    config |= {"max_position_embeddings": 128, "decoder_start_token_id": 1}
    heard = {"input_values": (4000,), "attention_mask": 4000}
    return made("Moonshine", config, **heard, decoder_input_ids=[1, 7])


def trocr() -> Made:
    """Any encoder of pictures with any decoder."""
    sizes = {name: value for name, value in SIDES.items() if not name.startswith("encoder")}
    decoder = t.TrOCRConfig(**sizes, max_position_embeddings=128, cross_attention_hidden_size=32)
    pair = t.VisionEncoderDecoderConfig.from_encoder_decoder_configs(
        t.ViTConfig(**PATCHES), decoder
    )
    pair.decoder_start_token_id, pair.pad_token_id = 1, 0
    inputs = {"pixel_values": pixels(3, 28, 28), "decoder_input_ids": torch.tensor([[1, 7]])}
    return t.VisionEncoderDecoderModel(pair), inputs


def _of_parakeet(name: str, hidden: int, config: dict[str, Any]) -> Made:
    """64 frames become 8 states; the last frame is padding, as those processors always make."""
    encoder = LAYERS | {"hidden_size": hidden, "num_mel_bins": 16, "conv_kernel_size": 3}
    encoder |= {"subsampling_conv_channels": 8, "max_position_embeddings": 100, "layerdrop": 0.0}
    encoder |= {"model_type": "parakeet_encoder", "scale_input": False}
    config |= {"encoder_config": encoder, "decoder_start_token_id": 1}
    mask = (torch.arange(64) < 63)[None]
    heard = {"input_features": (64, 16), "attention_mask": mask}
    return made(name, config, **heard, decoder_input_ids=[1, 7, 8])


def canary() -> Made:
    decoder = {**TEXT, "max_position_embeddings": 128}
    return _of_parakeet("Canary", 32, {"decoder_config": decoder, "vocab_size": V, **ENDS})


def cohere_asr() -> Made:
    """Its encoder is wider than its decoder."""
    return _of_parakeet("CohereAsr", 48, {**TEXT})


def granite_speech() -> Made:
    """A window of 4 frames becomes 2 tokens."""
    encoder = {"input_dim": 16, "num_layers": 2, "hidden_dim": 32, "num_heads": 2}
    encoder |= {"output_dim": 8, "context_size": 8, "max_pos_emb": 16, "conv_kernel_size": 3}
    config = {
        "text_config": {"model_type": "granite", **TEXT},
        "encoder_config": encoder,
        "projector_config": LAYERS | {"model_type": "blip_2_qformer", "encoder_hidden_size": 32},
        "audio_token_index": MARK,
        "window_size": 4,
        "downsample_rate": 2,
        "has_lora_adapter": False,
    }
    heard = {"input_features": (20, 16), "input_features_mask": torch.ones(1, 10).bool()}
    return made("GraniteSpeech", config, input_ids=ids(10), **heard)


def qwen3_asr() -> Made:
    """A chunk of 100 frames becomes 13 tokens; the encoder attends within two chunks."""
    audio = {"num_mel_bins": 8, "d_model": 32, "encoder_layers": 2, "encoder_attention_heads": 2}
    audio |= {"encoder_ffn_dim": 64, "n_window_infer": 200, "output_dim": 32}
    audio |= {"downsample_hidden_size": 8}
    config = {"audio_config": audio, "text_config": {"model_type": "qwen3", **TEXT}}
    heard = {"input_features": (8, 300), "input_features_mask": 300}
    return made("Qwen3ASR", config | {"audio_token_id": MARK}, input_ids=ids(39), **heard)


def vibevoice_asr() -> Made:
    """It adds noise to what it hears."""
    encoder = {"model_type": "vibevoice_acoustic_tokenizer_encoder", "hidden_size": 8}
    encoder |= {"num_filters": 4, "downsampling_ratios": [2, 2], "depths": [1, 1, 1]}
    config = {f"{kind}_tokenizer_encoder_config": encoder for kind in ("acoustic", "semantic")}
    config |= {"text_config": {"model_type": "qwen2", **TEXT}, "audio_token_id": MARK}
    config |= {"acoustic_tokenizer_chunk_size": 400}
    return made("VibeVoiceAsr", config, input_ids=ids(10), input_values=(1, 40))


DECODERS: list[Callable[[], Made]] = [llava, gemma3, qwen2_5_vl, qwen3_5, lfm2_vl, qwen2_audio]
ENCODERS: list[Callable[[], Made]] = [whisper, speech2text, moonshine, trocr, canary, cohere_asr]


def built(family: Callable[[], Made], seed: int = 0) -> Made:
    """A family's model, whose distributions are far from flat, and its inputs."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model, inputs = family()
        randomize_weights(model.eval())
    model.generation_config.eos_token_id = model.generation_config.forced_eos_token_id = None
    return model.requires_grad_(False), inputs


def other(inputs: Inputs) -> Inputs:
    """The same prompt with another picture or sound."""
    return {n: x + 1.0 if x.is_floating_point() else x for n, x in inputs.items()}


def relative(model: PreTrainedModel, noise: float = 0.02) -> PreTrainedModel:
    """A draft with the same encoder and nearly the same decoder."""
    draft: Any = copy.deepcopy(model)
    part = draft.get_decoder() if model.config.is_encoder_decoder else draft
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(1)
        for weight in part.parameters():
            weight.add_(noise * torch.randn_like(weight))
    return draft
