"""The draft of a target that comes without one: what is measured, chosen, said and remembered."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path

import pytest

import foretoken
from foretoken.costing.costs import Costs
from foretoken.costing.pair_costs import PairCosts
from foretoken.drafters.lm import LMDrafter
from foretoken.drafters.lookup import LookupDrafter
from foretoken.loading import draft as drafts
from foretoken.loading import draft_choice
from tiny import byte_level, folder, llama

# Seconds by the draft: of look-up, which costs nothing, and of copies that take these of a pass
PASS = 0.01


def costs(share: float, alpha: float) -> Costs:
    flat = tuple((n, PASS) for n in (1, 17))
    return Costs(
        ((0, 0.0), (16, 16 * share * PASS)), flat, ((1, 0.0), (17, 0.0)), prior=(10, alpha)
    )


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    model = llama(hidden_size=128, intermediate_size=192)
    return folder(tmp_path_factory.mktemp("chosen") / "target", model, byte_level())


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> dict[str, Costs]:
    """The costs that are measured, by the draft; an empty cache."""
    by_draft = {"lookup": costs(0, 0.5)}
    kinds: list[str] = []

    def step_costs(pair: PairCosts, params: object, rows: int = 1) -> Costs:
        draft_name = pair.name.rpartition(", ")[2]
        kinds.append(draft_name)
        return by_draft[draft_name]

    monkeypatch.setattr(PairCosts, "get_step_costs", step_costs)
    monkeypatch.setattr(draft_choice, "load_cached_values", lambda file: {})
    by_draft["asked"] = kinds  # type: ignore[assignment]
    return by_draft


@pytest.mark.native
@pytest.mark.parametrize(
    ("int4", "int8", "best"),
    [
        (costs(0.2, 0.97), None, "lookup+self:int4"),  # not tried: it could not be faster
        (costs(0.2, 0.4), costs(0.3, 0.98), "lookup+self:int8"),
        (costs(0.9, 0.6), None, "lookup"),
    ],
)
def test_the_fastest_by_measured_costs(int4, int8, best, target, measured, caplog):
    measured |= {"lookup+self:int4": int4, "lookup+self:int8": int8}
    caplog.set_level(logging.INFO, "foretoken.loading.draft_choice")
    spec = foretoken.load(target).prepared()
    assert spec.draft_name == best
    assert f"no draft was given: {best} drafts" in caplog.text
    assert ("lookup+self:int8" in measured["asked"]) == (int8 is not None)
    assert (spec.predicted_output is None) == (best == "lookup")
    plain = foretoken.load(target, "none").generate("It was", max_new_tokens=20)
    (completion,) = spec.generate("It was", max_new_tokens=20, gamma=3)
    assert completion.tokens == plain[0].tokens


@pytest.mark.native
def test_loading_measures_and_converts_nothing_until_it_is_asked_to(target, measured, monkeypatch):
    made: list[str] = []
    own_copy = draft_choice.make_target_copy
    monkeypatch.setattr(
        draft_choice,
        "make_target_copy",
        lambda name, *rest: [made.append(name), own_copy(name, *rest)][1],
    )
    measured |= {"lookup+self:int4": costs(0.2, 0.97)}
    spec = foretoken.load(target)
    assert spec.draft_name == "lookup" and not measured["asked"] and not made
    best = spec.prepared()
    assert best.draft_name == "lookup+self:int4" and set(made) == {"self:int4"}
    assert best.prepared() is best


@pytest.fixture
def kept(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """The choices that are remembered, by target and draft."""
    choices: dict[str, str] = {}
    monkeypatch.setattr(draft_choice, "load_cached_values", lambda file: choices)
    monkeypatch.setattr(
        draft_choice, "save_cached_value", lambda file, name, kind: choices.update({name: kind})
    )
    return choices


@pytest.mark.native
def test_a_quick_target_looks_up_and_a_drafter_of_ones_own_stays(target, measured, monkeypatch):
    mine = replace(foretoken.load(target), drafter=LookupDrafter())
    assert mine.prepared() is mine and not measured["asked"]
    monkeypatch.setattr(draft_choice, "MIN_STEP_SECONDS", 2 * PASS)
    assert isinstance(foretoken.load(target).prepared().drafter, LookupDrafter)
    assert measured["asked"] == ["lookup"]


def test_nothing_is_measured_where_no_copy_can_be(target, measured, caplog):
    caplog.set_level(logging.INFO, "foretoken.loading.draft_choice")
    assert isinstance(foretoken.load(target).prepared().drafter, LookupDrafter)  # on torch
    assert not measured["asked"] and not caplog.text


@pytest.fixture(scope="module")
def draft(tmp_path_factory: pytest.TempPathFactory) -> Path:
    model = llama(seed=1, num_hidden_layers=1, hidden_size=128, intermediate_size=192)
    return folder(tmp_path_factory.mktemp("chosen") / "draft", model, byte_level())


@pytest.mark.native
@pytest.mark.parametrize(
    ("by_dtype", "best"),
    [
        ({"float32": 0.2, "int8": 0.1, "int4": 0.05}, "int4"),
        ({"float32": 0.2, "int8": 0.1, "int4": 0.1}, "int8"),
        ({"float32": 0.2, "int8": 0.2, "int4": 0.05}, "float32"),  # int4 is not tried then
    ],
)
def test_a_draft_is_rounded_where_that_is_faster(
    by_dtype, best, target, draft, kept, monkeypatch, caplog
):
    def step_costs(pair: PairCosts, params: object, rows: int = 1) -> Costs:
        assert isinstance(pair.drafter, LMDrafter)
        return costs(by_dtype[pair.drafter.model.compute_dtype], 0.8)

    monkeypatch.setattr(PairCosts, "get_step_costs", step_costs)
    monkeypatch.setattr(drafts, "MIN_ROUNDED_PARAMETERS", 1000)
    caplog.set_level(logging.INFO, "foretoken.loading.draft_choice")
    for _ in range(2):  # measured, then remembered
        drafter = foretoken.load(target, draft).prepared().drafter
        assert isinstance(drafter, LMDrafter) and drafter.model.compute_dtype == best
        assert ("drafts in" in caplog.text) == (best != "float32")
        assert list(kept.values()) == ["" if best == "float32" else best]
    chosen_draft = foretoken.load(target, draft, draft_dtype="float32").drafter
    assert isinstance(chosen_draft, LMDrafter) and chosen_draft.model.compute_dtype == "float32"
    monkeypatch.setattr(drafts, "MIN_ROUNDED_PARAMETERS", 10**9)
    small = foretoken.load(target, draft).prepared().drafter
    assert isinstance(small, LMDrafter) and small.model.compute_dtype == "float32"


@pytest.mark.native
def test_a_choice_stays(target, measured, kept, tmp_path):
    """Whatever later measurements would say: the draft does not change between runs. Other weights
    are chosen for anew."""
    measured |= {"lookup+self:int4": costs(0.2, 0.97)}
    assert foretoken.load(target).prepared().draft_name == "lookup+self:int4"
    assert measured["asked"] == ["lookup", "lookup+self:int4"] and list(kept.values()) == ["int4"]
    own = llama(seed=9, hidden_size=128, intermediate_size=192)
    other = folder(tmp_path / "other", own, byte_level())
    assert foretoken.load(other).prepared().draft_name == "lookup+self:int4"
    assert list(kept.values()) == ["int4", "int4"]
    measured |= {"lookup+self:int4": costs(0.9, 0.5), "lookup+self:int8": costs(0.1, 0.99)}
    assert foretoken.load(target).prepared().draft_name == "lookup+self:int4"
    assert len(measured["asked"]) == 4
