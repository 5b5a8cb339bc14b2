"""A tiny random Whisper in a folder, with its processor, and a draft for it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
import transformers as t

from foretoken.models.stock.small_copy import randomize_weights
from media_models import SIDES, relative
from tiny import byte_level

TIMES = 1501  # ids behind the last mark
MARKS = "startoftranscript en de transcribe translate startofprev nospeech notimestamps".split()


def tokens() -> Any:
    """Whisper's tokenizer over bytes, whose marks come behind them."""
    bytes_ = byte_level()
    merges = json.loads(bytes_.backend_tokenizer.to_str())["model"]["merges"]
    # Whisper's own end of texts is behind all others
    vocab = {"<>" if i == 0 else token: i for token, i in bytes_.get_vocab().items()}
    tokenizer = t.WhisperTokenizer(vocab, [tuple(pair) for pair in merges])
    tokenizer.add_special_tokens({"additional_special_tokens": [f"<|{mark}|>" for mark in MARKS]})
    return tokenizer


def whisper(folder: Path) -> tuple[Path, Path]:
    """Folders of the model and of its draft."""
    tokenizer = tokens()
    start, en, de, write, translate, before, _, untimed = (
        tokenizer.convert_tokens_to_ids(f"<|{mark}|>") for mark in MARKS
    )
    end: int = tokenizer.eos_token_id
    ends = {"pad_token_id": end, "bos_token_id": end, "eos_token_id": end}
    config = t.WhisperConfig(
        **{**SIDES, "vocab_size": untimed + 1 + TIMES},
        **ends,
        num_mel_bins=8,
        max_source_positions=1500,
        max_target_positions=96,
        decoder_start_token_id=start,
        suppress_tokens=None,
        begin_suppress_tokens=None,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model: Any = t.WhisperForConditionalGeneration(config).eval()
        randomize_weights(model)
    own = model.generation_config = t.GenerationConfig(**ends, decoder_start_token_id=start)
    own.no_timestamps_token_id, own.is_multilingual = untimed, True
    own.lang_to_id = {"<|en|>": en, "<|de|>": de}
    own.task_to_id = {"transcribe": write, "translate": translate}
    own.prev_sot_token_id, own.alignment_heads = before, [[1, 0], [1, 1]]
    own.max_initial_timestamp_index, own.begin_suppress_tokens = 50, [end]
    extractor = t.WhisperFeatureExtractor(feature_size=8)
    processor = t.WhisperProcessor(extractor, tokenizer)
    model.save_pretrained(folder / "target")
    processor.save_pretrained(folder / "target")
    relative(model).save_pretrained(folder / "draft")
    return folder / "target", folder / "draft"
