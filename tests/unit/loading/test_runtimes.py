"""Which runtime serves a model, why, and that conversions are made once."""

from __future__ import annotations

import json
import logging
import os
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PhimoeConfig, PhimoeForCausalLM

from foretoken import RefusedError, load, slow_log
from foretoken.kernels import library
from foretoken.loading.facts import ModelFacts, Placement
from foretoken.loading.runtimes.native import start_loading
from foretoken.loading.runtimes.place import place
from foretoken.loading.sources import ModelSource, find_source
from foretoken.models import store
from foretoken.models.native import conversion
from foretoken.models.stock import check_results
from foretoken.models.stock.small_copy import randomize_weights
from tiny_families import EXPERTS, build

pytestmark = pytest.mark.native


@pytest.fixture(scope="module", autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory) -> None:
    """One cache for the module: what a family's check found is remembered."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture
def converting(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> pytest.LogCaptureFixture:
    monkeypatch.setattr(slow_log, "LOG_AFTER_SECONDS", 1e-9)
    caplog.set_level(logging.INFO, "foretoken.models.store")
    return caplog


def saved(folder: Path, seed: int = 0, name: str = "Llama") -> str:
    torch.manual_seed(seed)
    model = build(name)
    randomize_weights(model)
    model.generation_config.eos_token_id = None
    model.save_pretrained(folder)
    return str(folder)


def refused(folder: Path, seed: int = 0) -> str:
    """A model that the native decoder refuses."""
    torch.manual_seed(seed)
    model = PhimoeForCausalLM(PhimoeConfig(**EXPERTS)).eval()
    randomize_weights(model)
    model.save_pretrained(folder)
    return str(folder)


def stock(path: str, prompt: list[int], n: int) -> list[int]:
    return load(path, "none", runtime="transformers").generate(prompt, max_new_tokens=n)[0].tokens


@pytest.mark.daily("Llama")
@pytest.mark.parametrize("name", ["Llama", "T5"])
def test_a_conversion_is_made_once_and_generates_the_same(
    tmp_path: Path, converting: pytest.LogCaptureFixture, name: str
) -> None:
    path = saved(tmp_path / "m", name=name)
    first = load(path, "lookup")
    assert "converting" in converting.text
    converting.clear()
    second = load(path, "lookup")
    assert "converting" not in converting.text
    expected = stock(path, [5, 6, 7], 20)
    for spec in (first, second):
        (completion,) = spec.generate([5, 6, 7], max_new_tokens=20, gamma=3)
        assert completion.tokens == expected
        assert completion.stats.runtime == "native"


def test_other_weights_in_the_same_folder_are_another_model(tmp_path: Path) -> None:
    path = saved(tmp_path / "m", seed=1)
    load(path, "none")
    file = tmp_path / "m" / "model.safetensors"
    stamp = file.stat()
    saved(tmp_path / "m", seed=2)
    os.utime(file, ns=(stamp.st_atime_ns, stamp.st_mtime_ns))
    tokens = load(path, "none").generate([5, 6, 7], max_new_tokens=20)[0].tokens
    assert tokens == stock(path, [5, 6, 7], 20)


def test_a_conversion_is_named_by_format_and_versions(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = saved(tmp_path / "model", seed=6)
    model = find_source(path, None, False)

    def name() -> str:
        return store.compute_key(model, conversion.CONVERSION_FORMAT, "native", "float32")

    before = name()
    assert name() == before
    monkeypatch.setattr(conversion, "CONVERSION_FORMAT", conversion.CONVERSION_FORMAT + 1)
    assert name() != before
    monkeypatch.undo()
    monkeypatch.setattr(store, "get_versions", lambda: {"foretoken": "another"})
    assert name() != before


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    base = tmp_path_factory.mktemp("models")
    in_memory = build("Llama").double()
    return {"dense": saved(base / "m", 4), "experts": refused(base / "e"), "memory": in_memory}


# A source, how it is asked for, the backend that it gets and why; or, without one, the refusal
MATRIX: list[tuple[str, dict[str, Any], str | None, str]] = [
    ("dense", {}, "native", "it passed the self-check"),
    ("dense", {}, "native", "it passed the self-check"),  # whatever is kept
    ("dense", {"dtype": "int8"}, "native", ""),
    ("dense", {"runtime": "native"}, "native", ""),
    ("dense", {"runtime": "transformers"}, "transformers", "it was requested"),
    ("dense", {"dtype": "float64"}, "transformers", "the native decoder does not support float64"),
    ("dense", {"dtype": "float64", "runtime": "native"}, None, "not support float64"),
    ("experts", {}, "transformers", "native decoder expects (experts"),
    ("experts", {"runtime": "native"}, None, "(experts"),
    ("experts", {"dtype": "int8"}, None, "; give dtype='float32'"),
    ("memory", {}, "transformers", ""),
    ("memory", {"runtime": "native"}, "native", ""),
]
UNCOMPILED: list[tuple[str, dict[str, Any], str | None, str]] = [
    ("dense", {}, "transformers", "was not compiled"),
    ("dense", {"runtime": "native"}, None, "was not compiled"),
    ("dense", {"dtype": "int8"}, None, "was not compiled"),
]


def require(
    models: dict[str, Any], rows: list[tuple[str, dict[str, Any], str | None, str]]
) -> None:
    for name, asked, runtime, says in rows:
        facts = ModelFacts(
            find_source(models[name], None, trust=False) if name != "memory" else models[name]
        )
        if runtime is None:
            with pytest.raises(RefusedError, match=re.escape(says)):
                place(facts, Placement(**asked))
        else:
            placed = place(facts, Placement(**asked))
            assert placed.model.runtime == runtime and says in placed.reason, (name, asked)


def test_which_backend_serves_a_source_and_why(
    models: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    require(models, MATRIX)
    assert models["memory"].dtype == torch.float64  # still
    with monkeypatch.context() as patch:
        patch.setattr(library, "LIBRARY_FILE", tmp_path / "none.so")
        library.load_library.cache_clear()
        require(models, UNCOMPILED)
    library.load_library.cache_clear()

    def wrong(*args: object) -> object:
        raise RefusedError("llama is not exact over the native decoder")

    monkeypatch.setattr(check_results, "run_self_check", wrong)
    other = {"dense": saved(tmp_path / "other", seed=5)}
    require(other, [("dense", {"runtime": "native"}, None, "native decoder; leave runtime")])


def test_a_family_that_the_native_decoder_refuses_is_checked_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next process does not read its configuration for that."""
    path = refused(tmp_path / "m", seed=8)
    with pytest.raises(RefusedError, match=r"\(experts .*\)"):
        load(path, dtype="int8")
    monkeypatch.setattr(check_results, "run_self_check", lambda *args: pytest.fail("checked again"))
    monkeypatch.setattr(ModelSource, "structure", property(lambda self: pytest.fail("it was read")))
    model = ModelFacts(find_source(path, None, trust=False))
    assert start_loading(model, Placement("int8")).result() is None
    with pytest.raises(RefusedError, match=r"\(experts .*\); give dtype='float32'"):
        place(model, Placement("int8"))


