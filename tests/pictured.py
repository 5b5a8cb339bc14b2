"""Tiny random models in folders, with a processor of pictures or sounds and a chat template."""

from __future__ import annotations

from copy import deepcopy
from pathlib import Path
from typing import Any

import torch
import transformers as t

from foretoken.models.stock.small_copy import randomize_weights
from media_models import PATCHES, TEXT
from tiny import byte_level

TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{% if m.content is string %}{{ m.content }}{% else %}"
    "{% for p in m.content %}{% if p.type == 'image' %}<image>{% elif p.type == 'audio' %}<audio>"
    "{% else %}{{ p.text }}{% endif %}{% endfor %}{% endif %}\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
V = 330


def tokens(*marks: str) -> Any:
    tokenizer = deepcopy(byte_level())
    tokenizer.add_special_tokens({"additional_special_tokens": list(marks)})
    tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def saved(model: Any, processor: Any, folder: Path) -> Path:
    randomize_weights(model.eval())
    model.generation_config.eos_token_id = None
    model.save_pretrained(folder)
    processor.save_pretrained(folder)
    return folder


def llava_folder(folder: Path) -> Path:
    """A LLaVA of random weights, its processor and its template."""
    tokenizer = tokens("<image>")
    mark = tokenizer.convert_tokens_to_ids("<image>")
    sizes = {"shortest_edge": 28}
    crop = {"height": 28, "width": 28}
    processor = t.LlavaProcessor(
        t.CLIPImageProcessorPil(size=sizes, crop_size=crop),
        tokenizer,
        patch_size=14,
        vision_feature_select_strategy="default",
        chat_template=TEMPLATE,
        num_additional_image_tokens=1,
    )
    config = t.LlavaConfig(
        vision_config=t.CLIPVisionConfig(**PATCHES),
        text_config=t.LlamaConfig(**{**TEXT, "vocab_size": V}),
        image_token_id=mark,
        vision_feature_layer=-1,
    )
    torch.manual_seed(0)
    model = t.LlavaForConditionalGeneration(config)
    return saved(model, processor, folder)
