"""One text's trace: the fate of its draft tokens, and when each model ran."""

from __future__ import annotations

import json
import re
from html import unescape

import pytest

from foretoken.drafters.lm import LMDrafter
from foretoken.generation_config import Ends
from foretoken.lab.view import (
    ACCEPTED,
    CORRECTED,
    REJECTED,
    STYLE,
    chrome,
    html,
    html_legend,
    legend,
    paragraph,
    svg,
    timeline,
    trace,
)
from foretoken.models.stock.model import CausalModel, Seq2SeqModel
from foretoken.records import StepRecord
from foretoken.speculator import Speculator
from tiny import byte_level, llama, t5


def record(draft_tokens: list[int], accepted: int, kept: list[int]) -> StepRecord:
    return StepRecord(
        len(draft_tokens), tuple(draft_tokens), accepted, tuple(kept), (), 0, 0.0, 0.0, 0.0, rows=1
    )


def spans(line) -> list[tuple[str, str]]:
    """Text and colour of all that follows the number of a line."""
    return [(line.plain[span.start : span.end], span.style) for span in line.spans]


def test_a_rejection_an_acceptance_and_an_end():
    steps = [record([5, 6, 7], 1, [5, 9]), record([1, 2], 2, [1, 2, 3]), record([4, 8], 1, [4])]
    first, second, third = trace([0], steps, None)
    assert spans(first) == [("5 ", ACCEPTED), ("6 ", REJECTED), ("9 ", CORRECTED)]
    assert spans(second) == [("1 ", ACCEPTED), ("2 ", ACCEPTED), ("3 ", CORRECTED)]
    assert spans(third) == [("4 ", ACCEPTED)]  # the text ended within the draft tokens
    assert first.plain.startswith("   1 ") and third.plain.startswith("   3 ")


def test_the_prompt_decides_how_the_first_token_is_spelled():
    ids = byte_level()("It was\nthe sea", add_special_tokens=False).input_ids
    lines = trace(ids[:2], [record([], 0, [token]) for token in ids[2:]], byte_level())
    assert "".join(spans(line)[0][0] for line in lines).replace("⏎", "\n") == byte_level().decode(
        ids
    ).removeprefix(byte_level().decode(ids[:2]))
    assert any("⏎" in line.plain for line in lines)
    assert not any("\n" in line.plain for line in lines)


def test_the_tokens_in_green_and_blue_are_the_completions():
    target, draft = CausalModel(llama(64)), CausalModel(llama(64, seed=1))
    spec = Speculator(target, LMDrafter(draft, 64))
    (completion,) = spec.generate([1, 2], temperature=1.0, gamma=3, max_new_tokens=40)
    lines = trace([1, 2], completion.steps, None)
    assert len(lines) == completion.stats.target_calls
    fates = [fate for line in lines for fate in spans(line)]
    tokens = [int(text) for text, style in fates if style != REJECTED]
    assert tokens == completion.tokens
    assert sum(style == ACCEPTED for _, style in fates) == completion.stats.accepted
    rejected = sum(step.accepted < step.drafted for step in completion.steps)
    assert sum(style == REJECTED for _, style in fates) == rejected > 0


def test_parts_of_a_character_are_not_lost():
    whale = byte_level()("\U0001f40b", add_special_tokens=False).input_ids
    lines = trace([0], [record([], 0, [token]) for token in whale], byte_level())
    assert [spans(line)[0][0] for line in lines] == ["·"] * (len(whale) - 1) + ["\U0001f40b"]
    shown = paragraph([0], [record([], 0, whale[:-1])], byte_level())
    assert shown.plain == "\ufffd"  # as the text that ends so


def test_the_legend_names_every_colour():
    assert {span.style for span in legend().spans} == {ACCEPTED, REJECTED, CORRECTED}


def test_marks_where_there_is_no_colour():
    steps = [record([5, 6, 7], 1, [5, 9]), record([1], 1, [1, 3])]
    lines = trace([0], steps, None, marks=True)
    assert [line.plain for line in lines] == ["   1 5 ~6~ [9] ", "   2 1 [3] "]
    assert (
        legend(marks=True).plain == "accepted draft token  ~rejected draft token~  [target's own]"
    )
    ids = byte_level()(" sea  ", add_special_tokens=False).input_ids
    (line,) = trace([0], [record([], 0, ids)], byte_level(), marks=True)
    assert (
        "".join(c for c in line.plain[5:] if c not in "[]") == " sea  " and "[]" not in line.plain
    )


def test_the_paragraph_is_the_text_in_the_colours_of_its_tokens():
    steps = [record([5, 6], 1, [5, 7]), record([8], 1, [8, 9])]
    shown = paragraph([1, 2], steps, None)
    assert spans(shown) == [
        ("5 ", ACCEPTED),
        ("7 ", CORRECTED),
        ("8 ", ACCEPTED),
        ("9 ", CORRECTED),
    ]


