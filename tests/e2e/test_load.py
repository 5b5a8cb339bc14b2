"""`foretoken bench serve` against our own server."""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from console import Run
from served import pair, serving

LENGTHS = ("--random-input-len", 12, "--random-output-len", 16, "--ignore-eos")


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    return pair(tmp_path_factory.mktemp("load"))


@pytest.fixture(scope="module")
def url(folders: tuple[str, str]) -> Iterator[str]:
    with serving(*folders) as (address, _):
        yield address


@pytest.fixture
def call(console: Run, monkeypatch: pytest.MonkeyPatch) -> Run:
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    return partial(console, "bench", "serve", "--json", *LENGTHS, "--base-url")


def test_every_token_is_accounted_for(call: Run, url: str):
    """The first request of all is the warm-up, so the counters begin before any sample."""
    code, out, _ = call(url, "--num-prompts", 12, "--max-concurrency", 6)
    assert code == 0
    document = json.loads(out)
    assert (document["completed"], document["failed"]) == (12, 0)
    assert document["total_output_tokens"] == 12 * 16 and document["total_input_tokens"] == 12 * 12
    assert document["speculation"]["tokens"] == 12 * 16
    assert 1 <= document["speculation"]["tokens_per_call"] and document["itl_between"] == "tokens"
    assert document["server"]["runtime"] and document["model_id"] == "tiny"
    assert 0 < document["mean_ttft_ms"] < document["mean_e2el_ms"] < 1e3 * document["duration"]
    sent = document["mean_ttft_ms"] + 15 * document["mean_tpot_ms"]
    assert sent == pytest.approx(document["mean_e2el_ms"])


def test_a_rate_spreads_the_requests(call: Run, url: str):
    """The last of 10 requests is due at 5 / s, whatever the server; the seed decides when."""
    from foretoken.lab.load.arrivals import arrivals

    code, out, _ = call(url, "--num-prompts", 6, "--request-rate", 10, "--seed", 3)
    assert code == 0
    assert json.loads(out)["duration"] > arrivals(6, 10.0, 3)[-1]


def test_the_server_s_vocabulary_is_the_bound(call: Run, url: str):
    code, _, err = call(url, "--vocab-size", 10**6)
    assert code == 2 and "vocab_size is 1000000, the server's is 320" in err


@pytest.mark.prove
def test_a_full_server_is_seen(call: Run, folders: tuple[str, str], tmp_path: Path):
    with serving(*folders, max_rows=1, max_waiting=1) as (url, _):
        code, out, _ = call(url, "--num-prompts", 8, "--out", tmp_path / "load.json")
    document = json.loads(out)
    assert (
        code == 1 and document["completed"] >= 1 and document["completed"] + document["failed"] == 8
    )
    assert list(document["failures"]) == ["429"] and document["total_output_tokens"] % 16 == 0
    assert json.loads((tmp_path / "load.json").read_text()) == document
