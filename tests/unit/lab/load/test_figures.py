from __future__ import annotations

import json

import pytest

from foretoken.errors import InputError
from foretoken.lab.load.figures import METRICS, figures, good, latency, limits
from foretoken.lab.load.trace import Trace


def trace(*arrivals: float, tokens: int | None = None, count: int | None = 1) -> Trace:
    made = Trace(list(arrivals), [count] * len(arrivals), end=arrivals[-1], finish_reason="stop")
    made.prompt_tokens, made.tokens = 10, len(arrivals) if tokens is None else tokens
    return made


def failed(status: str, said: str) -> Trace:
    return Trace(failure=(status, said))


def test_percentiles_lie_between_neighbours():
    """Of 1 to 5 ms, percentile q is 1 + 4 q / 100."""
    summary = latency([0.003, 0.001, None, 0.005, 0.002, 0.004], [0, 50, 90, 100])
    assert summary is not None and summary.mean == summary.median == pytest.approx(3)
    assert summary.std == pytest.approx(2**0.5)
    assert summary.percentiles == pytest.approx({0: 1.0, 50: 3.0, 90: 4.6, 100: 5.0})
    assert latency([None], [50]) is None


def test_what_a_load_comes_to():
    traces = [trace(0.1, 0.3, 0.5), failed("429", "full"), trace(0.2, 1.2), failed("503", "down")]
    traces += [failed("429", "full again")]
    traces[0].late, traces[1].late = 0.5, 2.0
    summary = figures(traces, 2.0, list(METRICS), [50, 99], {"ttft": 0.15})
    assert (summary.completed, summary.failed, summary.good, summary.by_tokens) == (2, 3, 1, True)
    document = summary.document
    assert document["failures"] == {
        "429": {"requests": 2, "first": "full"},
        "503": {"requests": 1, "first": "down"},
    }
    assert (document["total_input_tokens"], document["total_output_tokens"]) == (20, 5)
    assert (document["request_throughput"], document["request_goodput"]) == (1.0, 0.5)
    assert (document["output_throughput"], document["total_token_throughput"]) == (2.5, 12.5)
    assert document["mean_ttft_ms"] == pytest.approx(150) and document["p99_ttft_ms"] < 200
    assert document["mean_sent_late_ms"] == 500 and document["max_sent_late_ms"] == 2000
    assert document["mean_tpot_ms"] == pytest.approx((200 + 1000) / 2)
    assert document["mean_itl_ms"] == pytest.approx((200 + 200 + 1000) / 3)
    assert document["median_itl_ms"] == pytest.approx(200) and document["itl_between"] == "tokens"
    assert document["median_e2el_ms"] == pytest.approx((500 + 1200) / 2)
    assert json.loads(json.dumps(document, allow_nan=False)) == document


def test_one_text_whose_chunks_are_not_counted_makes_all_gaps_those_of_chunks():
    counted, other = trace(0.0, 4.0, tokens=4, count=2), trace(0.0, 6.0, tokens=9, count=None)
    alone = figures([counted], 1.0, ["itl"], [50], {}).document
    assert (alone["mean_itl_ms"], alone["itl_between"]) == (2000, "tokens")
    both = figures([counted, other], 1.0, ["itl"], [50], {}).document
    assert (both["mean_itl_ms"], both["itl_between"]) == (5000, "chunks")


def test_nothing_but_failures():
    summary = figures([failed("500", "x")], 1.0, list(METRICS), [50], {"e2el": 1.0}).document
    assert (
        summary["completed"] == 0
        and summary["request_goodput"] == 0.0
        and "mean_ttft_ms" not in summary
    )
    assert figures([], 0.0, ["ttft"], [50], {}).document["request_throughput"] == 0.0


@pytest.mark.parametrize(
    ("bounds", "expected"),
    [
        ({"ttft": 0.1}, True),
        ({"ttft": 0.099}, False),
        ({"tpot": 0.2, "e2el": 0.5}, True),
        ({"tpot": 0.2, "e2el": 0.49}, False),
        ({"tpot": 0.19}, False),
        ({}, True),
    ],
)
def test_a_good_request_is_within_every_limit(bounds: dict[str, float], expected: bool):
    request = trace(0.1, 0.25, 0.5)  # 0.4 s for two more tokens
    assert good(request, bounds) is expected


def test_short_texts_and_goodput():
    assert good(trace(0.1), {"tpot": 0.001})
    assert not good(Trace(end=0.1, tokens=0), {"ttft": 9.0})


def test_limits_are_in_milliseconds():
    assert limits(["ttft:200 e2el:3000", "tpot:1.5"]) == {"ttft": 0.2, "e2el": 3.0, "tpot": 0.0015}
    assert limits([]) == {}


@pytest.mark.parametrize(
    "text", ["itl:5", "ttft", "ttft:x", "ttft:-1", "ttft:inf", "ttft:1 ttft:2"]
)
def test_bad_limits(text: str):
    with pytest.raises(InputError, match="goodput holds"):
        limits([text])
