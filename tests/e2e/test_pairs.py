"""Drafts over pairs, as users run them: at temperature 0 every text is the target's own, otherwise
distributed as its own; and a draft that is the target itself is always right."""

from __future__ import annotations

import copy
import logging
from collections import Counter
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LlamaForCausalLM

import moving
import oracle
import pairs
import tiny
from foretoken import Engine, Speculator, load
from foretoken.drafters.pairs import PairsDrafter
from foretoken.loading import state_drafts
from foretoken.models.shown import FINAL
from foretoken.models.stock.pair_files import PairsDraft
from pairdrafts import (
    EagleFile,
    EagleLaw,
    Tensors,
    add_mtp,
    eagle_file,
    embedding,
    filed,
    mtp_draft,
    mtp_layer,
    noted,
    pairs_drafter,
    require_true,
    states_of,
)
from pairs import PROMPTS, V, assert_greedy, stock, target

pytestmark = pytest.mark.daily

LIMIT = 24
GAMMAS = (0, 1, 4, None)
TAPS = (0, 1, 2)
KEPT = [i for i in range(V) if i % 8 != 7]


def untrained(kind: str) -> PairsDraft:
    model = target("Llama")
    if kind == "mtp":
        return mtp_draft(model, filed(mtp_layer(model), "mtp"))
    width = model.config.hidden_size
    return eagle_file(V, TAPS, KEPT, width=width).read(model)


@cache
def rehearsed(kind: str) -> PairsDraft:
    """A draft that has learned the first greedy text, so that it is often right there."""
    model, draft = target("Llama"), untrained(kind)
    network = draft.network.double().requires_grad_(True)
    text = [*PROMPTS[0], *stock(model, PROMPTS[0], LIMIT)]
    states, words = states_of(model, text, draft.taps)[:-2], embedding(model, draft)
    places = {token: i for i, token in enumerate(KEPT if draft.ids is not None else range(V))}
    wanted = torch.tensor([places.get(token, -100) for token in text[2:]])
    steps = torch.optim.Adam(network.parameters(), lr=0.02)
    for _ in range(40):
        joined = states if network.join is None else network.join(states)
        both = torch.cat([words(torch.tensor(text[1:-1])), joined], -1)[None]
        logits = network(both, torch.arange(len(states))[None]).logits[0]
        torch.nn.functional.cross_entropy(logits, wanted).backward()
        steps.step()
        steps.zero_grad()
    network.requires_grad_(False)
    return draft


def rehearsed_pair(kind: str) -> Speculator:
    drafter = pairs_drafter(target("Llama"), rehearsed(kind))
    return Speculator(drafter.target, drafter)


KINDS = ("eagle3", "mtp")


@pytest.mark.parametrize("kind", KINDS)
def test_greedy_texts_are_the_target_s_own(kind: str) -> None:
    model, pair = target("Llama"), rehearsed_pair(kind)
    for gamma in GAMMAS:
        texts = pair.generate(PROMPTS, max_new_tokens=LIMIT, gamma=gamma)
        (alone,) = pair.generate(PROMPTS[0], max_new_tokens=LIMIT, gamma=gamma)
        for prompt, text in zip([*PROMPTS, PROMPTS[0]], [*texts, alone], strict=True):
            assert_greedy(text, model, prompt, LIMIT)
        if gamma:
            assert 0 < texts[0].stats.accepted and texts[0].stats.target_calls < LIMIT
            assert any(text.stats.accepted < text.stats.drafted for text in texts)


