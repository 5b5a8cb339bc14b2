"""The load proofs can fail: streams that are torn, tokens that are missing, texts of other ids."""

from __future__ import annotations

import sys
from dataclasses import replace

import pytest

from foretoken import load
from scripts import benchmark
from tiny import folder, llama

soak = benchmark("soak")
differences, streams = sys.modules["differences"], sys.modules["streams"]


def asked(**other):
    query = streams.Asked(3, [[5, 6], [7, 8, 9]], 4, 0.0, ignore_eos=True)
    return replace(query, **other)


def chunk(i, ids, reason=None):
    return {"choices": [{"index": i, "text": "", "token_ids": ids, "finish_reason": reason}]}


def heard(*chunks, usage=8, done=True, prompts=5, **other):
    answer = streams.fresh(asked(**other))
    for seconds, each in enumerate(chunks):
        answer.read(each, float(seconds))
    answer.read(
        {"choices": [], "usage": {"prompt_tokens": prompts, "completion_tokens": usage}}, 9.0
    )
    answer.close(done=done)
    return answer


WHOLE = [chunk(0, [1]), chunk(1, [1, 2]), chunk(0, [2, 3, 4], "length"), chunk(1, [3, 4], "length")]


def test_texts_that_share_a_stream():
    answer = heard(*WHOLE)
    assert answer.failure == "" and answer.tokens == [[1, 2, 3, 4], [1, 2, 3, 4]]
    assert answer.traces[0].gaps(each=True) == pytest.approx([2 / 3] * 3)
    assert answer.traces[1].gaps() == [2.0]


@pytest.mark.parametrize(
    ("made", "said"),
    [
        ({"done": False}, "without [DONE]"),
        ({"usage": 7}, "8 tokens came, 7 stand"),
        ({"prompts": 4}, "prompts of 5 tokens are 4"),
        ({"max_tokens": 3}, "a text of 4 tokens, 3 were asked"),
        ({"max_tokens": 5}, "a text ended early"),
    ],
)
def test_a_stream_that_is_not_whole(made, said):
    assert said in heard(*WHOLE, **made).failure


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_difference_is_judged_by_its_margin(tmp_path, temperature):
    folder(tmp_path / "target", llama(64, 64))
    spec = load(str(tmp_path / "target"), "none", dtype="float64", runtime="transformers")
    offline, request = differences.Offline(spec), asked(temperature=temperature)
    offline.measure([request])
    own = offline.texts(request)[1]
    assert offline.difference(request, 1, own) is None
    wrong = [*own[:2], (own[2] + 1) % 64, own[3]]
    off = offline.difference(request, 1, wrong)
    assert off.place == 2 and off.gap > off.allowed and not off.rounding
    short = offline.difference(request, 1, own[:3])
    assert short.served is None and not short.rounding
    # the same, were passes noisy enough to tip the choice
    offline.shapes = replace(offline.shapes, noise=off.gap)
    assert offline.difference(request, 1, wrong).rounding
    tally = soak.counts({"a": None, "b": off}, {"a": 3, "b": 2})
    assert tally["texts"]["beyond"] == {"distinct": 1, "served": 2}
    assert len(soak.beyond(tally["differences"])) == 1
