"""Tiny random models that read pictures or sounds, each with inputs as its processor would make
them: a few kinds of families, as the census tries all. Nothing is downloaded."""

from __future__ import annotations

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


def llava() -> Made:
    vision, text = t.CLIPVisionConfig(**PATCHES), t.LlamaConfig(**TEXT)
    config = t.LlavaConfig(
        vision_config=vision, text_config=text, image_token_id=MARK, vision_feature_layer=-1
    )
    model = t.LlavaForConditionalGeneration(config)
    return model, {"input_ids": ids(4), "pixel_values": pixels(3, 28, 28)}


def gemma3() -> Made:
    """Tokens of a picture attend to one another both ways, also within windows."""
    kinds = ["sliding_attention", "full_attention"]
    text = t.Gemma3TextConfig(**TEXT, sliding_window=8, layer_types=kinds)
    vision = t.SiglipVisionConfig(**PATCHES)
    marks = {"image_token_index": MARK, "boi_token_index": 97, "eoi_token_index": 98}
    config = t.Gemma3Config(text_config=text, vision_config=vision, mm_tokens_per_image=4, **marks)
    prompt = ids(4)
    types = {"token_type_ids": (prompt == MARK).long()}
    model = t.Gemma3ForConditionalGeneration(config)
    return model, {"input_ids": prompt, "pixel_values": pixels(3, 28, 28), **types}


def _of_qwen(model: Any, config: Any, text: dict[str, Any], vision: dict[str, Any]) -> Made:
    """Positions in three axes, and a picture of 16 patches that are 4 tokens."""
    rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3]}
    vision = {"depth": 2, "hidden_size": 32, "num_heads": 2, "patch_size": 4, **vision}
    marks = {"image_token_id": MARK, "video_token_id": 98}
    marks |= {"vision_start_token_id": 97, "vision_end_token_id": 96}
    text = {**TEXT, "rope_parameters": rope, **text}
    made = model(config(text_config=text, vision_config=vision, **marks))
    prompt = ids(4, (1, 5, 97), (96, 6, 7, 9))
    return made, {
        "input_ids": prompt,
        "mm_token_type_ids": (prompt == MARK).long(),
        "pixel_values": torch.randn(16, 3 * 2 * 4 * 4),
        "image_grid_thw": torch.tensor([[1, 4, 4]]),
    }


def qwen2_5_vl() -> Made:
    vision = {"out_hidden_size": 32, "intermediate_size": 64, "window_size": 16}
    vision |= {"fullatt_block_indexes": [1]}
    return _of_qwen(t.Qwen2_5_VLForConditionalGeneration, t.Qwen2_5_VLConfig, {}, vision)


def qwen3_5() -> Made:
    """A hybrid."""
    vision = {"out_hidden_size": 32, "intermediate_size": 64, "num_position_embeddings": 16}
    text = {"layer_types": ["linear_attention", "full_attention"]}
    text |= {f"linear_num_{name}_heads": 2 for name in ("key", "value")}
    text |= {f"linear_{name}_head_dim": 16 for name in ("key", "value")}
    return _of_qwen(t.Qwen3_5ForConditionalGeneration, t.Qwen3_5Config, text, vision)


def lfm2_vl() -> Made:
    """A hybrid."""
    text = {name: value for name, value in TEXT.items() if name != "head_dim"}
    text |= {"model_type": "lfm2", "layer_types": ["conv", "full_attention"]}
    vision = {"model_type": "siglip2_vision_model", **LAYERS, "patch_size": 4, "num_patches": 16}
    config = t.Lfm2VlConfig(
        vision_config=vision, text_config=text, image_token_id=MARK, downsample_factor=2
    )
    inputs = {"pixel_values": pixels(16, 48), "pixel_attention_mask": torch.ones(1, 16).long()}
    inputs |= {"spatial_shapes": torch.tensor([[4, 4]])}
    return t.Lfm2VlForConditionalGeneration(config), {"input_ids": ids(4), **inputs}


def qwen2_audio() -> Made:
    audio = {"d_model": 32, "encoder_ffn_dim": 64, "encoder_layers": 2, "num_mel_bins": 8}
    audio |= {"encoder_attention_heads": 2, "max_source_positions": 40}
    text = {"model_type": "qwen2", **TEXT}
    config = t.Qwen2AudioConfig(audio_config=audio, text_config=text, audio_token_index=MARK)
    mask = {"feature_attention_mask": torch.ones(1, 80).long()}
    model = t.Qwen2AudioForConditionalGeneration(config)
    return model, {"input_ids": ids(20), "input_features": pixels(8, 80), **mask}


def whisper() -> Made:
    config = t.WhisperConfig(
        **SIDES,
        **ENDS,
        num_mel_bins=8,
        max_source_positions=20,
        max_target_positions=128,
        decoder_start_token_id=3,
        suppress_tokens=None,
        begin_suppress_tokens=None,
    )
    inputs = {"input_features": pixels(8, 40), "decoder_input_ids": torch.tensor([[3, 7, 8]])}
    return t.WhisperForConditionalGeneration(config), inputs


def speech2text() -> Made:
    config = t.Speech2TextConfig(
        **SIDES,
        input_feat_per_channel=8,
        max_source_positions=200,
        max_target_positions=128,
        conv_channels=16,
    )
    inputs = {"input_features": pixels(50, 8), "attention_mask": torch.ones(1, 50).long()}
    begun = {"decoder_input_ids": torch.tensor([[2, 7]])}
    return t.Speech2TextForConditionalGeneration(config), inputs | begun


