"""Drafts over pairs, as users run them: every greedy text is the target's own, and a draft that is
the target itself is always right."""

from __future__ import annotations

import copy
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaForCausalLM

import tiny
from foretoken import Speculator, load
from foretoken.drafters.mtp_stacks import MtpStackDrafter
from foretoken.drafters.pairs import PairsDrafter
from foretoken.loading import hidden_state_drafts
from foretoken.models import store
from foretoken.models.hidden_states import FINAL_TAP
from pairdrafts import (
    EagleFile,
    EagleLaw,
    Tensors,
    add_mtp,
    eagle_file,
    filed,
    mtp_draft,
    mtp_layer,
    noted,
    pairs_drafter,
    require_true,
)


def bigrams(**settings: Any) -> Any:
    """A Llama whose distributions depend on the last token only."""
    model = tiny.llama(320, context=256, **settings)
    with torch.no_grad():
        model.get_input_embeddings().weight.mul_(10)  # so that eps counts for nothing
        for name, weight in model.named_parameters():
            if name.endswith(("o_proj.weight", "down_proj.weight")):
                weight.zero_()
    model.generation_config.eos_token_id = None
    return model.requires_grad_(False)


def itself(model: Any) -> Tensors:
    """The layer that makes of a token what the model makes of it."""
    layer = {name: torch.zeros_like(x) for name, x in mtp_layer(model).items()}
    H = model.config.hidden_size
    layer |= {"enorm.weight": torch.ones(H), "post_norm.weight": model.model.norm.weight}
    layer["eh_proj.weight"] = torch.cat([torch.eye(H), torch.zeros(H, H)], 1)
    return filed(layer, str(model.config.num_hidden_layers))


TEXTS = [[5, 17, 33], [60, 12, 7, 9, 44, 31], [9], [(7 * i * i) % 300 for i in range(70)]]


def require_always_right(spec: Speculator) -> None:
    """Every draft token is kept: were it made for the place before or behind, few would be."""
    for temperature in (0.0, 1.0):
        for each in (TEXTS, TEXTS[:1]):
            options = {"max_new_tokens": 30, "gamma": 4, "temperature": temperature, "seed": 2}
            for text in spec.generate(each, **options):
                assert text.stats.accepted == text.stats.drafted > 20


def test_a_draft_that_is_the_target_is_always_right() -> None:
    """And one that is nearly the target is right at times, which no greedy text shows."""
    model = bigrams().double()
    drafter = pairs_drafter(model, mtp_draft(model, itself(model)))
    require_always_right(Speculator(drafter.target, drafter))
    dice = torch.Generator().manual_seed(0)
    layer = {n: x + 0.2 * torch.randn(x.shape, generator=dice) for n, x in itself(model).items()}
    drafter = pairs_drafter(model, mtp_draft(model, layer))
    spec = Speculator(drafter.target, drafter)
    plain = [text.tokens for text in spec.generate(TEXTS, max_new_tokens=30, gamma=0)]
    for gamma in (1, 4, None):
        texts = spec.generate(TEXTS, max_new_tokens=30, gamma=gamma)
        assert [text.tokens for text in texts] == plain
        kept, made = (sum(getattr(t.stats, n) for t in texts) for n in ("accepted", "drafted"))
        assert gamma is None or 0 < kept < made


EAGLE: EagleFile = eagle_file(320, (1, 2, 3), [*range(20, 320)], seed=5)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target, EAGLE-3 drafts for it in both layouts, and a target with a layer of its own."""
    base = tmp_path_factory.mktemp("pairs")
    model = tiny.llama(320, context=256, num_hidden_layers=4, head_dim=16)
    model.generation_config.eos_token_id = None
    tiny.folder(base / "target", model, tiny.byte_level())
    EAGLE.save(base / "speculators")
    EAGLE.original().save(base / "original")
    own = bigrams()
    tiny.folder(base / "own", own, tiny.byte_level())
    add_mtp(base / "own", itself(own))
    return base


@pytest.mark.daily("speculators", "native")
@pytest.mark.parametrize(
    ("draft", "taps", "runtime"),
    [
        pytest.param("speculators", "outputs", "transformers", id="speculators"),
        pytest.param("original", "inputs", "transformers", id="original"),
        pytest.param("original", "outputs", "native", id="native", marks=pytest.mark.native),
        pytest.param("speculators", "inputs", "native", id="both", marks=pytest.mark.native),
    ],
)
def test_eagle_loads_from_a_folder(folders: Path, draft: str, taps: str, runtime: str) -> None:
    """It reads the layers that were asked for, and the text is the target's own."""
    base, options = folders, {"runtime": runtime, "draft_dtype": "float32"}
    spec = load(base / "target", base / draft, draft_taps=taps, **options)
    drafter: Any = spec.drafter
    ids = (1, 2, 3) if taps == "inputs" else (2, 3, 4)
    assert drafter.target.taps == ids
    assert drafter.runtime == runtime and drafter.decoder.compute_dtype == "float32"
    notes, texts = noted(drafter), ["It was the first day of the year", "the old man"]
    found = spec.generate(texts, max_new_tokens=20, gamma=3)
    plain = load(base / "target", "none", runtime=runtime).generate(texts, max_new_tokens=20)
    assert [text.tokens for text in found] == [text.tokens for text in plain]
    spec.generate(texts, max_new_tokens=20, gamma=3, temperature=1.5, seed=3)
    network: Any = LlamaForCausalLM.from_pretrained(base / "target")
    require_true(notes, EagleLaw(network.double(), EAGLE, ids), 1e-3)


