"""Sounds and pictures for decoders on the native kernels: texts are those of a family's own
`generate`, with draft tokens and without, in a batch; an encoder, which is on torch, runs once."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import nn
from transformers.generation.utils import GenerationMixin

import foretoken
from foretoken.errors import InputError, RefusedError
from foretoken.models.native.encoder_decoder import NativeMediaDecoder
from media_models import Inputs, Made, built, moonshine, other, relative, trocr, whisper

pytestmark = [pytest.mark.cpu_only, pytest.mark.native]
NEW = 12


def generated(model: Any, inputs: Inputs) -> list[int]:
    """The new tokens of transformers' own greedy `generate`."""
    settings = {"max_new_tokens": NEW, "do_sample": False, "eos_token_id": None}
    mixin: Any = GenerationMixin
    text = mixin.generate(model, **inputs, **settings)[0]
    return text[inputs["decoder_input_ids"].shape[1] :].tolist()


def target_of(spec: foretoken.Speculator) -> NativeMediaDecoder:
    assert isinstance(spec.target, NativeMediaDecoder)
    return spec.target


@pytest.mark.parametrize("family", [whisper, trocr])
def test_texts_are_those_of_generate(family: Callable[[], Made]) -> None:
    model, inputs = built(family)
    spec = foretoken.load(model, relative(model), runtime="native")
    assert target_of(spec).needs_media
    begun = torch.cat([inputs["decoder_input_ids"], torch.tensor([[4, 9, 5]])], 1)
    longer = other(inputs) | {"decoder_input_ids": begun}
    wanted = [generated(model, inputs), generated(model, longer)]
    assert wanted[0] != wanted[1]
    for gamma in (0, 1, 4):
        both: Any = [inputs, longer, inputs]
        completions = spec.generate(both, max_new_tokens=NEW, gamma=gamma, ignore_eos=True)
        assert [c.tokens for c in completions] == [*wanted, wanted[0]]
    assert any(step.accepted for c in completions for step in c.steps)


def test_a_folder_s_encoder_is_loaded_for_the_first_sound_and_shared(tmp_path: Path) -> None:
    model, inputs = built(whisper)
    model.save_pretrained(tmp_path / "target")
    relative(model).save_pretrained(tmp_path / "draft")
    for _ in range(2):  # the second time from the kept conversion
        spec = foretoken.load(tmp_path / "target", tmp_path / "draft", draft_dtype="int8")
        target, drafter = target_of(spec), cast(Any, spec.drafter)
        assert drafter.model.computed == "int8"
        assert "_network" not in vars(target)
        runs, network = list[int](), cast(nn.Module, target._network)
        network.get_encoder().register_forward_hook(lambda *_, runs=runs: runs.append(1))  # pyright: ignore
        (out,) = spec.generate(inputs, max_new_tokens=NEW, gamma=3, ignore_eos=True)
        assert out.tokens == generated(model, inputs)
        assert runs == [1] and "_network" not in vars(drafter.model)
        assert out.stats.encoder_seconds > 0 and any(step.accepted for step in out.steps)


def test_what_is_refused() -> None:
    model, inputs = built(whisper)
    spec = foretoken.load(model, "lookup", runtime="native")
    short = {**inputs, "input_features": inputs["input_features"][..., :30]}
    with pytest.raises(InputError, match=r"the shape \(1, 8, 30\), .* reads \(1, 8, 40\)"):
        spec.generate(short, max_new_tokens=2)
    pictures = {**inputs, "pixel_values": torch.zeros(1, 3, 4, 4)}
    with pytest.raises(InputError, match="it reads input_features alone, not pixel_values"):
        spec.generate(pictures, max_new_tokens=2)
    with pytest.raises(RefusedError, match="layers of other parts"):
        foretoken.load(built(moonshine)[0], "lookup", runtime="native")
