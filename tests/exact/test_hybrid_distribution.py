"""Hybrids, as target and as draft: every course of two steps, the states read after each rejection
among them, leaves the distribution as it is. A state of another length would show.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import hybrids
import pairs
from exact.worlds import Case, Table, bias
from foretoken.drafters.cascade import CascadeDrafter
from foretoken.drafters.lm import LMDrafter
from foretoken.drafters.lookup import LookupDrafter
from foretoken.drafters.mixture import MixtureDrafter
from foretoken.models.rewindable_states import MAX_PASS_WIDTH, MAX_REWIND_TOKENS
from foretoken.models.stock.model import CausalModel
from foretoken.request import Request
from foretoken.sampling.acceptance_rules import EXACT_RULES, block
from foretoken.sampling.keys import SequenceKey
from oracle import Model, Text, random_model

pytestmark = pytest.mark.daily

V, GAMMA = 2, 2
VISIBLE = 1e-3
ROW = (Request([1, 0, 1, 1], 100, SequenceKey(0, 0)),)
KINDS = ("Lfm2ForCausalLM", "Qwen3_5ForCausalLM")
OTHERS = ("GraniteMoeHybridForCausalLM", "FalconH1ForCausalLM", "KimiLinearForCausalLM")
EVERY = [*KINDS, *(pytest.param(name, marks=pytest.mark.prove) for name in OTHERS)]


class Rows(CausalModel):
    """Draft tokens that nobody asked for are certain, as those of `Table`."""

    def score(self, blocks: Any, need: list[int]) -> Tensor:
        logits = super().score(blocks, need)
        for b, wanted in enumerate(need):
            logits[b, wanted:, 1:] = -1e9
        return logits


class Stale(Rows):
    """The next pass reads the state behind the rejected tokens, as if they had been kept."""

    rejected: list[int]

    def set_lengths(self, lengths: list[int]) -> None:
        gone = [a - b for a, b in zip(self.lengths, lengths, strict=True)]
        super().set_lengths(lengths)
        cache = self.cache

        def settled(rows: list[int], lengths: list[int], counts: list[int]) -> list[int]:
            vars(cache).pop("advance_bases")
            behind = cache.advance_bases(rows, lengths, counts)
            return [n + gone[b] for b, n in zip(rows, behind, strict=True)]

        cache.advance_bases = settled


@cache
def network(name: str, role: str) -> Any:
    own = hybrids.random(name, 1, V)
    with torch.no_grad():
        own.get_output_embeddings().weight *= 0.2  # else one of the two tokens is certain
    return own if role == "target" else pairs.relative(own, 0.3)


@cache
def law(name: str) -> Model:
    """The target's distribution behind a text, read at once, in a batch of its own."""

    @cache
    def distribution(text: Text) -> np.ndarray:
        model = CausalModel(network(name, "target"))
        model.start([[]])
        return model.score([list(text)], [1])[0, 0].softmax(0).numpy()

    return distribution


def case(
    name: str, drafter: Callable[[], Any], rule: Any = block, kind: Any = Rows, rows: Any = ROW
) -> Case:
    return Case(lambda: kind(network(name, "target")), drafter, rule, GAMMA, rows=rows)


def draft(name: str, kind: Any = Rows) -> LMDrafter:
    return LMDrafter(kind(network(name, "draft")), V)


@pytest.mark.parametrize("name", EVERY)
def test_the_law_is_that_of_full_forwards(name: str) -> None:
    """To float32's rounding within the family's own code; and far from flat."""
    texts = [(1, 0, 1, 1), (1, 0, 1, 1, 0, 0, 1), tuple(i % 3 % 2 for i in range(80))]
    for text in texts:
        own = pairs.scores(network(name, "target"), [*text])[-1].softmax(0).numpy()
        assert np.abs(law(name)(text) - own).max() < 1e-5
    assert len({round(float(law(name)(text)[0]), 2) for text in texts}) > 1


@pytest.mark.parametrize("rule", EXACT_RULES)
@pytest.mark.parametrize("name", EVERY)
def test_a_hybrid_drafts_for_a_hybrid(name: str, rule: str, monkeypatch) -> None:
    found = case(name, lambda: draft(name), EXACT_RULES[rule])
    assert bias(found, law(name), monkeypatch) < 1e-12


@pytest.mark.prove
@pytest.mark.parametrize(
    "length",
    [
        MAX_PASS_WIDTH - 3,
        MAX_PASS_WIDTH - 1,
        pytest.param(MAX_PASS_WIDTH + MAX_REWIND_TOKENS, marks=pytest.mark.prove),
    ],
)
def test_where_bases_move(length: int, monkeypatch) -> None:
    """Between a draft's passes, before the target's, or while the prompt is read."""
    row = (Request([i % 3 % 2 for i in range(length)], 100, SequenceKey(0, 0)),)
    found = case(KINDS[1], lambda: draft(KINDS[1]), rows=row)
    assert bias(found, law(KINDS[1]), monkeypatch) < 1e-12


DRAFTERS: dict[str, Callable[[], Any]] = {
    "a table": lambda: LMDrafter(Table(random_model(2, V), V), V),
    "look-up": LookupDrafter,
    "cascade": lambda: CascadeDrafter(Rows(network(KINDS[1], "draft")), LookupDrafter(), 2),
    "mixture": lambda: MixtureDrafter([(LookupDrafter(), 1), (draft(KINDS[1]), None)]),
}


@pytest.mark.parametrize("kind", DRAFTERS)
def test_whatever_drafts(kind: str, monkeypatch) -> None:
    name = KINDS[1]
    assert bias(case(name, DRAFTERS[kind]), law(name), monkeypatch) < 1e-12


def test_a_hybrid_drafts_for_a_table(monkeypatch) -> None:
    p = random_model(1, V)
    found = Case(lambda: Table(p, V), lambda: draft(KINDS[1]), block, GAMMA, rows=ROW)
    assert bias(found, p, monkeypatch) < 1e-12


@pytest.mark.parametrize("name", EVERY)
def test_a_target_that_reads_the_state_behind_rejected_tokens_is_seen(
    name: str, monkeypatch
) -> None:
    wrong = case(name, lambda: draft(name), kind=Stale)
    assert bias(wrong, law(name), monkeypatch) > VISIBLE


def test_a_draft_may_read_any_state(monkeypatch) -> None:
    """It guesses worse, by a distribution that is the one its tokens are drawn from."""
    name = KINDS[1]
    found = case(name, lambda: draft(name, Stale))
    assert bias(found, law(name), monkeypatch) < 1e-12
