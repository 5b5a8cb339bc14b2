"""Figure 5: the blocks are the calls that the steps record, one after the other."""

from __future__ import annotations

import json

import pytest

from foretoken.drafters.lm import LMDrafter
from foretoken.generation_config import Ends
from foretoken.lab.view import chrome, draw, svg, timeline
from foretoken.models.stock.model import CausalModel, Seq2SeqModel
from foretoken.speculator import Speculator
from tiny import llama, t5

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
    models = ("target", "draft") if gamma else ("target",)
    expected = [(f"{model} {part}", 0) for model in models for part in ("encoder", "prefill")]
    for number, step in enumerate(one.steps, 1):
        expected += [("draft", number)] * step.draft_calls + [("target", number)]
    assert [(call.part, call.step) for call in calls] == expected
    assert sum(call.part == "draft" for call in calls) == one.stats.draft_calls


@pytest.mark.parametrize("gamma", GAMMAS)
def test_blocks_follow_one_another_and_fit_into_the_whole(done, gamma):
    calls = timeline(done[gamma])
    for one, other in zip(calls, calls[1:], strict=False):
        assert one.at + one.seconds <= other.at + 1e-9
    assert calls[-1].at + calls[-1].seconds <= done[gamma].stats.seconds


def test_both_encoders_run_in_the_prefill(done):
    stats = done[3].stats
    prefills = {call.part: call.seconds for call in timeline(done[3]) if not call.step}
    assert prefills["target encoder"] == stats.encoder_seconds
    assert prefills["draft encoder"] == stats.draft_encoder_seconds
    draft = prefills["draft encoder"] + prefills["draft prefill"]
    assert draft == pytest.approx(stats.draft_prefill_seconds)
    assert all(seconds > 0 for seconds in prefills.values())
    assert sum(prefills.values()) == pytest.approx(stats.prefill_seconds)


def test_a_decoder_has_no_encoder():
    spec = Speculator(CausalModel(llama(64)), LMDrafter(CausalModel(llama(64, seed=1)), 64))
    (one,) = spec.generate([[5, 6, 7]], gamma=2, max_new_tokens=6)
    assert [c.part for c in timeline(one) if not c.step] == ["target prefill", "draft prefill"]


def test_the_picture(done, tmp_path):
    rows = {f"gamma {gamma}": one for gamma, one in done.items()}
    draw(rows, tmp_path / "timeline.svg")
    picture = (tmp_path / "timeline.svg").read_text()
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
