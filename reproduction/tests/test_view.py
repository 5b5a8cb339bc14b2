"""One text's draft tokens as HTML, and when each model ran."""

from __future__ import annotations

import re
from html import unescape

import pytest

from foretoken.drafters.lm import LMDrafter
from foretoken.generation_config import EndTokens
from foretoken.models.stock.model import CausalModel, Seq2SeqModel
from foretoken.records import StepRecord
from foretoken.speculator import Speculator
from reproduction.view import STYLE, html, html_legend, timeline
from tiny import byte_level, llama, t5


def record(draft_tokens: list[int], accepted: int, kept: list[int]) -> StepRecord:
    return StepRecord(
        len(draft_tokens), tuple(draft_tokens), accepted, tuple(kept), (), 0, 0.0, 0.0, 0.0, rows=1
    )


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
    spec = Speculator(target, LMDrafter(draft, 64), ends=EndTokens(decoder_start=0))
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
