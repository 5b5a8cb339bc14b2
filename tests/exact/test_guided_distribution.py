"""Under guidance the mixture of two readings is the target's distribution: whatever drafts, two
steps leave it as it is. A second reading that is not taken back, or of another text, shows.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from exact.worlds import Case, Table, bias
from foretoken.drafters.lm import LMDrafter
from foretoken.drafters.lookup import LookupDrafter
from foretoken.models.guidance import GuidedModel
from foretoken.request import Request
from foretoken.sampling.acceptance_rules import EXACT_RULES, block
from foretoken.sampling.keys import SequenceKey
from oracle import Model, Text, random_model

pytestmark = pytest.mark.daily

V, GAMMA, SCALE = 2, 2, 1.7
VISIBLE = 1e-3
P, Q = random_model(1, V), random_model(2, V)
PROMPT = (1, 0, 1)
ROWS = (Request([*PROMPT], 100, SequenceKey(0, 0)),)
NEGATIVES = {"the prompt's last token": None, "a longer prompt": [0, 1, 1, 0], "one": [1]}


def law(negative: list[int] | None) -> Model:
    """Both readings at once, from the text alone."""

    def distribution(text: Text) -> np.ndarray:
        new = text[len(PROMPT) :]
        mixed = P(text) ** SCALE * P((*(negative or PROMPT[-1:]), *new)) ** (1 - SCALE)
        return mixed / mixed.sum()

    return distribution


DRAFTERS: dict[str, Callable[[], Any]] = {
    "a model": lambda: LMDrafter(Table(Q, V), V),
    "a guided model": lambda: LMDrafter(GuidedModel(Table(Q, V), SCALE, [1]), V),
    "look-up": LookupDrafter,
}


def case(
    negative: list[int] | None, kind: Any = GuidedModel, rule: Any = block, **more: Any
) -> Case:
    drafter = more.pop("drafter", DRAFTERS["a model"])
    return Case(lambda: kind(Table(P, V), SCALE, negative), drafter, rule, GAMMA, rows=ROWS, **more)


@pytest.mark.parametrize("negative", NEGATIVES.values(), ids=NEGATIVES)
def test_the_mixture_is_the_distribution(negative, monkeypatch) -> None:
    assert bias(case(negative), law(negative), monkeypatch) < 1e-12


@pytest.mark.parametrize("rule", EXACT_RULES)
@pytest.mark.parametrize("kind", DRAFTERS)
def test_whatever_drafts(kind, rule, monkeypatch) -> None:
    found = case([1], rule=EXACT_RULES[rule], drafter=DRAFTERS[kind])
    assert bias(found, law([1]), monkeypatch) < 1e-12


class StaleReading(GuidedModel):
    """Rejected tokens stay in the second reading."""

    def _count_second_tokens(self, row: Any) -> int:
        return len(self.inner._texts[2 * self.seqs.index(row) + 1])  # pyright: ignore


class LateReading(GuidedModel):
    """The second reading lacks the last draft token."""

    def _make_second_block(self, row: Any, block: list[int]) -> list[int]:
        read = super()._make_second_block(row, block)
        return [*read[:-1], read[-2]] if len(read) > 1 else read


@pytest.mark.parametrize("wrong", [StaleReading, LateReading])
def test_a_wrong_second_reading_is_seen(wrong, monkeypatch) -> None:
    negative = [0, 1, 1, 0]
    assert bias(case(negative, wrong), law(negative), monkeypatch) > VISIBLE


def test_no_guidance_is_another_distribution(monkeypatch) -> None:
    assert bias(case([1]), P, monkeypatch) > VISIBLE
