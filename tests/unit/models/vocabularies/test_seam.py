"""Which longer tokens a draft might have said in place of its last one."""

from __future__ import annotations

import pytest
import torch

from foretoken.models.vocabularies.translation import Translation, ways_on
from foretoken.models.vocabularies.words import Dictionary, Words

OURS = Words({0: b" day", 1: b",", 2: b"s", 3: b" days", 4: b" ", 5: b"!!"}, end=6)
THEIRS = Words({0: b" day", 1: b" day,", 2: b" days", 3: b" day!!", 4: b" ", 5: b" day!?"})


def text(*tokens: int) -> Translation:
    translation = Translation(Dictionary(OURS, THEIRS))
    translation.extend(tokens)
    return translation


def logits(*probabilities: float) -> torch.Tensor:
    return torch.tensor([*probabilities, *[1e-9] * (6 - len(probabilities))]).double().log()


def test_they_go_on_from_the_text_without_another_cut_of_it():
    """ " days" is one token of the target's, which the text does not begin."""
    ways = ways_on(text(0), logits(0.3, 0.1, 0.5, 0.2))
    assert [(way.token, way.more, way.guess) for way in ways] == [(3, b"!!", 5), (1, b",", 1)]
    assert [way.share for way in ways] == pytest.approx([0.2 / 0.6, 0.1 / 0.6])


def test_unlikely_ones_are_not_weighed():
    assert not ways_on(text(0), logits(0.5, 0.004, 0.4))


def test_behind_what_has_none_longer_there_are_none():
    assert text(0).last_told == 0 and text(0, 1).last_told is None
    assert not ways_on(text(0, 1), logits(0.5, 0.5))
    assert text(6).last_told is None and text().last_told is None


def test_invalid_numbers_are_no_ways_on():
    assert not ways_on(text(0), torch.full((6,), torch.nan))
