"""Which runtime serves a model, why, and that conversions are made once."""

from __future__ import annotations

import json
import logging
import os
from pathlib import Path

import pytest
import torch
from transformers import PhimoeConfig, PhimoeForCausalLM

from foretoken import RefusedError, load, slow_log
from foretoken.kernels import library
from foretoken.loading.facts import ModelFacts, Placement
from foretoken.loading.runtimes.native import read_ahead
from foretoken.loading.runtimes.place import Placed, place
from foretoken.loading.sources import Source, source
from foretoken.models import store
from foretoken.models.native import conversion
from foretoken.models.stock import check_results
from foretoken.models.stock.small_copy import randomize_weights
from tiny import llama
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
    monkeypatch.setattr(slow_log, "AFTER", 1e-9)
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


def at(path: str, **placement: object) -> Placed:
    return place(ModelFacts(source(path, None, trust=False)), Placement(**placement))


def stock(path: str, prompt: list[int], n: int) -> list[int]:
    return load(path, "none", runtime="transformers").generate(prompt, max_new_tokens=n)[0].tokens


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
    model = source(path, None, False)

    def name() -> str:
        return store.key_of(model, conversion.FORMAT, "native", "float32")

    before = name()
    assert name() == before
    monkeypatch.setattr(conversion, "FORMAT", conversion.FORMAT + 1)
    assert name() != before
    monkeypatch.undo()
    monkeypatch.setattr(store, "versions", lambda: {"foretoken": "another"})
    assert name() != before


def test_bfloat16_weights_are_rounded(tmp_path: Path) -> None:
    path = saved(tmp_path / "m", seed=3)
    full, half = at(path).model, at(path, dtype="bfloat16").model
    rounded = type(build("Llama")).from_pretrained(path, dtype=torch.bfloat16).float()
    for model in (full, half):
        model.start([[5, 6]])
    ours = half.score([[7]], [1])[0, 0].clone()
    with torch.no_grad():
        theirs = rounded(torch.tensor([[5, 6, 7]])).logits[0, -1]
    assert torch.allclose(ours, theirs, atol=0.05 * float(theirs.std()))
    assert not torch.allclose(full.score([[7]], [1])[0, 0], theirs, atol=1e-4)


def test_why_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = saved(tmp_path / "m", seed=4)
    placed = at(path, dtype="float64")
    assert placed.model.runtime == "transformers" and "no float64" in placed.why
    assert at(path, runtime="transformers").why.startswith("it was asked for")
    with pytest.raises(RefusedError, match="no float64"):
        at(path, dtype="float64", runtime="native")
    monkeypatch.setattr(library, "FILE", tmp_path / "none.so")
    library.library.cache_clear()
    placed = at(path)
    assert placed.model.runtime == "transformers" and "was not compiled" in placed.why
    with pytest.raises(RefusedError, match="was not compiled.*"):
        at(path, runtime="native")
    with pytest.raises(RefusedError, match="was not compiled.*"):
        at(path, dtype="int8")
    library.library.cache_clear()


def test_a_family_that_fails_its_check_stays_on_torch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = saved(tmp_path / "m", seed=5)

    def wrong(*args: object) -> object:
        raise RefusedError("llama is not exact over the native decoder")

    monkeypatch.setattr(check_results, "self_check", wrong)
    with pytest.raises(RefusedError, match="is not exact over the native decoder; leave runtime"):
        at(path, runtime="native")


@pytest.mark.native
def test_the_order_is_fixed(tmp_path: Path) -> None:
    """The native decoder, then torch, whatever is kept of each. A name is followed."""
    other, dense = refused(tmp_path / "other"), str(tmp_path / "dense")
    llama(64, head_dim=16).save_pretrained(dense)
    assert at(dense, runtime="native").model.runtime == "native"
    for _ in range(2):
        assert at(dense).model.runtime == "native" and at(dense).why == "it passed the self-check"
    assert at(dense, dtype="int8").model.runtime == "native"
    placed = at(other)
    assert placed.model.runtime == "transformers"
    assert "native decoder expects (experts" in placed.why
    with pytest.raises(RefusedError, match=r"\(experts .*\)"):
        at(other, runtime="native")
    placed = at(dense, dtype="float64")
    assert placed.model.runtime == "transformers"
    assert placed.why.startswith("the native decoder has no float64")


@pytest.mark.native
def test_a_family_that_the_native_decoder_refuses_is_checked_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next process does not read its configuration for that."""
    path = refused(tmp_path / "m", seed=8)
    with pytest.raises(RefusedError, match=r"\(experts .*\)"):
        at(path, dtype="int8")
    monkeypatch.setattr(check_results, "self_check", lambda *args: pytest.fail("checked again"))
    monkeypatch.setattr(Source, "empty", property(lambda self: pytest.fail("it was read")))
    model = ModelFacts(source(path, None, trust=False))
    assert read_ahead(model, Placement("int8")).result() is None
    with pytest.raises(RefusedError, match=r"\(experts .*\); give dtype='float32'"):
        place(model, Placement("int8"))


def test_a_model_in_memory_is_used_as_it_is_unless_a_runtime_is_asked_for() -> None:
    torch.manual_seed(6)
    model = build("Llama").double()
    assert place(ModelFacts(model), Placement()).model.runtime == "transformers"
    placed = place(ModelFacts(model), Placement(runtime="native"))
    assert placed.model.runtime == "native"
    assert model.dtype == torch.float64  # still


def test_a_cache_that_cannot_be_written_costs_only_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = saved(tmp_path / "m", seed=7)
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    spec = load(path, "none")
    assert spec.target.runtime == "native" and store.entries() == []
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
        facts = ModelFacts(source(path, None, False), placement)
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
    home = store.folder()
    assert home is not None
    (entry,) = [one for one in store.entries() if one.name == path]
    (entry.folder / "facts.json").write_bytes(b"broken")
    assert load(path, "none").generate([5, 6, 7], max_new_tokens=9)[0].tokens == expected
