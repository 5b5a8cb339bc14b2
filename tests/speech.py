"""A tiny random Whisper in a folder, with its processor, and a draft for it."""

from __future__ import annotations

from copy import deepcopy
from pathlib import Path
from typing import Any

import torch
import transformers as t

from foretoken.models.stock.selfcheck import stir
from media_models import SIDES, relative
from tiny import byte_level

FIRST, TIMES = 330, 1501  # the mark behind which times are, and their number


def whisper(folder: Path) -> tuple[Path, Path]:
    """Folders of the model and of its draft."""
    tokenizer: Any = deepcopy(byte_level())
    names = ["<|start|>", "<|en|>", "<|de|>", "<|transcribe|>", "<|translate|>"]
    tokenizer.add_special_tokens({"additional_special_tokens": names})
    start, en, de, write, translate = tokenizer.convert_tokens_to_ids(names)
    ends = {"pad_token_id": 0, "bos_token_id": 0, "eos_token_id": 0}
    config = t.WhisperConfig(
        **{**SIDES, "vocab_size": FIRST + 1 + TIMES},
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
        stir(model)
    own = model.generation_config = t.GenerationConfig(**ends, decoder_start_token_id=start)
    own.no_timestamps_token_id, own.is_multilingual = FIRST, True
    own.lang_to_id = {"<|en|>": en, "<|de|>": de}
    own.task_to_id = {"transcribe": write, "translate": translate}
    own.max_initial_timestamp_index, own.begin_suppress_tokens = 50, [0]
    extractor = t.WhisperFeatureExtractor(feature_size=8)
    processor = t.WhisperProcessor(extractor, tokenizer)
    model.save_pretrained(folder / "target")
    processor.save_pretrained(folder / "target")
    relative(model).save_pretrained(folder / "draft")
    return folder / "target", folder / "draft"
