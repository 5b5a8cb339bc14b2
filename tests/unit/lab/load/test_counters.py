from __future__ import annotations

import pytest

from foretoken.lab.load.counters import Counters, counters
from foretoken.server.metrics import Metrics

VLLM = """# HELP vllm:generation_tokens_total Number of tokens.
# TYPE vllm:generation_tokens_total counter
vllm:generation_tokens_total{engine="0",model_name="m"} 90.0
vllm:generation_tokens_total{engine="1",model_name="m"} 1.1e+02
vllm:generation_tokens_created{engine="0",model_name="m"} 1.7e+09
# TYPE vllm:spec_decode_num_draft_tokens_total counter
vllm:spec_decode_num_draft_tokens_total{engine="0",model_name="m"} 300.0
# TYPE vllm:spec_decode_num_accepted_tokens_total counter
vllm:spec_decode_num_accepted_tokens_total{engine="0",model_name="m"} 150.0
"""


class Link:
    running = waiting = restarts = preempted = 0
    states: dict[str, int] = {}


@pytest.mark.parametrize("vllm", [False, True])
def test_ours_has_them_from_the_beginning(vllm: bool):
    metrics = Metrics("m", vllm=vllm)
    assert counters(metrics.text(Link()).decode()) == Counters(0, 0, 0)  # type: ignore[arg-type]
    for name, value in (("generation_tokens", 9), ("drafted_tokens", 7), ("accepted_tokens", 4)):
        for counter in metrics.counters[name]:
            counter.labels(model_name="m").inc(value)
    assert counters(metrics.text(Link()).decode()) == Counters(9, 7, 4)  # type: ignore[arg-type]


def test_vllm_s_of_all_its_engines():
    assert counters(VLLM) == Counters(200, 300, 150)


def test_servers_that_do_not_guess_have_none():
    assert counters("") is None and counters(VLLM[: VLLM.index("# TYPE vllm:spec")]) is None


def test_rates():
    counts = Counters(230, 310, 160).since(Counters(30, 10, 10))
    assert counts == Counters(200, 300, 150)
    assert counts.tokens_per_call == 4.0 and counts.accepted_per_drafted == 0.5
    assert Counters(0, 0, 0).tokens_per_call is None
    assert Counters(5, 0, 0).accepted_per_drafted is None
    assert Counters(5, 0, 0).tokens_per_call == 1.0