@pytest.mark.prove
def test_the_layers_are_measured_where_the_file_does_not_say(
    folders: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def way() -> Any:
        spec = load(folders / "target", folders / "speculators", runtime="transformers")
        assert spec.target.taps == (1, 2, 3, 2, 3, 4)
        return spec

    with caplog.at_level(logging.INFO, logger="foretoken"):
        drafter = way().drafter
    assert "uses the hidden states before layers" in caplog.text and "set draft_taps" in caplog.text
    assert drafter.columns in (slice(0, 96), slice(96, 192))
    for better, ids in ((slice(0, 96), (1, 2, 3)), (slice(96, 192), (2, 3, 4))):

        def alpha(target: Any, way: Any, at: slice = better) -> float:
            return 0.9 if way.columns == at else 0.1

        monkeypatch.setattr(hidden_state_drafts, "_measure_alpha", alpha)
        monkeypatch.setattr(hidden_state_drafts, "load_cached_values", lambda name: {})
        spec = way()
        chosen: Any = spec.drafter
        assert chosen.columns == better
        notes = noted(chosen)
        spec.generate("It was", max_new_tokens=10, gamma=3, temperature=1.5, seed=3)
        network: Any = copy.deepcopy(spec.target.model).double()
        require_true(notes, EagleLaw(network, EAGLE, ids), 1e-3)


RUNTIMES = ["transformers", pytest.param("native", marks=pytest.mark.native)]


@pytest.mark.parametrize("runtime", RUNTIMES)
def test_a_target_s_own_layer_loads(folders: Path, runtime: str) -> None:
    spec = load(folders / "own", "mtp", runtime=runtime, draft_dtype="float32")
    assert isinstance(spec.drafter, PairsDrafter) and spec.target.taps == (FINAL_TAP,)
    assert spec.drafter.runtime == runtime
    require_always_right(spec)


@pytest.mark.native
def test_a_target_and_its_own_layer_are_stored_side_by_side(folders: Path) -> None:
    """Both in int8, from the same files."""
    specs: list[Any] = [load(folders / "own", "mtp", dtype="int8") for _ in range(2)]
    keys = [(spec.target.identity, spec.drafter.identity) for spec in specs]
    assert keys[0] == keys[1] and len({*keys[0]}) == 2
    assert all(store.find(key) for key in keys[0])
    assert {entry.dtype for entry in store.list_entries()} >= {
        "int8 (native)",
        "int8 (native, MTP layers without head)",
    }


@pytest.mark.parametrize("runtime", RUNTIMES)
def test_a_target_s_own_stack_loads(tmp_path: Path, runtime: str) -> None:
    """Both of its layers are always right, and each makes one draft token."""
    own = bigrams()
    tiny.folder(tmp_path / "own", own, tiny.byte_level())
    count = own.config.num_hidden_layers
    first = itself(own)
    second = {key.replace(f".{count}.", f".{count + 1}."): x.clone() for key, x in first.items()}
    add_mtp(tmp_path / "own", first | second)
    spec = load(tmp_path / "own", "mtp", runtime=runtime, draft_dtype="float32")
    assert spec.drafter.runtime == runtime
    assert isinstance(spec.drafter, MtpStackDrafter) and spec.target.taps == (FINAL_TAP,)
    for temperature in (0.0, 1.0):
        options = {"max_new_tokens": 30, "gamma": 4, "temperature": temperature, "seed": 2}
        for text in spec.generate(TEXTS, **options):
            assert text.stats.accepted == text.stats.drafted > 15
            assert max(step.drafted for step in text.steps) == 2
