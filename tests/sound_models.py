"""Tiny random models that read sounds, each with inputs as its processor would make them. Those of
`media_models` are the others."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import transformers as t

from media_models import ENDS, LAYERS, MARK, SIDES, TEXT, Made, V, ids, pixels

QWEN = {"model_type": "qwen3", **TEXT}
MELS = {"num_mel_bins": 8, "max_source_positions": 20}  # Whisper's features, 40 frames
HEARD = {"input_features_mask": torch.ones(1, 40).long()}


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


def moonshine_streaming() -> Made:
    encoder = LAYERS | {"num_key_value_heads": 2, "sliding_windows": [[4, 1], [4, 0]]}
    layers = LAYERS | {"num_key_value_heads": 2, "vocab_size": V, "decoder_start_token_id": 1}
    config = t.MoonshineStreamingConfig(encoder_config=encoder, **layers, **ENDS)
    inputs = {"input_values": pixels(3200), "attention_mask": torch.ones(1, 3200).long()}
    begun = {"decoder_input_ids": torch.tensor([[1, 7]])}
    return t.MoonshineStreamingForConditionalGeneration(config), inputs | begun


def _of_seamless(model: Any, config: Any) -> Made:
    sides = {name: value for name, value in SIDES.items() if name != "d_model"}
    speech = {"layers": 2, "attention_heads": 2, "intermediate_size": 64}
    speech = {f"speech_encoder_{name}": value for name, value in speech.items()}
    speech |= {"feature_projection_input_dim": 16, "num_conv_pos_embeddings": 4}
    speech |= {"num_conv_pos_embedding_groups": 2, "conv_depthwise_kernel_size": 3}
    speech |= {"adaptor_kernel_size": 4, "adaptor_stride": 2}
    made = model(config(**sides, **speech, **ENDS, hidden_size=32, decoder_start_token_id=3))
    inputs = {"input_features": pixels(20, 16), "attention_mask": torch.ones(1, 20).long()}
    return made, inputs | {"decoder_input_ids": torch.tensor([[3, 7]])}


def seamless_m4t() -> Made:
    return _of_seamless(t.SeamlessM4TForSpeechToText, t.SeamlessM4TConfig)


def seamless_m4t_v2() -> Made:
    return _of_seamless(t.SeamlessM4Tv2ForSpeechToText, t.SeamlessM4Tv2Config)


WAVES = {
    "conv_dim": (16, 16),
    "conv_stride": (4, 4),
    "conv_kernel": (8, 4),
    "num_conv_pos_embeddings": 4,
    "num_conv_pos_embedding_groups": 2,
    "apply_spec_augment": False,
}


def speecht5() -> Made:
    sides = {name: value for name, value in SIDES.items() if name != "d_model"}
    config = t.SpeechT5Config(
        **sides, **WAVES, **ENDS, hidden_size=32, decoder_start_token_id=2, max_text_positions=128
    )
    inputs = {"input_values": pixels(400), "attention_mask": torch.ones(1, 400).long()}
    begun = {"decoder_input_ids": torch.tensor([[2, 7]])}
    return t.SpeechT5ForSpeechToText(config), inputs | begun


def speech_encoder_decoder() -> Made:
    """Any encoder of sounds with any decoder."""
    encoder = t.Wav2Vec2Config(**LAYERS, **WAVES)
    decoder = t.BertConfig(**LAYERS, vocab_size=V, max_position_embeddings=128)
    pair = t.SpeechEncoderDecoderConfig.from_encoder_decoder_configs(encoder, decoder)
    pair.decoder_start_token_id, pair.pad_token_id = 1, 0
    inputs = {"input_values": pixels(400), "attention_mask": torch.ones(1, 400).long()}
    begun = {"decoder_input_ids": torch.tensor([[1, 7]])}
    return t.SpeechEncoderDecoderModel(pair), inputs | begun


def _of_granite(model: Any, config: Any, encoder: dict[str, Any], width: int) -> Made:
    """A window of 4 frames becomes 2 tokens."""
    projector = LAYERS | {"model_type": "blip_2_qformer", "encoder_hidden_size": width}
    sizes = {"input_dim": 16, "num_layers": 2, "hidden_dim": 32, "num_heads": 2}
    sizes |= {"output_dim": 8, "context_size": 8, "max_pos_emb": 16, "conv_kernel_size": 3}
    made = model(
        config(
            text_config={"model_type": "granite", **TEXT},
            encoder_config=sizes | encoder,
            projector_config=projector,
            audio_token_index=MARK,
            window_size=4,
            downsample_rate=2,
            has_lora_adapter=False,
        )
    )
    mask = {"input_features_mask": torch.ones(1, 10).bool()}
    return made, {"input_ids": ids(10), "input_features": pixels(20, 16), **mask}


def granite_speech() -> Made:
    return _of_granite(t.GraniteSpeechForConditionalGeneration, t.GraniteSpeechConfig, {}, 32)


def granite_speech_plus() -> Made:
    """The projector reads two layers of the encoder."""
    layers = {"cat_hidden_layers": [0]}
    kind, config = t.GraniteSpeechPlusForConditionalGeneration, t.GraniteSpeechPlusConfig
    return _of_granite(kind, config, layers, 64)


def qwen3_asr() -> Made:
    """A chunk of 100 frames becomes 13 tokens; the encoder attends within two chunks."""
    audio = {"num_mel_bins": 8, "d_model": 32, "encoder_layers": 2, "encoder_attention_heads": 2}
    audio |= {"encoder_ffn_dim": 64, "n_window_infer": 200, "output_dim": 32}
    config = t.Qwen3ASRConfig(
        audio_config=audio | {"downsample_hidden_size": 8}, text_config=QWEN, audio_token_id=MARK
    )
    model = t.Qwen3ASRForConditionalGeneration(config)
    mask = {"input_features_mask": torch.ones(1, 300).long()}
    return model, {"input_ids": ids(39), "input_features": pixels(8, 300), **mask}


def fun_asr_nano() -> Made:
    audio = LAYERS | {"num_mel_bins": 8, "num_stacked_frames": 2, "num_hidden_layers": 3}
    audio |= {"num_timestamp_prediction_layers": 1, "fsmn_kernel_size": 3}
    adaptor = LAYERS | {"intermediate_size": 8, "projector_hidden_size": 32}
    config = t.FunAsrNanoConfig(
        audio_config=audio, adaptor_config=adaptor, text_config=QWEN, audio_token_id=MARK
    )
    mask = {"input_features_mask": torch.ones(1, 6).long()}
    model = t.FunAsrNanoForConditionalGeneration(config)
    return model, {"input_ids": ids(6), "input_features": pixels(6, 16), **mask}


def glmasr() -> Made:
    """Four states become a token."""
    audio = LAYERS | {"intermediate_size": 128, "num_mel_bins": 8, "max_position_embeddings": 40}
    text = {"model_type": "llama", **TEXT}
    config = t.GlmAsrConfig(audio_config=audio, text_config=text, audio_token_id=MARK)
    model = t.GlmAsrForConditionalGeneration(config)
    return model, {"input_ids": ids(5), "input_features": pixels(8, 40), **HEARD}


def _of_flamingo(model: Any, config: Any, more: dict[str, Any]) -> Made:
    text = {"model_type": "qwen2", **TEXT}
    audio = {"model_type": "audioflamingo3_encoder", **LAYERS, **MELS}
    made = model(config(audio_config=audio, text_config=text, audio_token_id=MARK, **more))
    return made, {"input_ids": ids(10), "input_features": pixels(8, 40), **HEARD}


def audioflamingo3() -> Made:
    return _of_flamingo(t.AudioFlamingo3ForConditionalGeneration, t.AudioFlamingo3Config, {})


def musicflamingo() -> Made:
    """Its states know at which seconds they stand."""
    more = {"audio_bos_token_id": 97, "audio_eos_token_id": 98}
    return _of_flamingo(t.MusicFlamingoForConditionalGeneration, t.MusicFlamingoConfig, more)


def moss() -> Made:
    config = t.MossTranscribeDiarizeConfig(
        audio_config=LAYERS | MELS, text_config=QWEN, audio_token_id=MARK
    )
    model = t.MossTranscribeDiarizeForConditionalGeneration(config)
    masks = HEARD | {"padding_mask": torch.ones(1, 400).long()}
    return model, {"input_ids": ids(5), "input_features": pixels(8, 40), **masks}


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


LISTENERS: list[Callable[[], Made]] = [
    qwen3_asr, granite_speech, granite_speech_plus, fun_asr_nano, glmasr, audioflamingo3,
    musicflamingo, moss,
]  # fmt: skip
HEARING: list[Callable[[], Made]] = [
    canary, cohere_asr, moonshine_streaming, seamless_m4t, seamless_m4t_v2, speecht5,
    speech_encoder_decoder,
]  # fmt: skip
