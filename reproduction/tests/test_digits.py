"""Image models are trained by the stand-ins' script, and load as any other."""

from __future__ import annotations

import json
import sys
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch

import foretoken
from foretoken.errors import InputError
from reproduction import standins


@pytest.fixture
def digits(monkeypatch) -> None:
    """Scikit-learn's, as far as the script knows: 34 images, white and black, of two digits."""
    names = np.arange(34) % 2
    images = np.repeat(16 * names[:, None], 64, 1)
    for name in ("sklearn", "sklearn.datasets"):
        module = ModuleType(name)
        module.__spec__ = ModuleSpec(name, None)
        monkeypatch.setitem(sys.modules, name, module)
    load: Any = lambda return_X_y: (images.astype(float), names)  # noqa: E731
    sys.modules["sklearn.datasets"].load_digits = load  # pyright: ignore
    monkeypatch.setattr(standins, "IMAGE_GPT", {"target": (16, 2, 2), "draft": (8, 1, 1)})


def test_a_target_a_draft_and_a_table(digits, tmp_path, capsys) -> None:
    standins.digits(tmp_path, steps=20, draft_steps=2)
    assert "step 20: loss" in capsys.readouterr().out
    summary = json.loads((tmp_path / "target" / "summary.json").read_text())
    assert summary["held_out_images"] == 3 and summary["held_out_nats_per_token"] < 3.2
    spec = foretoken.load(tmp_path / "target" / "model", tmp_path / "draft" / "model")
    starts = [[standins.GREYS + digit] for digit in (0, 1, 1)]
    options: dict[str, Any] = {"max_new_tokens": 64, "temperature": 0.0}
    outs = [spec.generate(starts, gamma=gamma, **options) for gamma in (0, 3)]
    assert [one.tokens for one in outs[0]] == [one.tokens for one in outs[1]]
    assert [len(one.tokens) for one in outs[0]] == [64, 64, 64]
    model = spec.target.model  # pyright: ignore
    with torch.inference_mode():
        own = model.generate(torch.tensor(starts[:1]), max_new_tokens=64, do_sample=False)
    assert own[0, 1:].tolist() == outs[0][0].tokens
    table = f"reproduction.ngram:{tmp_path / 'ngram.safetensors'}"
    with_table = foretoken.load(tmp_path / "target" / "model", table)
    (one,) = with_table.generate(starts[0], gamma=3, **options)
    assert one.tokens == outs[0][0].tokens and one.stats.drafted > 0


def test_without_scikit_learn(monkeypatch, tmp_path) -> None:
    monkeypatch.setitem(sys.modules, "sklearn", None)
    with pytest.raises(InputError, match="needs sklearn.*pip install 'foretoken.reproduction.'"):
        standins.digits(tmp_path)
