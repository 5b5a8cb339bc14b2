"""Which drafters may stand together over a target: each model or drafter has one place's rows."""

from __future__ import annotations

import pytest

import foretoken
import tiny
from foretoken.drafters.base import Drafter
from foretoken.drafters.blockwise import Heads
from foretoken.drafters.cascade import CascadeDrafter
from foretoken.drafters.lm import LMDrafter
from foretoken.drafters.lookup import LookupDrafter
from foretoken.drafters.mixture import MixtureDrafter
from foretoken.errors import InputError
from foretoken.models.table import TableModel
from foretoken.speculator import Speculator


def table() -> TableModel:
    return TableModel.markov([[0.6, 0.4], [0.3, 0.7]])


def refused(target: TableModel, drafter: Drafter, kind: str) -> None:
    with pytest.raises(InputError, match=f"^one {kind} stands in two places .*; make another"):
        Speculator(target, drafter)


def test_one_drafter_in_two_parts() -> None:
    lookup, lm = LookupDrafter(), LMDrafter(table())
    refused(table(), MixtureDrafter([(lookup, 1), (lookup, None)]), "LookupDrafter")
    refused(table(), MixtureDrafter([(CascadeDrafter(table(), lm), 1), (lm, 1)]), "LMDrafter")


def test_one_model_in_two_drafters() -> None:
    model = table()
    lm = LMDrafter(model)
    refused(table(), MixtureDrafter([(lm, 1), (LMDrafter(model), None)]), "TableModel")
    refused(table(), CascadeDrafter(model, lm), "TableModel")
    refused(model, lm, "TableModel")


def test_what_stands_apart_runs() -> None:
    model = table()
    parts = [(CascadeDrafter(table(), LMDrafter(table())), 2), (LookupDrafter(), None)]
    spec = Speculator(model, MixtureDrafter(parts))
    completions = spec.generate([[0], [1]], gamma=4, max_new_tokens=9)
    plain = spec.generate([[0], [1]], gamma=0, max_new_tokens=9)
    assert [c.tokens for c in completions] == [c.tokens for c in plain]


def test_heads_that_were_loaded_for_another_target(tmp_path) -> None:
    file = tmp_path / "heads.safetensors"
    Heads.fresh(tiny.llama(), 2).save(file)
    first = foretoken.load(tiny.llama(), f"heads:{file}")
    for target in tiny.llama(), tiny.llama(seed=1):
        with pytest.raises(InputError, match="^HeadsDrafter reads .*another target.*'heads:FILE'"):
            foretoken.load(target, first.drafter)
    again = Speculator(first.target, first.drafter)
    assert again.generate([5, 6], max_new_tokens=8, gamma=2)[0].stats.drafted


def test_a_model_in_memory_may_draft_for_itself() -> None:
    """Two places of one network are two models, each with a cache of its own."""
    model = tiny.llama()
    spec = foretoken.load(model, model)
    completions = spec.generate([[1, 2], [3]], gamma=2, max_new_tokens=8)
    assert all(c.stats.accepted == c.stats.drafted for c in completions)
