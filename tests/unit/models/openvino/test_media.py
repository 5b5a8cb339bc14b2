"""Sounds and pictures on OpenVINO: texts are those of the own `generate` of a family, with draft
tokens and without, in a batch; and an encoder runs once."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from transformers.generation.utils import GenerationMixin

import foretoken
from foretoken.errors import InputError, RefusedError
from foretoken.models.openvino.media import MediaModel
from media_models import Inputs, Made, built, moonshine, other, relative, trocr, whisper

pytestmark = pytest.mark.openvino
NEW = 12


@cache
def pair(
    family: Callable[[], Made] = whisper,
) -> tuple[Any, Inputs, foretoken.Speculator]:
    model, inputs = built(family)
    return model, inputs, foretoken.load(model, relative(model), runtime="openvino")


@pytest.fixture
def draft() -> MediaModel:
    drafter: Any = pair()[2].drafter
    return drafter.model


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Grows with each run of an encoder."""
    made, target = list[str](), cast(MediaModel, pair()[2].target)
    run = target.hearing.run
    monkeypatch.setattr(target.hearing, "run", lambda: (made.append("OpenVINO"), run()))
    hook = pair()[0].get_encoder().register_forward_hook(lambda *_: made.append("torch"))
    yield made
    hook.remove()


def generated(model: Any, inputs: Inputs, **more: Any) -> list[int]:
    """The new tokens of transformers' own greedy `generate`."""
    settings = {"max_new_tokens": NEW, "do_sample": False, "eos_token_id": None}
    mixin: Any = GenerationMixin
    text = mixin.generate(model, **inputs, **settings, **more)[0]
    return text[inputs["decoder_input_ids"].shape[1] :].tolist()


@pytest.mark.parametrize("family", [whisper, pytest.param(trocr, marks=pytest.mark.prove)])
def test_texts_are_those_of_generate(family: Callable[[], Made]) -> None:
    model, inputs, spec = pair(family)
    begun = torch.cat([inputs["decoder_input_ids"], torch.tensor([[4, 9, 5]])], 1)
    longer = other(inputs) | {"decoder_input_ids": begun}
    wanted = [generated(model, inputs), generated(model, longer)]
    assert isinstance(spec.target, MediaModel) and wanted[0] != wanted[1]
    for gamma in (0, 1, 4):
        both: Any = [inputs, longer, inputs]
        completions = spec.generate(both, max_new_tokens=NEW, gamma=gamma, ignore_eos=True)
        assert [c.tokens for c in completions] == [*wanted, wanted[0]]
    assert any(step.accepted for c in completions for step in c.steps)


def test_a_call_of_generate_whose_encoder_has_run(runs: list[str]) -> None:
    model, inputs, spec = pair()
    text = generated(model, inputs, custom_generate=spec, num_assistant_tokens=2)
    assert runs == ["torch"]
    assert text == generated(model, inputs)


def test_an_encoder_that_target_and_draft_share_runs_once(
    draft: MediaModel, runs: list[str]
) -> None:
    _, inputs, spec = pair()
    (out,) = spec.generate(inputs, max_new_tokens=NEW, gamma=2, ignore_eos=True)
    assert runs == ["OpenVINO"] and "hearing" not in vars(draft)
    assert out.stats.encoder_seconds > 0 and any(step.accepted for step in out.steps)


@pytest.mark.prove
def test_a_conversion_is_kept_and_a_draft_in_eight_bits_shares_the_encoder(tmp_path: Path) -> None:
    model, inputs, _ = pair()
    model.save_pretrained(tmp_path / "target")
    relative(model).save_pretrained(tmp_path / "draft")
    for _ in range(2):
        spec = foretoken.load(
            tmp_path / "target", tmp_path / "draft", draft_dtype="int8", runtime="openvino"
        )
        drafter: Any = spec.drafter
        assert spec.target.runtime == "openvino" and drafter.model.computed == "int8"
        (out,) = spec.generate(inputs, max_new_tokens=NEW, gamma=3, ignore_eos=True)
        assert out.tokens == generated(model, inputs)
        assert "hearing" not in vars(drafter.model)


def test_what_is_refused() -> None:
    _, inputs, spec = pair()
    short = {**inputs, "input_features": inputs["input_features"][..., :30]}
    with pytest.raises(InputError, match=r"the shape \(1, 8, 30\), .* reads \(1, 8, 40\)"):
        spec.generate(short, max_new_tokens=2)
    pictures = {**inputs, "pixel_values": torch.zeros(1, 3, 4, 4)}
    with pytest.raises(InputError, match="it reads input_features alone, not pixel_values"):
        spec.generate(pictures, max_new_tokens=2)
    with pytest.raises(RefusedError, match="reads input_values of any size"):
        foretoken.load(built(moonshine)[0], "lookup", runtime="openvino")