def test_the_paragraph_has_characters_of_several_tokens():
    ids = byte_level()("It was 海!", add_special_tokens=False).input_ids
    shown = paragraph(ids[:2], [record([], 0, [token]) for token in ids[2:]], byte_level())
    assert shown.plain == byte_level().decode(ids).removeprefix(byte_level().decode(ids[:2]))


def test_the_lines_as_html():
    ids = byte_level()("a <b> & c", add_special_tokens=False).input_ids
    steps = [record(ids[1:3], 1, [ids[1], ids[2]]), record([], 0, ids[3:])]
    page = html(ids[:1], steps, byte_level())
    assert page.startswith('<ol class="trace">\n<li>') and page.count("<li>") == 2
    rest = re.sub(r' ?<del class="rejected">.*?</del>', "", page)
    text = unescape(re.sub(r"<[^>]*>|\n", "", rest))
    assert text == byte_level().decode(ids).removeprefix(byte_level().decode(ids[:1]))
    assert "<b>" not in page and "&amp;" in page
    assert html([0], [record([5, 6], 1, [5, 9])], None).splitlines()[1] == (
        '<li><span class="accepted">5</span> <del class="rejected">6</del> '
        '<strong class="corrected">9</strong> </li>'
    )


def test_every_class_of_the_html_has_a_colour_in_light_and_in_dark():
    for name in re.findall(r'class="(\w+)"', html_legend().removeprefix('<p class="fates">')):
        assert f"--{name}: light-dark(" in STYLE and f".{name} {{ color: var(--{name})" in STYLE
    assert html_legend().count('class="') == 4


GAMMAS = (7, 3, 0)


@pytest.fixture(scope="module")
def done():
    """An encoder-decoder, as in the paper."""
    target, draft = Seq2SeqModel(t5(64)), Seq2SeqModel(t5(64, seed=1))
    spec = Speculator(target, LMDrafter(draft, 64), ends=Ends(decoder_start=0))
    return {
        gamma: spec.generate([[5, 6, 7]], gamma=gamma, max_new_tokens=12)[0] for gamma in GAMMAS
    }


@pytest.mark.parametrize("gamma", GAMMAS)
def test_a_block_for_every_call(done, gamma):
    one, calls = done[gamma], timeline(done[gamma])
    assert one.stats.target_calls == len(one.steps)
    expected = [("target encoder", 0), ("target prefill", 0)]
    for number, step in enumerate(one.steps, 1):
        expected += [("draft", number)] * step.draft_calls + [("target", number)]
        if gamma and number == 1:
            expected += [("draft encoder", 0), ("draft prefill", 0)]
    assert [(call.part, call.step) for call in calls] == expected
    assert sum(call.part == "draft" for call in calls) == one.stats.draft_calls


@pytest.mark.parametrize("gamma", GAMMAS)
def test_blocks_follow_one_another_and_fit_into_the_whole(done, gamma):
    calls = timeline(done[gamma])
    for one, other in zip(calls, calls[1:], strict=False):
        assert one.at + one.seconds <= other.at + 1e-9
    assert calls[-1].at + calls[-1].seconds <= done[gamma].stats.seconds


def test_both_encoders_run_in_their_prefill(done):
    stats = done[3].stats
    prefills = {call.part: call.seconds for call in timeline(done[3]) if not call.step}
    assert prefills["target encoder"] == stats.encoder_seconds
    assert prefills["draft encoder"] == stats.draft_encoder_seconds
    draft = prefills["draft encoder"] + prefills["draft prefill"]
    assert draft == pytest.approx(stats.draft_prefill_seconds)
    assert all(seconds > 0 for seconds in prefills.values())
    target = prefills["target encoder"] + prefills["target prefill"]
    assert target == pytest.approx(stats.prefill_seconds)


def test_a_decoder_has_no_encoder():
    spec = Speculator(CausalModel(llama(64)), LMDrafter(CausalModel(llama(64, seed=1)), 64))
    (one,) = spec.generate([[5, 6, 7]], gamma=2, max_new_tokens=6)
    assert [c.part for c in timeline(one) if not c.step] == ["target prefill", "draft prefill"]


def test_the_picture(done, tmp_path):
    rows = {f"gamma {gamma}": one for gamma, one in done.items()}
    picture = svg(rows)
    assert picture.startswith("<?xml") and picture == svg(rows)
    for named in ("gamma 7", "target encoder", "draft encoder"):
        assert named in picture
    assert "draft encoder" not in svg({"plain": done[0]})


def test_the_chrome_trace(done):
    document = json.loads(json.dumps(chrome(done[3])))
    events = [event for event in document["traceEvents"] if event["ph"] == "X"]
    calls = timeline(done[3])
    assert [(e["name"], e["ts"]) for e in events] == [(c.part, c.at * 1e6) for c in calls]
    threads = {e["tid"]: e["args"]["name"] for e in document["traceEvents"] if e["ph"] == "M"}
    assert all(e["name"].startswith(threads[e["tid"]]) for e in events)
    arguments = [event["args"] for event in events if event["name"] == "target"]
    assert sum(args["tokens"] for args in arguments) == len(done[3].tokens)
    assert [args["accepted"] for args in arguments] == [step.accepted for step in done[3].steps]
