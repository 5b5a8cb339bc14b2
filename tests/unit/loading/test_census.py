"""Every class is judged in a process of its own, once for the installed versions, and what differs
is seen."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from torch.nn import functional as F

import census
import families


@pytest.fixture(autouse=True)
def one_class(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for module in (census, families):
        monkeypatch.setattr(module, "classes", lambda: {"LlamaForCausalLM": "text"})
    monkeypatch.setattr(families, "UNFINISHED", tmp_path / "build" / "families.json")


@pytest.mark.prove
def test_a_class_is_judged_in_its_own_process_and_not_again_by_a_later_run(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    document = families.judge_all()
    (verdict,) = document["families"]
    assert (verdict["outcome"], verdict["form"]) == ("equal", "transformers")
    assert "LlamaForCausalLM: equal (transformers)" in capsys.readouterr().out
    monkeypatch.setattr(census, "_apart", None)  # would be called
    assert families.judge_all() == document
    monkeypatch.setattr(families, "get_versions", lambda: {"transformers": "another"})
    with pytest.raises(TypeError):
        families.judge_all()


@pytest.mark.prove
def test_one_that_takes_too_long_is_ended() -> None:
    (verdict,) = census.census(["LlamaForCausalLM"], workers=1, seconds=0.0)
    assert (verdict.outcome, verdict.reason) == ("failed", "not done after 0 s")


def test_a_text_that_differs_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """The negative control: the text of another prompt."""
    own = census._generated

    def of_another(model: Any, inputs: Any) -> list[int]:
        return own(model, {n: F.pad(x, (0, 1), value=9) for n, x in inputs.items()})

    monkeypatch.setattr(census, "_generated", of_another)
    verdict = census.judge("LlamaForCausalLM")
    assert (verdict.outcome, verdict.reason) == ("differs", "text 0 with lookup at gamma 0")
