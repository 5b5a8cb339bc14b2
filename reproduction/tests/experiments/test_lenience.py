"""alpha with lenience on table models, against the formulas, and the table beside the paper's."""

from __future__ import annotations

import tracemalloc

import numpy as np
import pytest
import torch

from foretoken.measurement.agreement import ScoredPosition
from reproduction.experiments import lenience
from reproduction.experiments.experiment import ResultRow
from reproduction.recipe import RecipeDraft
from reproduction.tests.laboratory import P, Q, TablePairs, estimated, recipe

FACTORS = [1.0, 0.5, 0.3, 0.1]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_alphas_are_those_of_the_formulas(temperature):
    pairs = TablePairs(recipe())
    result = lenience.measure(pairs, {"draft": "small", "temperature": temperature})
    assert result["lenience"] == FACTORS
    prefixes = [
        (*request.prompt, *text[:i])
        for request, text in pairs.texts(temperature)
        for i in range(len(text))
    ]
    assert result["tokens"] == len(prefixes)
    for factor, alpha in zip(FACTORS, result["alphas"], strict=True):
        if temperature:
            shares = [np.minimum(P(t) / factor, Q(t)).sum() for t in prefixes]
        else:
            shares = [P(t)[np.argmax(Q(t))] >= factor * P(t).max() for t in prefixes]
        assert alpha["value"] == pytest.approx(float(np.mean(shares)))


def test_draft_tokens_that_are_certain_and_none():
    p, q = torch.tensor([0.5, 0.3, 0.2]), torch.tensor([0.1, 0.9, 0.0])
    certain = ScoredPosition(p, None, 1)
    assert lenience.kept(certain, [1.0, 0.5, 0.1], greedy=False) == pytest.approx([0.3, 0.6, 1.0])
    assert lenience.kept(certain, [1.0, 0.5], greedy=True) == [0.0, 1.0]
    drawn = lenience.kept(ScoredPosition(p, q, 1), [1.0, 0.5], greedy=True)
    assert drawn == pytest.approx([0.1, 1.0])
    for greedy in (True, False):
        assert lenience.kept(ScoredPosition(p, None, None), [1.0, 0.5], greedy=greedy) == [0.0, 0.0]


def test_a_large_vocabulary_takes_little_memory():
    """A matrix of V x V would take 8 GB for a token."""
    V = 2**15
    place = ScoredPosition(torch.full((V,), 1 / V), None, 7)
    tracemalloc.start()
    alphas = lenience.kept(place, FACTORS, greedy=False)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert alphas == pytest.approx([1 / V / factor for factor in FACTORS]) and peak < 100 * V


def test_only_the_papers_temperatures():
    cases = lenience.cases(recipe(temperatures=[0.0, 0.6, 1.0]))
    assert {case["temperature"] for case in cases} == {0.0, 1.0} and len(cases) == 6


def test_table_5_stands_beside_the_papers():
    alphas = [estimated(value) for value in (0.6, 0.7, 0.75, 0.85)]
    result = {"lenience": FACTORS, "alphas": alphas, "tokens": 100}
    rows = [ResultRow({"draft": "small", "temperature": T}, 1.0, result) for T in (0.0, 1.0)]
    section = lenience.section(recipe(), {"lenience": rows})
    assert section is not None
    sampled, greedy = section.tables
    assert sampled.rows[1] == ("– T5-small, paper", "0.62", "0.71", "0.76", "0.84")
    assert sampled.rows[3] == (
        "– distance from the distribution",
        "0.000",
        "0.100",
        "0.150",
        "0.250",
    )
    assert greedy.rows[1] == ("– T5-small, paper", "0.75", "0.75", "0.80", "0.87")
    assert len(greedy.rows) == 3
    assert "2.33, 2.94, 3.45, 4.79" in section.paragraphs[-1]
    _, at_1, at_0, _ = section.paragraphs
    assert "At T=1 alpha rises by 0.25 here from l = 1 to 0.1, to 0.85" in at_1
    assert "by 0.22 on the lines that have a counterpart, less than here in 1 of 1" in at_1
    assert "by 0.12 on the lines that have a counterpart, less than here in 1 of 1" in at_0
    assert lenience.section(recipe(), {}) is None


def test_a_rise_may_be_smaller_than_the_papers_or_have_no_counterpart():
    result = {"lenience": FACTORS, "alphas": [estimated(0.6)] * 3 + [estimated(0.7)], "tokens": 9}
    row = ResultRow({"draft": "small", "temperature": 1.0}, 1.0, result)
    section = lenience.section(recipe(), {"lenience": [row]})
    assert section is not None and "less than here in 0 of 1" in section.paragraphs[1]
    other = recipe(drafts=[RecipeDraft(label="small")])
    section = lenience.section(other, {"lenience": [row]})
    assert section is not None and "no counterpart" in section.paragraphs[1]
