"""Messages with pictures and sounds, from a folder with a model and its processor."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers as t
from PIL import Image

import foretoken
from foretoken.errors import InputError
from media_models import TEXT
from pictured import TEMPLATE, V, llava_folder, saved, tokens

NEW: dict[str, Any] = {"max_new_tokens": 12, "ignore_eos": True}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return llava_folder(tmp_path_factory.mktemp("llava"))


def asked(image: Any, text: str = "What is it?") -> list[dict[str, Any]]:
    parts = [{"type": "image", "image": image}, {"type": "text", "text": text}]
    return [{"role": "user", "content": parts}]


RED, BLUE = (Image.new("RGB", (40, 30), color) for color in ("red", "blue"))


def test_a_conversation_with_a_picture(folder: Path, tmp_path: Path) -> None:
    """The text is that of transformers, from a file and from an image; text alone is read too."""
    spec = foretoken.load(folder, "lookup")
    RED.save(tmp_path / "red.png")
    processor: Any = t.AutoProcessor.from_pretrained(folder)
    model: Any = t.LlavaForConditionalGeneration.from_pretrained(folder).eval()
    wanted: list[Any] = []
    for image in (RED, BLUE):
        inputs = processor.apply_chat_template(
            asked(image),
            tokenize=True,
            return_dict=True,
            return_tensors="pt",
            add_generation_prompt=True,
        )
        made = model.generate(**inputs, max_new_tokens=12, do_sample=False)
        wanted.append(made[0, inputs["input_ids"].shape[1] :].tolist())
    assert wanted[0] != wanted[1]
    for gamma in (0, 3):
        chats: Any = [asked(RED), asked(str(tmp_path / "red.png")), asked(BLUE)]
        texts = [c.tokens for c in spec.generate(chats, gamma=gamma, **NEW)]
        assert texts == [wanted[0], wanted[0], wanted[1]]
    pieces = list(spec.stream(asked(BLUE), gamma=2, **NEW))
    assert [token for piece in pieces for token in piece.tokens] == wanted[1]
    mixed: Any = [asked(RED), [{"role": "user", "content": "Hello"}]]
    assert spec.generate(mixed, **NEW)[0].tokens == wanted[0]


PARTS: list[tuple[dict[str, Any], str]] = [
    ({"type": "image", "image": "nowhere.png"}, "message 0, part 0 is not a"),
    ({"type": "image_url", "image_url": {"url": "a.png"}}, "which is not fetched"),
    ({"type": "image"}, "part 0 has 0 of image, url, path, base64"),
    ({"type": "video", "video": "a.mp4"}, "a video, which is not supported"),
    ({"type": "audio", "audio": "a.wav"}, "of the type audio; the model takes text and im"),
]


def test_parts_that_cannot_be_read(folder: Path) -> None:
    spec = foretoken.load(folder, "lookup")
    for part, message in PARTS:
        with pytest.raises(InputError, match=message):
            spec.generate([{"role": "user", "content": [part]}], **NEW)


def test_a_model_without_a_processor() -> None:
    spec = foretoken.load()
    with pytest.raises(InputError, match="the model has no processor in its folder"):
        spec.generate(asked(RED), **NEW)


def test_a_conversation_with_a_sound(tmp_path: Path) -> None:
    """Qwen2-Audio: a decoder that reads sounds among its text."""
    tokenizer = tokens("<|AUDIO|>", "<|audio_bos|>", "<|audio_eos|>")
    extractor = t.WhisperFeatureExtractor(feature_size=8, chunk_length=1)
    template = TEMPLATE.replace("<audio>", "<|AUDIO|>")
    processor = t.Qwen2AudioProcessor(extractor, tokenizer, chat_template=template)
    audio = {"d_model": 32, "encoder_ffn_dim": 64, "encoder_layers": 2, "num_mel_bins": 8}
    audio |= {"encoder_attention_heads": 2, "max_source_positions": 50}
    config = t.Qwen2AudioConfig(
        audio_config=audio,
        text_config={"model_type": "qwen2", **TEXT, "vocab_size": V},
        audio_token_index=tokenizer.convert_tokens_to_ids("<|AUDIO|>"),
    )
    torch.manual_seed(0)
    model: Any = t.Qwen2AudioForConditionalGeneration(config)
    saved(model, processor, tmp_path)
    spec = foretoken.load(tmp_path, "lookup")
    noise = np.random.default_rng(0).normal(size=8000).astype(np.float32)
    parts = [{"type": "audio", "audio": noise}, {"type": "text", "text": "What is it?"}]
    chat: Any = [{"role": "user", "content": parts}]
    inputs = processor.apply_chat_template(
        chat, tokenize=True, return_dict=True, return_tensors="pt", add_generation_prompt=True
    )
    made = model.generate(**inputs, max_new_tokens=12, do_sample=False)
    wanted = made[0, inputs["input_ids"].shape[1] :].tolist()
    for gamma in (0, 3):
        (out,) = spec.generate(chat, gamma=gamma, **NEW)
        assert out.tokens == wanted


def read(folder: Path, text: str = "<image>What is it?") -> tuple[foretoken.Speculator, Any]:
    """A pair, and what its processor makes of a prompt with a picture."""
    processor: Any = t.AutoProcessor.from_pretrained(folder)
    made = processor(text=text, images=RED, return_tensors="pt")
    return foretoken.load(folder, "lookup"), made


def test_a_faulty_prompt_does_not_speak_for_others(folder: Path) -> None:
    """The first picture's size is wrong, and it is refused alone."""
    spec, good = read(folder)
    for bad in (good["pixel_values"][..., :20], good["pixel_values"] * float("nan")):
        with pytest.raises(InputError, match="prompt 0 contains pixel_values"):
            spec.generate({**good, "pixel_values": bad}, **NEW)
    assert spec.generate(good, **NEW)[0].tokens
    mask = good["attention_mask"]
    faults = {"attention_mask": mask[:, 1:], "input_ids": good["input_ids"].double()}
    for name, bad in faults.items():
        with pytest.raises(InputError, match=f"^{name} is "):
            spec.generate({**good, name: bad}, **NEW)
    with pytest.raises(InputError, match="guidance accepts only ids"):
        spec.guided(2.0).generate(good, **NEW)
    _, last = read(folder, "a<image>")
    with pytest.raises(InputError, match="prompt ends with a media token"):
        spec.generate(last, **NEW)


def test_a_faulty_row_fails_alone(folder: Path) -> None:
    """A model's code may raise anything over its picture; the row beside it is what it is alone."""
    spec, good = read(folder)
    alone = spec.generate(good, **NEW)[0].tokens
    with foretoken.Engine(spec) as engine:
        kept = engine.add(good, gamma=0, **NEW)
        engine.step()
        faulty = engine.add(
            {**good, "pixel_values": good["pixel_values"][..., :20]}, gamma=0, **NEW
        )
        ends: dict[int, Any] = {}
        while engine.running or engine.waiting:
            ends |= {e.id: e for e in engine.step() if e.finish_reason is not None}
    assert "the model cannot encode pixel_values" in str(ends[faulty].error)
    assert ends[kept].completion.tokens == alone
