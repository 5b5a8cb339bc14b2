"""What is said of drafts that the paper leaves open, from rows as if measured."""

from __future__ import annotations

from reproduction.experiments.experiment import BLANK, ResultRow
from reproduction.experiments.observations import drafts_section
from reproduction.recipe import RecipeDraft
from reproduction.tests.laboratory import agreed, recipe, timed


def test_drafts_of_other_kinds_stand_beside_the_fastest_of_the_papers():
    own = recipe(drafts=[RecipeDraft(label="small"), RecipeDraft(label="lookup", draft="lookup")])
    rows = [
        *(timed("small", 0.0, gamma, speed) for gamma, speed in ((2, 1.3), (3, 1.5))),
        *(timed("lookup", 0.0, gamma, speed) for gamma, speed in ((2, 2.0), (3, 1.9))),
        timed("small", 1.0, 2, 1.4),
        timed("lookup", 1.0, 2, 0.9),
    ]
    results = {"walltime": rows, "acceptance": [agreed("lookup", 0.0, 0.4)]}
    section = drafts_section(own, results)
    assert section is not None
    (table,), (paragraph,) = section.tables, section.paragraphs
    first = ("lookup", "0", "0.400 ± 0.010", "0.100", "2", "2.00 ± 0.01", "small 1.50 ± 0.01")
    assert table.rows[0] == first and table.rows[1][-1] == "small 1.40 ± 0.01"
    assert "0.90 to 2.00 times" in paragraph
    assert "faster in 1 of 2 cases, slower in 1, within noise in 0" in paragraph
    assert "beyond both intervals in 1 of 2 cases" in paragraph
    alone = recipe(drafts=[RecipeDraft(label="lookup", draft="lookup")])
    section = drafts_section(alone, {"walltime": rows[2:3]})
    assert section is not None and section.tables[0].head[-1] == "times plain decoding"
    assert "They beat" not in section.paragraphs[0]


def test_distilled_drafts_stand_beside_what_they_were():
    own = recipe(
        drafts=[RecipeDraft(label="raw"), RecipeDraft(label="taught", distilled_from="raw")]
    )
    alphas = [("raw", 0.6, 0.5), ("taught", 0.7, 0.49)]
    results = {
        "acceptance": [agreed(name, T, by[int(T)]) for name, *by in alphas for T in (0.0, 1.0)],
        "walltime": [timed("raw", 0.0, 2, 1.2), timed("taught", 0.0, 2, 1.5)],
    }
    section = drafts_section(own, results)
    assert section is not None
    (table,), (paragraph,) = section.tables, section.paragraphs
    assert table.rows == [
        ("taught", "0", "0.600 ± 0.010", "0.700 ± 0.010", "1.20 ± 0.01", "1.50 ± 0.01"),
        ("taught", "1", "0.500 ± 0.010", "0.490 ± 0.010", BLANK, BLANK),
    ]
    assert "changes alpha by -0.010 to +0.100: in 1 of 2 cases it is higher" in paragraph
    assert "in 0 lower" in paragraph and "1.25 times what it was" in paragraph
    section = drafts_section(own, {"acceptance": results["acceptance"]})
    assert section is not None and "what it was" not in section.paragraphs[0]


def test_nothing_is_said_of_the_papers_own_kinds():
    failed = ResultRow({"draft": "small"}, 1.0, failed="no")
    assert drafts_section(recipe(), {}) is None
    assert drafts_section(recipe(), {"walltime": [failed, timed("small", 1.0, 2, 1.5)]}) is None
