"""Sums for Prometheus and lines for the log follow from a request's steps."""

from __future__ import annotations

import json
import logging

from foretoken.server import journal
from foretoken.server.engine.link import Link
from foretoken.server.engine.logs import Json
from foretoken.server.engine.messages import Done, Part
from foretoken.server.engine.worker import Setup
from foretoken.server.engine.writing import Writing
from foretoken.server.metrics import Metrics

STATS = {
    "cached_tokens": 2,
    "drafted": 3,
    "accepted": 1,
    "target_calls": 2,
    "draft_calls": 3,
    "seconds": 0.5,
    "runtime": "transformers",
    "draft_runtime": "transformers",
}


def step(accepted: int, rejected: int) -> dict[str, object]:
    sources = ["accepted"] * accepted + ["corrected" if rejected else "bonus"]
    tokens = [{"source": source} for source in sources]
    return {"tokens": tokens, "rejected": [{}] * rejected, "predicted": False}


def written() -> Writing:
    writing = Writing(Link(Setup(None, None)), ["a"], 1, {}, 0)
    writing.texts[0].prompt_tokens = 4
    writing._note(0, Part(0, "ab", [5, 6], None, [step(1, 1)], None))
    writing._note(0, Part(0, "c", [7], None, [step(0, 1)], Done("stop", None, STATS, None)))
    return writing


def values(metrics: Metrics) -> dict[str, float]:
    lines = metrics.text(Link(Setup(None, None))).decode().splitlines()
    pairs = (line.rsplit(" ", 1) for line in lines if not line.startswith("#"))
    return {name: float(value) for name, value in pairs}


def test_sums_under_our_names_and_vllms() -> None:
    metrics = Metrics("m", vllm=True)
    metrics.written(written(), 0.7)
    metrics.answered("/v1/completions", 200)
    told = values(metrics)
    for name, value in (
        ("foretoken_prompt_tokens", 4),
        ("foretoken_generation_tokens", 3),
        ("foretoken_cached_tokens", 2),
        ("foretoken_drafts", 2),
        ("foretoken_drafted_tokens", 3),
        ("foretoken_accepted_tokens", 1),
        ("vllm:spec_decode_num_drafts", 2),
        ("vllm:spec_decode_num_draft_tokens", 3),
        ("vllm:spec_decode_num_accepted_tokens", 1),
    ):
        assert told[f'{name}_total{{model_name="m"}}'] == value, name
    per_place = 'vllm:spec_decode_num_accepted_tokens_per_pos_total{model_name="m",position="0"}'
    assert told[per_place] == 1
    assert told['foretoken_e2e_request_latency_seconds_sum{model_name="m"}'] == 0.7
    assert told['foretoken_time_to_first_token_seconds_count{model_name="m"}'] == 1


def test_vllms_names_only_where_asked() -> None:
    assert not [name for name in values(Metrics("m", vllm=False)) if "vllm" in name]


def test_a_line_has_rates_and_no_text() -> None:
    line = journal.line("id", "/v1/completions", 200, 0.7, written())
    assert line["tokens_per_call"] == 1.5 and line["completion_tokens"] == 3
    assert "ab" not in json.dumps(line)
    record = logging.LogRecord("foretoken.requests", 20, "", 0, "x", (), None)
    record.told = line
    assert json.loads(Json().format(record))["drafted"] == 3