def test_a_cache_that_cannot_be_written_costs_only_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = saved(tmp_path / "m", seed=7)
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    spec = load(path, "none")
    assert spec.target.runtime == "native" and store.list_entries() == []
    assert spec.generate([5, 6], max_new_tokens=8)[0].tokens == stock(path, [5, 6], 8)


@pytest.mark.prove
def test_what_a_kept_conversion_knows_is_what_the_model_says(tmp_path: Path) -> None:
    """Ends, refusals and suggestions, without a look at the model; other settings are another's."""
    for name in ("Llama", "T5"):
        path = saved(tmp_path / name, seed=6, name=name)
        settings = {"eos_token_id": [7, 9], "forced_eos_token_id": 5, "do_sample": True}
        settings |= {"temperature": 0.6, "repetition_penalty": 1.2, "num_beams": 2}
        file = tmp_path / name / "generation_config.json"
        document = json.loads(file.read_text())
        file.write_text(json.dumps(document | settings))
        first = load(path, "uniform", generation_config="ignore")
        second = load(path, "uniform", generation_config="ignore")
        placement = Placement()
        facts = ModelFacts(find_source(path, None, False), placement)
        own = ModelFacts(type(build(name)).from_pretrained(path), placement)
        assert facts.cached and not own.cached
        assert facts.settings == own.settings and facts.settings.suggested["temperature"] == 0.6
        assert (facts.V, facts.encoder_decoder) == (own.V, own.encoder_decoder)
        assert first.ends == second.ends == own.settings.ends and first.ends.eos == {7, 9}
        for _ in range(2):
            with pytest.raises(RefusedError, match="num_beams=2"):
                load(path, "uniform")
        file.write_text(json.dumps(document | settings | {"num_beams": 1}))
        followed = load(path, "uniform")
        assert followed.suggested == {"temperature": 0.6}
        assert followed.controls == {"repetition_penalty": 1.2} and first.controls == {}


def test_a_kept_conversion_that_is_damaged_is_made_again(tmp_path: Path) -> None:
    path = saved(tmp_path / "m", seed=7)
    expected = load(path, "none").generate([5, 6, 7], max_new_tokens=9)[0].tokens
    home = store.get_folder()
    assert home is not None
    (entry,) = [one for one in store.list_entries() if one.name == path]
    (entry.folder / "facts.json").write_bytes(b"broken")
    assert load(path, "none").generate([5, 6, 7], max_new_tokens=9)[0].tokens == expected