def moonshine() -> Made:
    sizes = {f"{side}_num_hidden_layers": 2 for side in ("encoder", "decoder")}
    sizes |= {f"{side}_num_attention_heads": 2 for side in ("encoder", "decoder")}
    sizes |= {f"{side}_num_key_value_heads": 2 for side in ("encoder", "decoder")}
    shape = {"vocab_size": V, "hidden_size": 32, "intermediate_size": 64}
    config = t.MoonshineConfig(
        **shape, **sizes, **ENDS, max_position_embeddings=128, decoder_start_token_id=1
    )
    inputs = {"input_values": pixels(4000), "attention_mask": torch.ones(1, 4000).long()}
    begun = {"decoder_input_ids": torch.tensor([[1, 7]])}
    return t.MoonshineForConditionalGeneration(config), inputs | begun


def trocr() -> Made:
    """Any encoder of pictures with any decoder."""
    decoder = t.TrOCRConfig(
        vocab_size=V,
        d_model=32,
        decoder_layers=2,
        decoder_attention_heads=2,
        decoder_ffn_dim=64,
        max_position_embeddings=128,
        cross_attention_hidden_size=32,
    )
    pair = t.VisionEncoderDecoderConfig.from_encoder_decoder_configs(
        t.ViTConfig(**PATCHES), decoder
    )
    pair.decoder_start_token_id, pair.pad_token_id = 1, 0
    inputs = {"pixel_values": pixels(3, 28, 28), "decoder_input_ids": torch.tensor([[1, 7]])}
    return t.VisionEncoderDecoderModel(pair), inputs


def _of_parakeet(hidden: int) -> dict[str, Any]:
    """The encoder of Canary and Cohere ASR: 64 frames become 8 states."""
    sizes = LAYERS | {"hidden_size": hidden, "num_mel_bins": 16, "conv_kernel_size": 3}
    sizes |= {"subsampling_conv_channels": 8, "max_position_embeddings": 100, "layerdrop": 0.0}
    return {"model_type": "parakeet_encoder", **sizes, "scale_input": False}


def _framed(config: Any, model: Any) -> Made:
    """Features whose last frame is padding, as those processors always make."""
    mask = torch.ones(1, 64).bool()
    mask[:, -1] = False
    begun = {"decoder_input_ids": torch.tensor([[1, 7, 8]])}
    return model(config), {"input_features": pixels(64, 16), "attention_mask": mask, **begun}


def canary() -> Made:
    decoder = {**TEXT, "max_position_embeddings": 128}
    config = t.CanaryConfig(
        encoder_config=_of_parakeet(32),
        decoder_config=decoder,
        vocab_size=V,
        decoder_start_token_id=1,
        **ENDS,
    )
    return _framed(config, t.CanaryForConditionalGeneration)


def cohere_asr() -> Made:
    """Its encoder is wider than its decoder."""
    config = t.CohereAsrConfig(encoder_config=_of_parakeet(48), **TEXT, decoder_start_token_id=1)
    return _framed(config, t.CohereAsrForConditionalGeneration)


def granite_speech() -> Made:
    """A window of 4 frames becomes 2 tokens."""
    projector = LAYERS | {"model_type": "blip_2_qformer", "encoder_hidden_size": 32}
    encoder = {"input_dim": 16, "num_layers": 2, "hidden_dim": 32, "num_heads": 2}
    encoder |= {"output_dim": 8, "context_size": 8, "max_pos_emb": 16, "conv_kernel_size": 3}
    config = t.GraniteSpeechConfig(
        text_config={"model_type": "granite", **TEXT},
        encoder_config=encoder,
        projector_config=projector,
        audio_token_index=MARK,
        window_size=4,
        downsample_rate=2,
        has_lora_adapter=False,
    )
    mask = {"input_features_mask": torch.ones(1, 10).bool()}
    model = t.GraniteSpeechForConditionalGeneration(config)
    return model, {"input_ids": ids(10), "input_features": pixels(20, 16), **mask}


def qwen3_asr() -> Made:
    """A chunk of 100 frames becomes 13 tokens; the encoder attends within two chunks."""
    audio = {"num_mel_bins": 8, "d_model": 32, "encoder_layers": 2, "encoder_attention_heads": 2}
    audio |= {"encoder_ffn_dim": 64, "n_window_infer": 200, "output_dim": 32}
    config = t.Qwen3ASRConfig(
        audio_config=audio | {"downsample_hidden_size": 8},
        text_config={"model_type": "qwen3", **TEXT},
        audio_token_id=MARK,
    )
    model = t.Qwen3ASRForConditionalGeneration(config)
    mask = {"input_features_mask": torch.ones(1, 300).long()}
    return model, {"input_ids": ids(39), "input_features": pixels(8, 300), **mask}


def vibevoice_asr() -> Made:
    """It adds noise to what it hears."""
    encoder = {"model_type": "vibevoice_acoustic_tokenizer_encoder", "hidden_size": 8}
    encoder |= {"num_filters": 4, "downsampling_ratios": [2, 2], "depths": [1, 1, 1]}
    config = t.VibeVoiceAsrConfig(
        acoustic_tokenizer_encoder_config=encoder,
        semantic_tokenizer_encoder_config=encoder,
        text_config={"model_type": "qwen2", **TEXT},
        audio_token_id=MARK,
        acoustic_tokenizer_chunk_size=400,
    )
    model = t.VibeVoiceAsrForConditionalGeneration(config)
    return model, {"input_ids": ids(10), "input_values": pixels(1, 40)}


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
    import copy

    draft: Any = copy.deepcopy(model)
    part = draft.get_decoder() if model.config.is_encoder_decoder else draft
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(1)
        for weight in part.parameters():
            weight.add_(noise * torch.randn_like(weight))
    return draft
