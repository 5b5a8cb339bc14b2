"""Sums for Prometheus and lines for the log follow from a request's steps."""

from __future__ import annotations

import json
import logging
import re
from pathlib import Path

from foretoken.records import Stats, StepRecord
from foretoken.server.accounting import Metrics, build_log_entry
from foretoken.server.options import JsonFormatter
from foretoken.server.process.client import EngineClient
from foretoken.server.process.generation import Generation
from foretoken.server.process.messages import (
    Accepted,
    Done,
    EngineSetup,
    GenerateRequest,
    StepOutput,
)

DOCS = Path(__file__).parents[3] / "docs"
STATS = Stats(
    target_calls=2,
    draft_calls=3,
    drafted=3,
    accepted=1,
    rounds=2,
    alpha=None,
    accepted_per_drafted=1 / 3,
    tokens_per_call=1.5,
    seconds=0.5,
    prefill_seconds=0.1,
    first_seconds=0.2,
    runtime="transformers",
    draft_runtime="transformers",
    cached_tokens=2,
)
ASKED = GenerateRequest("a")


def step(accepted: int, rejected: int) -> StepRecord:
    draft_tokens = (1,) * (accepted + rejected)
    return StepRecord(len(draft_tokens), draft_tokens, accepted, (1,), (), 1, 0.0, 0.0, 0.0, 1)


def written() -> Generation:
    writing = Generation(EngineClient(EngineSetup(None, None)), [ASKED])
    writing.outputs[0].accepted = Accepted(0, 4)
    writing._record(0, StepOutput(0, ["a", "b"], [5, 6], None, [step(1, 1)], None))
    writing._record(
        0, StepOutput(0, ["c"], [7], None, [step(0, 1)], Done("stop", None, STATS, None))
    )
    return writing


def test_a_prompt_is_counted_once_however_many_texts_continue_it() -> None:
    writing = Generation(EngineClient(EngineSetup(None, None)), [ASKED] * 3, 3)
    for i, text in enumerate(writing.outputs):
        text.accepted = Accepted(0, 4)
        writing._record(i, StepOutput(i, ["c"], [7], None, [], Done("stop", None, STATS, None)))
    metrics = Metrics("m", vllm=False)
    metrics.observe(writing, 0.7, "m")
    samples = values(metrics)
    assert not [name for name in samples if "vllm" in name]  # only where they are asked for
    assert samples['foretoken_prompt_tokens_total{model_name="m"}'] == 4
    assert samples['foretoken_cached_tokens_total{model_name="m"}'] == 2


def values(metrics: Metrics) -> dict[str, float]:
    lines = metrics.render({"m": EngineClient(EngineSetup(None, None))}).decode().splitlines()
    pairs = (line.rsplit(" ", 1) for line in lines if not line.startswith("#"))
    return {name: float(value) for name, value in pairs}


def served() -> Metrics:
    """What a server counts that has answered one request."""
    metrics = Metrics("m", vllm=True)
    metrics.observe(written(), 0.7, "m")
    metrics.count("/v1/completions", 200, "m")
    return metrics


def test_sums_under_our_names_and_vllms() -> None:
    samples = values(served())
    for name, value in (
        ("foretoken_prompt_tokens", 4),
        ("foretoken_generation_tokens", 3),
        ("foretoken_cached_tokens", 2),
        ("foretoken_target_calls", 2),
        ("foretoken_drafts", 2),
        ("foretoken_drafted_tokens", 3),
        ("foretoken_accepted_tokens", 1),
        ("vllm:spec_decode_num_drafts", 2),
        ("vllm:spec_decode_num_draft_tokens", 3),
        ("vllm:spec_decode_num_accepted_tokens", 1),
    ):
        assert samples[f'{name}_total{{model_name="m"}}'] == value, name
    per_place = 'vllm:spec_decode_num_accepted_tokens_per_pos_total{model_name="m",position="0"}'
    assert samples[per_place] == 1
    assert samples['foretoken_e2e_request_latency_seconds_sum{model_name="m"}'] == 0.7
    assert samples['foretoken_time_to_first_token_seconds_count{model_name="m"}'] == 1


def test_a_line_has_rates_and_no_text() -> None:
    entry = build_log_entry("id", "/v1/completions", "m", 200, 0.7, written())
    assert entry["tokens_per_call"] == 1.5 and entry["completion_tokens"] == 3
    assert "ab" not in json.dumps(entry)
    record = logging.LogRecord("foretoken.requests", 20, "", 0, "x", (), None)
    record.fields = entry
    assert json.loads(JsonFormatter().format(record))["drafted"] == 3


def test_the_docs_ask_for_metrics_that_are_there() -> None:
    told = "\n".join(values(served()))
    for document in ("grafana.json", "deploy.md"):
        asked = set(re.findall(r"foretoken_[a-z0-9_]+", (DOCS / document).read_text("utf-8")))
        assert asked and [name for name in sorted(asked) if f"{name}{{" not in told] == []
    panels = json.loads((DOCS / "grafana.json").read_text("utf-8"))["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    for panel in panels:
        assert panel["title"] and panel["targets"]
        for target in panel["targets"]:
            assert target["expr"].count("(") == target["expr"].count(")")
