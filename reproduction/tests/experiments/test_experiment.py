"""What the experiments share: figures as they are shown, and cases in words."""

from __future__ import annotations

from foretoken.measurement.estimate import Estimate
from reproduction.experiments.experiment import (
    BLANK,
    ResultRow,
    done,
    estimate,
    named,
    plus_minus,
    rounded,
    spanned,
    tabulated,
)


def test_figures():
    assert plus_minus(Estimate(0.5, 0.45, 0.55)) == "0.500 ± 0.050"
    assert plus_minus(estimate({"value": 1.5, "low": 1.4, "high": 1.6}), 2) == "1.50 ± 0.10"
    assert rounded(0.756) == "0.76" and rounded(None) == "–"
    assert spanned([0.5, 0.25, 1]) == "0.25 to 1.00" and spanned([0.501, 0.499]) == "0.50"
    assert spanned([-0.1, 0.1], 1, sign=True) == "-0.1 to +0.1"


def test_columns_without_figures_are_left_out():
    columns = {
        "draft": str,
        "here": lambda row: "1" if row == "a" else BLANK,
        "paper": lambda _: BLANK,
    }
    table = tabulated("", ["a", "b"], columns, lambda row: row == "b")
    assert table.head == ("draft", "here") and table.emphasized == (1,)
    assert table.rows == [("a", "1"), ("b", BLANK)]


def test_a_case_in_words():
    case = {"what": "cascade", "draft": "small", "temperature": 1.0, "inner": None}
    assert named(case) == "what cascade, draft small, T 1"


def test_what_failed_is_left_out():
    good, bad = (
        ResultRow({"draft": "a"}, 1.0, {"x": 1}),
        ResultRow({"draft": "b"}, 1.0, failed="why"),
    )
    assert done({"acceptance": [good, bad]}, "acceptance") == [good]
    assert done({}, "acceptance") == []
