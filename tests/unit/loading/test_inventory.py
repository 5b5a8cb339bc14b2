"""Models on this machine are found, each once, with the drafts that fit them."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from foretoken.loading import inventory
from foretoken.loading.inventory import FoundModel, list_models
from gguf_file import write_gguf
from hub_server import empty_cache
from tiny import byte_level, llama


@pytest.fixture(autouse=True)
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache of the hub, and no package with a model."""
    (tmp_path / "site" / "package").mkdir(parents=True)
    monkeypatch.setattr(inventory, "sys", SimpleNamespace(path=["", str(tmp_path / "site")]))
    return empty_cache(tmp_path, monkeypatch)


def made(folder: Path, size: int, **config: Any) -> Path:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps({"model_type": "llama", **config}))
    (folder / "model.safetensors").write_bytes(b"0" * size)
    return folder


def gguf(file: Path) -> None:
    write_gguf(file, llama(320, hidden_size=64, intermediate_size=96), byte_level())


def found(*folders: Path) -> dict[str, FoundModel]:
    return {model.name: model for model in list_models(folders)}


def test_the_pair_that_ships_is_always_there() -> None:
    here = found()
    assert list(here) == ["novels", "novels (draft)", "smollm2 (draft)"]
    assert here["novels (draft)"].can_draft_for(here["novels"])
    assert not here["novels"].can_draft_for(here["novels (draft)"])
    assert here["smollm2 (draft)"].draft and not here["smollm2 (draft)"].can_draft_for(
        here["novels"]
    )


def test_folders_and_what_is_below_them(tmp_path: Path) -> None:
    root = tmp_path / "models"
    big = made(root / "big", 900, vocab_size=320, hidden_size=64, dtype="bfloat16")
    small = made(root / "deep" / "er" / "small", 300, text_config={"vocab_size": 320})
    made(root / "other", 300, vocab_size=999)
    made(root / "t5", 300, vocab_size=320, is_encoder_decoder=True)
    made(root / "a" / "b" / "c" / "too-deep", 300, vocab_size=320)
    made(root / ".hidden", 300, vocab_size=320)
    states = {"architectures": ["LlamaForCausalLMEagle3"], "vocab_size": 320, "hidden_size": 64}
    eagle = made(root / "eagle", 100, **states)
    (root / "empty").mkdir()
    (root / "empty" / "config.json").write_text("{}")
    (root / "broken").mkdir()
    (root / "broken" / "config.json").write_text("{")
    here = found(root)
    assert {Path(name).name for name in here if str(root) in name} == {
        *("big", "small", "other", "t5", "eagle"),
    }
    target = here[str(big)]
    assert target.precision == "bfloat16" and target.size == 900
    assert [name for name in here if here[name].can_draft_for(target)] == [str(small), str(eagle)]


def test_gguf_files(tmp_path: Path) -> None:
    gguf(tmp_path / "tiny.gguf")
    (tmp_path / "broken.gguf").write_bytes(b"GGUF")
    here = found(tmp_path)
    whole, broken = (here[str(tmp_path / f"{name}.gguf")] for name in ("tiny", "broken"))
    assert (whole.family, whole.vocabulary, whole.width) == ("llama", 320, 64)
    assert whole.precision == "Q8_0"
    assert broken.precision.startswith("unreadable: ") and broken.vocabulary is None


def test_a_package_with_a_model(tmp_path: Path) -> None:
    file = tmp_path / "site" / "package" / "tiny.gguf"
    gguf(file)
    assert found()[str(file)].family == "llama"
    assert len(found(tmp_path / "site")) == len(found())  # each once


def test_the_cache_of_the_hub(hub: Path, tmp_path: Path) -> None:
    folder = hub / "models--some--model"
    commit = "a" * 40
    made(folder / "snapshots" / commit, 500, vocab_size=320)
    gguf(folder / "snapshots" / commit / "q.gguf")
    (folder / "refs").mkdir()
    (folder / "refs" / "main").write_text(commit)
    (folder / "blobs").mkdir()
    here = found()
    assert {"some/model", "some/model:q.gguf"} < here.keys()
    shutil.rmtree(hub)  # a machine that never had one
    assert "some/model" not in found()
