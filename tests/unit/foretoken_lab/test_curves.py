"""Figures 2 to 4: the lines go through what the paper prints, and are where they must be."""

import pytest

from foretoken_lab.curves import ALPHAS, COSTS, GAMMAS, figure_2, figure_3, figure_4

POINTS = {alpha: i for i, alpha in enumerate(ALPHAS)}


def test_figure_2():
    lines = figure_2().lines
    assert list(lines) == [f"gamma {gamma}" for gamma in GAMMAS]
    for gamma, line in zip(GAMMAS, lines.values(), strict=True):
        assert line[0] == 1 and line == sorted(line) and line[-1] < gamma + 1
        sums = [sum(alpha**k for k in range(gamma + 1)) for alpha in ALPHAS]
        assert line == pytest.approx(sums)


def test_figure_3():
    lines = figure_3().lines
    assert [lines[f"c {c}"][POINTS[0.8]] for c in COSTS] == [14, 11, 8, 6]
    for line in lines.values():
        assert line == sorted(line) and line[0] == 0
    assert all(a >= b for a, b in zip(lines["c 0.01"], lines["c 0.1"], strict=True))


def test_figure_4():
    """Table 1's rows are points of it."""
    speed, operations = figure_4()
    assert round(speed.lines["gamma 5"][POINTS[0.8]], 2) == 3.69
    assert round(operations.lines["gamma 5"][POINTS[0.8]], 2) == 1.63
    for gamma in GAMMAS:
        assert speed.lines[f"gamma {gamma}"][0] == 1
        wasted = operations.lines[f"gamma {gamma}"]
        assert wasted[0] == gamma + 1 and wasted == sorted(wasted, reverse=True)
