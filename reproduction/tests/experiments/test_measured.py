"""Experiments on table models: what is measured by hand, and what is said of it."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
from matplotlib.figure import Figure

from foretoken.errors import InputError
from foretoken.theory import walltime_factor
from reproduction.experiments import (
    acceptance,
    beyond,
    paper,
    quality,
    trace,
    walltime,
)
from reproduction.experiments.experiment import BLANK, ResultRow, Section, estimate
from reproduction.recipe import Prompts, RecipePrompt
from reproduction.results import EXPERIMENTS
from reproduction.tests.laboratory import P, Q, TablePairs, agreed, estimated, found, recipe, timed
from reproduction.theory import oracle_factor


@pytest.fixture(scope="module")
def pairs() -> TablePairs:
    return TablePairs(recipe())


def test_alpha_is_the_mean_overlap_on_the_targets_text(pairs):
    case = {"draft": "small", "temperature": 1.0}
    assert case in acceptance.cases(pairs.recipe) and len(acceptance.cases(pairs.recipe)) == 6
    result = acceptance.measure(pairs, case)
    prefixes = [
        (*request.prompt, *text[:i]) for request, text in pairs.texts(1.0) for i in range(len(text))
    ]
    betas = [np.minimum(P(t), Q(t)).sum() for t in prefixes]
    assert result["alpha"]["value"] == pytest.approx(np.mean(betas))
    assert result["tokens"] == len(betas) and result["texts"] == len(pairs.texts(1.0))
    assert result["alpha"]["low"] < result["alpha"]["value"] < result["alpha"]["high"]


def test_one_text_has_no_interval(pairs):
    (text, *_), spec = pairs.texts(1.0), pairs.spec("small")
    with pytest.raises(InputError, match="1 text"):
        acceptance.alpha(spec.target, spec.drafter, [text], 1.0)


def test_table_3_stands_beside_the_papers():
    section = acceptance.section(recipe(), found())
    assert section is not None
    line = section.tables[0].rows[0]
    assert line == ("small", "10", "0", "0.700 ± 0.010", "0.75", "-0.05", "100")
    said = " ".join(section.paragraphs)
    assert "-0.05 (small, T=0) and +0.06 (bigram, T=1)" in said
    assert "100 tokens or more" in said and "Fewer tokens" in said
    assert "6 of 6 pairs" in said  # of three drafts at two temperatures
    swapped = {"acceptance": [agreed("small", 0, 0.9), agreed("large", 0, 0.6)]}
    section = acceptance.section(recipe(), swapped)
    assert section is not None and "0 of 1 pairs" in section.paragraphs[2]
    alone = acceptance.section(recipe(paper=None), found())
    assert alone is not None and "no counterpart" in alone.paragraphs[1]


def test_alpha_is_drawn_by_draft_and_temperature():
    section = acceptance.section(recipe(), found())
    assert section is not None
    figure, (plot,) = Figure(), section.plots
    plot.draw(figure)
    (axes,) = figure.axes
    assert [label.get_text() for label in axes.get_xticklabels()] == ["small", "large", "bigram"]
    assert [bar.get_height() for bar in axes.patches][:3] == [0.7, 0.8, 0.2]
    legend = axes.get_legend()
    assert legend is not None
    names = {text.get_text() for text in legend.get_texts()}
    assert names == {f"{who}, T={T}" for who in ("here", "paper") for T in (0, 1)}


def test_speeds_are_measured_and_expected(pairs):
    case = {"draft": "small", "temperature": 1.0, "gamma": 2}
    assert case in walltime.cases(pairs.recipe)
    result = walltime.measure(pairs, case)
    json.dumps(result, allow_nan=False)
    ratio = result["plain_seconds_per_token"] / result["seconds_per_token"]
    assert result["speedup"]["value"] == pytest.approx(ratio)
    assert 0 < result["alpha"] < 1 and result["c"] > 0 and result["v"] > 0


def test_tables_2_and_4_show_the_fastest_gamma():
    section = walltime.section(recipe(), found())
    assert section is not None
    (table,) = section.tables
    assert [row[:3] for row in table.rows[:2]] == [("small", "0", "2"), ("small", "1", "2")]
    expected = walltime_factor(0.7, 2, 0.1)  # table 3's alpha, the measured c
    with_papers = walltime_factor(0.7, 2, 0.02)
    assert table.rows[0][3:] == (
        "0.700",
        "0.100",
        "1.30",
        f"{expected:.2f}",
        "1.90",
        "1.90 ± 0.01",
        f"{with_papers:.2f}",
        "0.75",
        "0.02",
        "3.20",
        "3.40",
    )
    assert table.emphasized == (0, 1)  # the fastest at each temperature
    said = " ".join(section.paragraphs)
    assert "The fastest of 2 gammas" in said and "range 5 of 6 of ours lie" in said
    assert "Measured are 1.30 to 1.90" in said and "lower in 4 of 4" in said
    assert "up to 1.30 times as long (v, gamma 2)" in said and "c of small is 0.100 here" in said
    assert "of the processors" not in said


def test_a_busy_machine_is_told():
    row = timed("small", 0, 2, 1.5)
    row.result["others"] = 0.3
    section = walltime.section(recipe(), {"walltime": [row]})
    assert section is not None and "30% of the processors" in section.paragraphs[-1]


def test_the_bigram_claim():
    assert walltime.bigram_cases(recipe()) == []  # tables 2 and 4 have gamma 3
    cases = walltime.bigram_cases(recipe(gammas=[2, 5]))
    assert [case["gamma"] for case in cases] == [3, 3] and cases[0]["draft"] == "bigram"
    assert walltime.bigram_cases(recipe(gammas=[2], drafts=recipe().drafts[:2])) == []
    own = found()["bigram"]
    section = walltime.bigram_section(recipe(), found() | {"bigram": [], "walltime": own})
    assert section is not None and len(section.tables[0].rows) == 1
    section = walltime.bigram_section(recipe(), found() | {"walltime": []})
    assert section is not None and len(section.tables[0].rows) == 1
    assert "1.248x" in section.paragraphs[0]
    free = f"{walltime_factor(0.25, 3, 0):.2f}"
    assert section.tables[0].rows[0][3] == free
    expected = f"expects {free}x; measured is 1.10 ± 0.01, so the table gains"
    assert expected in section.paragraphs[1]


def test_figure_5_counts_the_calls(pairs):
    (case,) = trace.timeline_cases(pairs.recipe)
    result = trace.timeline_measure(pairs, case)
    assert [row["gamma"] for row in result["rows"]] == [7, 3, 0]
    plain = result["rows"][-1]
    assert plain["target_calls"] == plain["tokens"] == 12 and plain["draft_calls"] == 0
    section = trace.timeline_section(pairs.recipe, {"timeline": [ResultRow(case, 1.0, result)]})
    assert section is not None
    figure = Figure()
    section.plots[0].draw(figure)
    labels = [label.get_text() for label in figure.axes[0].get_yticklabels()]
    assert labels == ["gamma 7", "gamma 3", "plain"]
    assert section.tables[0].rows[2][:4] == ("plain", "12", "12", "0")
    assert "calls the target 12 times for 12 tokens" in section.paragraphs[1]
    assert "its encoder" not in section.tables[0].head and "no encoder" in section.paragraphs[0]


def timeline(calls: dict[int, Any], *, encoder_decoder: bool) -> Section:
    """Figure 5 of calls as if timed: part, beginning and length in ms."""
    rows = [
        {
            "gamma": gamma,
            "tokens": 8,
            "target_calls": sum(part == "target" for part, *_ in own),
            "draft_calls": sum(part == "draft" for part, *_ in own),
            "calls": [[part, at / 1e3, ms / 1e3, 1] for part, at, ms in own],
        }
        for gamma, own in calls.items()
    ]
    row = ResultRow({"draft": "small"}, 1.0, {"rows": rows, "encoder_decoder": encoder_decoder})
    section = trace.timeline_section(recipe(), {"timeline": [row]})
    assert section is not None
    return section


def test_figure_5_tells_encoders_from_decoders():
    encoder = [("target encoder", 0, 4), ("target prefill", 4, 1)]
    calls = {
        7: [*encoder, ("draft encoder", 5, 1), *(("draft", 6 + i, 1) for i in range(7))],
        3: [*encoder, *(("draft", 5 + i, 1) for i in range(3)), ("target", 8, 5)],
        0: [*encoder, *(("target", 4 + 4 * i, 4) for i in range(8))],
    }
    calls[7].append(("target", 13, 5))
    section = timeline(calls, encoder_decoder=True)
    first = ("gamma 7", "8", "1", "7", "18.0", "10.0", "4.0", "8.0", "1.0")
    assert section.tables[0].rows[0] == first and section.tables[0].rows[2][-2:] == (BLANK, BLANK)
    encoders, counts, times = section.paragraphs
    assert "4.0 ms of the target's and 1.0 ms of the draft's, of 18.0 ms with gamma 7" in encoders
    assert "1 with gamma 7, 1 with gamma 3" in counts and "7.0 and 3.0 times" in counts
    assert "takes 0.20 of the target's" in times and "0.50 and 0.36 of the time" in times


def test_figure_5_without_draft_calls_has_no_times():
    calls = {gamma: [("target", 0.0, 4.0)] for gamma in (7, 3, 0)}
    section = timeline(calls, encoder_decoder=True)
    encoders, counts = section.paragraphs
    assert "not timed apart" in encoders and "called 0.0 and 0.0 times" in counts


def test_figure_1_has_a_line_a_run(pairs):
    (case,) = trace.cases(pairs.recipe)
    result = trace.measure(pairs, case)
    assert len(result["lines"]) == result["calls"] == result["html"].count("<li>")
    section = trace.section(pairs.recipe, {"trace": [ResultRow(case, 1.0, result)]})
    assert section is not None and section.traces[0].lines == result["lines"]
    rate = paper.FIGURE_1_TOKENS / paper.FIGURE_1_RUNS
    assert f"{rate:.2f} a run" in section.paragraphs[0]


def test_the_loss_is_the_same_with_and_without(tmp_path, pairs):
    (tmp_path / "prompts.txt").write_text("a\nb\n")
    own = recipe(prompts=Prompts(file=str(tmp_path / "prompts.txt")))
    cases = quality.cases(own)
    assert [case["what"] for case in cases] == ["loss", "loss"]  # lines have no references
    result = quality.measure(pairs, cases[0])
    assert estimate(result["plain"]).value > 0 and result["texts"] == 3
    section = quality.section(own, {"quality": [ResultRow(cases[0], 1.0, result)]})
    assert section is not None and len(section.paragraphs) == 1


def test_scores_need_references(tmp_path, pairs):
    path = tmp_path / "pairs.tsv"
    path.write_text("a\tb\nc\td\n")
    own = recipe(prompts=Prompts(file=str(path)), task="translation")
    assert [case["what"] for case in quality.cases(own)] == ["scores", "loss"] * 2
    case = quality.cases(own)[0]
    translating = TablePairs(own)
    translating.tasks = [RecipePrompt([1, 2], "b")]
    with pytest.raises(InputError, match="prompts that are text"):
        quality.measure(translating, case)
    scores = {"plain": {"bleu": 20.0}, "speculative": {"bleu": 20.0}, "same": 1.0, "texts": 2}
    section = quality.section(own, {"quality": [ResultRow(case, 1.0, scores)]})
    assert section is not None
    assert section.tables[0].rows == [("small", "20.00", "20.00", "100.0%")]
    assert "100.0% or more are equal, and all scores are the same" in section.paragraphs[0]
    scores |= {"speculative": {"bleu": 20.3}, "same": 0.98}
    section = quality.section(own, {"quality": [ResultRow(case, 1.0, scores)]})
    assert section is not None and "bleu by 0.30 at most" in section.paragraphs[0]


def test_losses_overlap_or_not():
    def losses(speculative: float) -> str:
        result = {"plain": estimated(3.0), "speculative": estimated(speculative), "texts": 9}
        row = ResultRow({"draft": "small", "what": "loss", "gamma": 3}, 1.0, result)
        section = quality.section(recipe(), {"quality": [row]})
        assert section is not None
        return section.paragraphs[0]

    assert "overlap in 1 of 1 cases" in losses(3.015)
    assert "apart with small, in 1 of 1 cases" in losses(3.1)


def test_cases_beyond_the_paper():
    cases = beyond.cases(recipe())
    kinds = [(case["what"], case["draft"], case.get("inner")) for case in cases]
    assert kinds.count(("rules", "small", None)) == 2  # gammas, where text is sampled
    assert kinds.count(("automatic", "large", None)) == 2
    cascades = [kind[1:] for kind in kinds if kind[0] == "cascade"]
    one = beyond.cases(recipe(beyond_models=1))
    assert one == [case for case in cases if case["draft"] == "small"]
    assert cascades == [("small", None)] * 2 + [("large", None)] * 2  # small has no name to load


def test_rules_race_in_turn(pairs):
    case = {"what": "rules", "draft": "small", "temperature": 1.0, "gamma": 3}
    ways = beyond.measure(pairs, case)["ways"]
    assert list(ways) == ["speculative", "block"]
    assert all(way["seconds_per_token"] > 0 for way in ways.values())
    assert all(1 <= way["tokens_per_call"] <= 4 for way in ways.values())


def test_what_is_said_of_all_three():
    def way(seconds: float, tokens: float) -> dict[str, float]:
        return {"seconds_per_token": seconds, "tokens_per_call": tokens}

    at = {"draft": "small", "temperature": 1.0}
    automatic = {"plain": way(2, 1), "gamma 2": way(1, 2), "gamma 3": way(1.5, 2)}
    automatic["automatic"] = way(0.8, 2.2)
    rows = [
        ResultRow(
            {"what": "rules", **at, "gamma": 2},
            1.0,
            {"ways": {"speculative": way(1, 2), "block": way(0.8, 2.5)}},
        ),
        ResultRow(
            {"what": "automatic", **at},
            1.0,
            {"ways": automatic, "alpha": 0.7, "c": 0.1, "oracle": oracle_factor(0.7, 0.1)},
        ),
        ResultRow(
            {"what": "cascade", **at, "inner": None},
            1.0,
            {"ways": {"alone": way(1, 2), "cascade": way(2, 2)}},
        ),
    ]
    section = beyond.section(recipe(), {"beyond": rows})
    assert section is not None
    (table,) = section.tables
    assert [row[2:] for row in table.rows] == [
        ("block, gamma 2", "2.50", "speculative", "2.00", "1.250", "1.25", BLANK, BLANK, BLANK),
        ("automatic", "2.20", "plain", "1.00", "2.200", "2.50", "0.700", "0.100", "2.70"),
        ("gamma 2", "2.00", "plain", "1.00", "2.000", "2.00", "0.700", "0.100", "2.70"),
        ("automatic", "2.20", "gamma 2", "2.00", "1.100", "1.25", "0.700", "0.100", "2.70"),
        ("cascade < lookup", "2.00", "alone", "2.00", "1.000", "0.50", BLANK, BLANK, BLANK),
    ]
    rules, auto, cascades = section.paragraphs
    assert "1.250 times its tokens a call, which makes it 1.25 times as fast" in rules
    assert "1.25 times the speed of the best fixed gamma" in auto and "2.50 times plain" in auto
    assert "0.50 times its speed alone, and gains in 0 of 1 cases" in cascades


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_nothing_is_said_of_nothing(name):
    failed = ResultRow({"draft": "small"}, 1.0, failed="no")
    assert EXPERIMENTS[name].section(recipe(), {}) is None
    assert EXPERIMENTS[name].section(recipe(), {name: [failed]}) is None
