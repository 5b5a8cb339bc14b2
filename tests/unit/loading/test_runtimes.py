"""Which runtime serves a model, why, and that conversions are made once."""

from __future__ import annotations

import json
import logging
import os
import sys
from pathlib import Path

import pytest
import torch
from transformers import Glm4MoeConfig, Glm4MoeForCausalLM, PreTrainedModel

from foretoken import RefusedError, load, slow_log
from foretoken.kernels import library
from foretoken.loading import runtimes
from foretoken.loading.runtimes import Early, Placement, place
from foretoken.loading.sources import Source, source
from foretoken.loading.target import ModelFacts
from foretoken.models import store
from foretoken.models.openvino import conversion
from foretoken.models.stock import selfcheck
from foretoken.models.stock.selfcheck import stir
from tiny import llama
from tiny_families import ROPE, build

pytestmark = pytest.mark.openvino


@pytest.fixture(scope="module", autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory) -> None:
    """One cache for the module: what a family's check found is remembered."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        patch.setattr(selfcheck, "FOUND", {})
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
    stir(model)
    model.generation_config.eos_token_id = None
    model.save_pretrained(folder)
    return str(folder)


def refused(folder: Path, seed: int = 0) -> str:
    """A model that the native decoder refuses, and OpenVINO runs."""
    torch.manual_seed(seed)
    experts = {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
    model = Glm4MoeForCausalLM(Glm4MoeConfig(**ROPE, **experts, head_dim=8)).eval()
    stir(model)
    model.save_pretrained(folder)
    return str(folder)


def at(path: str, **placement: object) -> runtimes.Placed:
    return place(source(path, None, trust=False), Placement(**placement))


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
        assert completion.stats.runtime == "openvino"


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
    model, way = source(path, None, False), conversion.PAGED
    before = conversion.name_of(model, way, "float32")
    assert conversion.name_of(model, way, "float32") == before
    assert conversion.name_of(model, way, "float32", "some layers") != before
    monkeypatch.setattr(conversion, "CACHE_FORMAT", conversion.CACHE_FORMAT + 1)
    assert conversion.name_of(model, way, "float32") != before
    monkeypatch.undo()
    monkeypatch.setattr(store, "versions", lambda: {"foretoken": "another"})
    assert conversion.name_of(model, way, "float32") != before


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
    with pytest.raises(RefusedError, match="no float64; leave runtime at 'auto'"):
        at(path, dtype="float64", runtime="openvino")
    monkeypatch.setitem(sys.modules, "openvino", None)
    for module in [
        name for name in sys.modules if name.startswith("foretoken.models.openvino.conv")
    ]:
        monkeypatch.delitem(sys.modules, module)
    monkeypatch.delattr("foretoken.models.openvino.conversion")
    placed = at(path)
    assert placed.model.runtime == "transformers" and "cannot be used" in placed.why
    with pytest.raises(RefusedError, match="OpenVINO cannot be used.*; leave runtime at 'auto'"):
        at(path, runtime="openvino")
    with pytest.raises(RefusedError, match="OpenVINO cannot be used.*; give dtype='float32'"):
        at(path, dtype="int8")


def test_a_family_that_fails_its_check_stays_on_torch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = saved(tmp_path / "m", seed=5)

    def wrong(way: conversion.Way, network: PreTrainedModel) -> object:
        raise RefusedError(f"llama is not exact over {way.name}")

    monkeypatch.setattr(conversion.Way, "export", wrong)
    broken = [conversion.Way(name) for name in ("one", "another")]
    monkeypatch.setattr(conversion, "ways", lambda network: broken)
    placed = at(path)
    assert placed.model.runtime == "transformers"
    assert "; llama is not exact over one; llama is not exact over another" in placed.why


@pytest.mark.native
def test_the_order_is_fixed(tmp_path: Path) -> None:
    """The native decoder, OpenVINO, torch, whatever is kept of each. A name is followed."""
    other, dense = refused(tmp_path / "other"), str(tmp_path / "dense")
    llama(64, head_dim=16).save_pretrained(dense)
    assert at(dense, runtime="openvino").model.runtime == "openvino"
    for _ in range(2):
        assert at(dense).model.runtime == "native" and at(dense).why == "it passed the self-check"
    assert at(dense, dtype="int8").model.runtime == "native"
    assert at(dense, kv_dtype="int8").model.runtime == "openvino"
    placed = at(other)
    assert placed.model.runtime == "openvino" and "native decoder expects (experts" in placed.why
    assert placed.why.endswith("; it passed the self-check")
    with pytest.raises(RefusedError, match=r"\(experts .*\); leave runtime at 'auto'"):
        at(other, runtime="native")
    placed = at(dense, dtype="float64")
    assert placed.model.runtime == "transformers"
    assert placed.why.startswith("the native decoder has no float64; OpenVINO has no float64")


@pytest.mark.native
def test_a_family_that_the_native_decoder_refuses_is_checked_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next process reads its conversion for OpenVINO beside the tokenizer."""
    path = refused(tmp_path / "m", seed=8)
    assert at(path, dtype="int8").model.runtime == "openvino"
    monkeypatch.setattr(selfcheck, "self_check", lambda *args: pytest.fail("checked again"))
    monkeypatch.setattr(Source, "empty", property(lambda self: pytest.fail("it was read")))
    model = source(path, None, trust=False)
    early = Early(model, Placement("int8"))
    assert (read := early.model()) is not None and read.runtime == "openvino"
    assert "native decoder" in place(model, Placement("int8")).why
    assert Early(model, Placement("int8", torch.device("cuda"))).model() is None


@pytest.mark.native
def test_without_the_kernels_openvino_is_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = saved(tmp_path / "m", seed=9)
    monkeypatch.setattr(library, "FILE", tmp_path / "kernels.so")
    library.library.cache_clear()
    placed = at(path)
    assert placed.model.runtime == "openvino"
    assert placed.why.startswith("the native decoder was not compiled: install g++")
    assert Early(source(path, None, trust=False), Placement()).model() is not None


def test_a_model_in_memory_is_used_as_it_is_unless_openvino_is_asked_for() -> None:
    torch.manual_seed(6)
    model = build("Llama").double()
    assert place(model, Placement()).model.runtime == "transformers"
    placed = place(model, Placement(runtime="openvino"))
    assert placed.model.runtime == "openvino"
    assert model.dtype == torch.float64  # still


def test_a_cache_that_cannot_be_written_costs_only_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = saved(tmp_path / "m", seed=7)
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    spec = load(path, "none")
    assert spec.target.runtime == "openvino" and store.entries() == []
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
        assert facts._facts is not None and own._facts is None
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
    (entry.folder / "decoder.bin").write_bytes(b"broken")
    assert load(path, "none").generate([5, 6, 7], max_new_tokens=9)[0].tokens == expected


@pytest.mark.parametrize(("threads", "pinned"), [(1, False), (3, False), (4, True)])
def test_threads_are_pinned_only_where_a_process_has_all_processors(
    threads: int, pinned: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else the first threads of several processes would all be on the first processors."""
    monkeypatch.setattr(conversion.os, "cpu_count", lambda: 4)
    monkeypatch.setattr(conversion.torch, "get_num_threads", lambda: threads)
    assert conversion.settings("float32")["ENABLE_CPU_PINNING"] is pinned