@pytest.mark.parametrize("kind", KINDS)
def test_rows_that_come_and_go(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    moving.steady_times(monkeypatch)
    model, spec = target("Llama"), rehearsed_pair(kind)
    waiting = [(p, n, g) for n in (3, LIMIT) for p in PROMPTS for g in GAMMAS]
    asked: dict[int, list[int]] = {}
    with Engine(spec, 4) as engine:
        for turn in range(600):
            if waiting and turn % 2 == 0:
                prompt, limit, gamma = waiting.pop()
                asked[engine.add(prompt, max_new_tokens=limit, gamma=gamma)] = prompt
            if turn % 9 == 8 and engine.running > 1:
                spec.core.preempt()
            for event in engine.step():
                if event.completion is not None:
                    length = len(event.completion.tokens)
                    assert_greedy(event.completion, model, asked.pop(event.id), length)
            moving.require_accounted(spec)
            if not waiting and not asked:
                break
    moving.require_empty(spec)
    assert not asked


WAYS: tuple[dict[str, Any], ...] = (
    {"temperature": 1.0},
    {"temperature": 0.7, "top_p": 0.8, "repetition_penalty": 1.3},
)


@pytest.mark.parametrize("way", WAYS, ids=["plain", "cut"])
@pytest.mark.parametrize("kind", KINDS)
def test_in_coupled_mode_a_seed_gives_one_text(kind: str, way: dict[str, Any]) -> None:
    pair = rehearsed_pair(kind)
    options = {"max_new_tokens": LIMIT, "rule": "coupled", "seed": [(5, 0), (5, 1), (8, 2)]} | way
    texts = [
        [text.tokens for text in pair.generate(PROMPTS, gamma=gamma, **options)]
        for gamma in (0, 1, 4)
    ]
    assert texts[0] == texts[1] == texts[2]


SMALL, LENGTH, PROMPT = 6, 3, [3, 5, 1, 4]


@cache
def small() -> Any:
    model = tiny.llama(SMALL, seed=3).double()
    with torch.no_grad():
        model.lm_head.weight *= 0.3  # else nearly certain
    model.generation_config.eos_token_id = None
    return model.requires_grad_(False)


def small_draft(kind: str) -> PairsDraft:
    if kind == "mtp":
        return mtp_draft(small(), filed(mtp_layer(small(), scale=0.2), "mtp"))
    return eagle_file(SMALL, TAPS, [*range(1, SMALL)]).read(small())


def penalized(logits: Tensor, seen: set[int], penalty: float) -> Tensor:
    for token in seen:
        logits[token] = logits[token] / penalty if logits[token] > 0 else logits[token] * penalty
    return logits


@pytest.mark.prove
@pytest.mark.parametrize(
    ("kind", "n", "top_p", "penalty"),
    [
        ("eagle3", 2000, 0.95, 1.3),
        ("mtp", 2000, 1.0, 1.0),
        ("eagle3", 20000, 1.0, 1.0),
        ("mtp", 20000, 0.95, 1.3),
    ],
)
def test_texts_have_the_exact_distribution(
    kind: str, n: int, top_p: float, penalty: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fails by chance for one seed in a million."""
    monkeypatch.setattr("foretoken.speculator.MAX_ROWS", 1000)
    drafter = pairs_drafter(small(), small_draft(kind))
    options = {"top_p": top_p, "repetition_penalty": penalty, "temperature": 1.0}
    made = Speculator(drafter.target, drafter).generate(
        [PROMPT] * n, max_new_tokens=LENGTH, gamma=2, seed=1, **options
    )
    steps = [record for text in made for record in text.steps]
    assert any(r.accepted for r in steps) and any(r.accepted < r.drafted for r in steps)

    def distribution(text: oracle.Text) -> Any:
        logits = pairs.scores(small(), [*PROMPT, *text])[-1]
        seen = {*PROMPT, *text}
        return oracle.standardize(penalized(logits, seen, penalty).numpy(), 1.0, 0, top_p)

    found = Counter(tuple(text.tokens) for text in made)
    assert oracle.p_value(found, oracle.joint(distribution, LENGTH)) > 1e-6


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


def require_always_right(spec: Speculator) -> None:
    """Every draft token is kept: were it made for the place before or behind, few would be."""
    texts = [[5, 17, 33], [60, 12, 7, 9, 44, 31], [9], [(7 * i * i) % 300 for i in range(70)]]
    for temperature in (0.0, 1.0):
        for each in (texts, texts[:1]):
            options = {"max_new_tokens": 30, "gamma": 4, "temperature": temperature, "seed": 2}
            for text in spec.generate(each, **options):
                assert text.stats.accepted == text.stats.drafted > 20


def test_a_draft_that_is_the_target_is_always_right() -> None:
    model = bigrams().double()
    drafter = pairs_drafter(model, mtp_draft(model, itself(model)))
    require_always_right(Speculator(drafter.target, drafter))


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


def require_loaded(base: Path, draft: str, taps: str, runtime: str) -> None:
    """It reads the layers that were asked for, and the text is the target's own."""
    options = {"runtime": runtime, "draft_dtype": "float32"}
    spec = load(base / "target", base / draft, draft_taps=taps, **options)
    drafter: Any = spec.drafter
    ids = (1, 2, 3) if taps == "inputs" else (2, 3, 4)
    assert drafter.target.taps == ids
    assert drafter.runtime == runtime and drafter.decoder.computed == "float32"
    notes, texts = noted(drafter), ["It was the first day of the year", "the old man"]
    found = spec.generate(texts, max_new_tokens=20, gamma=3)
    plain = load(base / "target", "none", runtime=runtime).generate(texts, max_new_tokens=20)
    assert [text.tokens for text in found] == [text.tokens for text in plain]
    spec.generate(texts, max_new_tokens=20, gamma=3, temperature=1.5, seed=3)
    network: Any = LlamaForCausalLM.from_pretrained(base / "target")
    require_true(notes, EagleLaw(network.double(), EAGLE, ids), 1e-3)


@pytest.mark.parametrize(
    ("draft", "taps"),
    [("speculators", "outputs"), pytest.param("original", "inputs", marks=pytest.mark.prove)],
)
def test_eagle_loads_from_a_folder(folders: Path, draft: str, taps: str) -> None:
    require_loaded(folders, draft, taps, "transformers")


@pytest.mark.parametrize(
    "runtime",
    ["transformers", pytest.param("native", marks=pytest.mark.native)],
)
@pytest.mark.parametrize(
    ("draft", "taps"),
    [("original", "outputs"), pytest.param("speculators", "inputs", marks=pytest.mark.prove)],
)
def test_eagle_loads_beside_its_target(folders: Path, draft: str, taps: str, runtime: str) -> None:
    require_loaded(folders, draft, taps, runtime)


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
    assert "reads the states before layers" in caplog.text and "draft_taps sets it" in caplog.text
    assert drafter.columns in (slice(0, 96), slice(96, 192))
    for better, ids in ((slice(0, 96), (1, 2, 3)), (slice(96, 192), (2, 3, 4))):

        def alpha(target: Any, way: Any, at: slice = better) -> float:
            return 0.9 if way.columns == at else 0.1

        monkeypatch.setattr(state_drafts, "_agreement", alpha)
        monkeypatch.setattr(state_drafts, "remembered", lambda name: {})
        spec = way()
        chosen: Any = spec.drafter
        assert chosen.columns == better
        notes = noted(chosen)
        spec.generate("It was", max_new_tokens=10, gamma=3, temperature=1.5, seed=3)
        network: Any = copy.deepcopy(spec.target.model).double()
        require_true(notes, EagleLaw(network, EAGLE, ids), 1e-3)


def test_a_target_s_own_layer_loads(folders: Path) -> None:
    spec = load(folders / "own", "mtp", runtime="transformers")
    assert isinstance(spec.drafter, PairsDrafter) and spec.target.taps == (FINAL,)
    require_always_right(spec)
