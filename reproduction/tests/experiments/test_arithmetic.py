"""The paper's arithmetic: what comes out as printed, and what does not."""

from __future__ import annotations

import pytest

from reproduction.experiments import arithmetic, paper
from reproduction.experiments.arithmetic import ALPHAS, COSTS, GAMMAS, figures

POINTS = {alpha: i for i, alpha in enumerate(ALPHAS)}


def test_table_1_comes_out_as_printed():
    table = arithmetic.section().tables[0]
    assert [row[-1] for row in table.rows] == ["yes"] * len(paper.TABLE_1)


def test_table_4_but_for_three_lines():
    section = arithmetic.section()
    answers = [row[-1] for row in section.tables[1].rows]
    assert answers.count("yes") == 9 and answers.count("but for rounding") == 3
    assert (
        "12 expected factors follow as printed, 3 only from alpha and c before they were rounded"
        in section.paragraphs[1]
    )
    assert "1.25x" in section.paragraphs[2] and "58%" in section.paragraphs[2]


def test_a_wrong_figure_would_be_seen(monkeypatch):
    wrong = paper.Balance(0.6, 2, 1.53, 1.99)
    monkeypatch.setattr(paper, "TABLE_1", (wrong, *paper.TABLE_1[1:]))
    assert arithmetic.section().tables[0].rows[0][-1] == "no"
    line = paper.TABLE_2[0]._replace(expected=3.5)
    monkeypatch.setattr(paper, "TABLE_2", (line, *paper.TABLE_2[1:]))
    section = arithmetic.section()
    assert section.tables[1].rows[0][-1] == "no" and "1 not at all" in section.paragraphs[1]


def test_figures_2_to_4():
    names = [plot.name for plot in arithmetic.section().plots]
    assert names == ["figure-2", "figure-3", "figure-4-speed", "figure-4-operations"]


def test_figure_2():
    lines = figures()[0].lines
    assert list(lines) == [f"gamma {gamma}" for gamma in GAMMAS]
    for gamma, line in zip(GAMMAS, lines.values(), strict=True):
        assert line[0] == 1 and line == sorted(line) and line[-1] < gamma + 1
        sums = [sum(alpha**k for k in range(gamma + 1)) for alpha in ALPHAS]
        assert line == pytest.approx(sums)


def test_figure_3():
    lines = figures()[1].lines
    assert [lines[f"c {c}"][POINTS[0.8]] for c in COSTS] == [14, 11, 8, 6]
    for line in lines.values():
        assert line == sorted(line) and line[0] == 0
    assert all(a >= b for a, b in zip(lines["c 0.01"], lines["c 0.1"], strict=True))


def test_figure_4():
    """Table 1's rows are points of it."""
    speed, operations = figures()[2:]
    assert round(speed.lines["gamma 5"][POINTS[0.8]], 2) == 3.69
    assert round(operations.lines["gamma 5"][POINTS[0.8]], 2) == 1.63
    for gamma in GAMMAS:
        assert speed.lines[f"gamma {gamma}"][0] == 1
        wasted = operations.lines[f"gamma {gamma}"]
        assert wasted[0] == gamma + 1 and wasted == sorted(wasted, reverse=True)
