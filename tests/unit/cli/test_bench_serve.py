"""`foretoken bench serve` on a foreign server, a test double (tests/foreign.py); on ours in
tests/e2e/test_load.py."""

from __future__ import annotations

import json
import os
import signal
from functools import partial
from pathlib import Path
from threading import Thread
from typing import Any

import pytest

from console import Run, mistake
from foreign import Answer, body, refusal, replaying, streamed
from served import until

OWNED = body({"data": [{"id": "theirs", "owned_by": "vllm"}]})


@pytest.fixture
def call(console: Run, monkeypatch: pytest.MonkeyPatch) -> Run:
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    monkeypatch.delenv("FORETOKEN_API_KEY", raising=False)
    return partial(console, "bench", "serve")


@pytest.fixture
def custom(tmp_path: Path) -> tuple[object, ...]:
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"prompt": "It was"}\n{"prompt": [5, 17]}\n')
    return "--dataset-name", "custom", "--dataset-path", path


def piece(text: str, end: str | None = None, **more: Any) -> dict[str, Any]:
    return {"choices": [{"index": 0, "text": text, "finish_reason": end, **more}]}


def written(*pieces: dict[str, Any], tokens: int = 5) -> Answer:
    usage = {"prompt_tokens": 3, "completion_tokens": tokens}
    return streamed(*pieces, piece("", "length"), {"choices": [], "usage": usage})


TEXT = written(piece("It"), piece(" was so"))
RANDOM = ("--vocab-size", 50, "--random-input-len", 4, "--random-output-len", 5)


def test_a_server_that_tells_the_usage_only(call: Run, custom: tuple[object, ...]):
    """Its tokens are the usage's, not its chunks; nothing is sent that OpenAI's fields lack."""
    with replaying(completions=[TEXT]) as server:
        more = ("--num-prompts", 3, "--max-concurrency", 1, "--seed", 7, "--custom-output-len", 9)
        code, out, err = call("--base-url", f"{server.url}/v1", *custom, *more, "--json")
        bodies = server.bodies("/v1/completions")
    assert code == 0 and err == ""
    document = json.loads(out)
    assert (document["completed"], document["failed"], document["failures"]) == (3, 0, {})
    assert (document["total_input_tokens"], document["total_output_tokens"]) == (9, 15)
    assert (
        document["itl_between"] == "chunks"
        and document["speculation"] is document["server"] is None
    )
    assert document["model_id"] == "other" and document["request_rate"] == "inf"
    for name in ("ttft", "tpot", "itl", "e2el"):
        assert document[f"p50_{name}_ms"] == pytest.approx(document[f"median_{name}_ms"])
        assert 0 < document[f"p90_{name}_ms"] <= document[f"p99_{name}_ms"]
    same = {"model": "other", "stream": True, "stream_options": {"include_usage": True}}
    same |= {"max_tokens": 9, "temperature": 0.0}
    prompts = ["It was", [5, 17], "It was", [5, 17]]  # the first is a warm-up
    assert bodies == [same | {"prompt": p, "seed": 7 + i} for i, p in enumerate(prompts)]


def test_random_prompts_and_tokens_that_chunks_tell(call: Run, tmp_path: Path):
    text = written(piece("a", token_ids=[1]), piece("bcde", token_ids=[2, 3, 4, 5]))
    with replaying(models=[OWNED], completions=[text]) as server:
        more = ("--num-prompts", 8, "--ignore-eos", "--temperature", 0.5, "--request-rate", 200)
        saved = ("--save-result", "--result-dir", tmp_path / "new", "--out", tmp_path / "one.json")
        limits = ("--goodput", "ttft:60000 e2el:60000")
        call("--base-url", server.url, *RANDOM, *more, "--num-prompts", 1)
        first = server.bodies("/v1/completions")
        code, out, _ = call("--base-url", server.url, *RANDOM, *more, *saved, *limits)
        bodies = server.bodies("/v1/completions")[len(first) :]
    assert code == 0
    prompts = {tuple(one["prompt"]) for one in bodies}
    assert len(prompts) == 9 and {len(prompt) for prompt in prompts} == {4}
    assert all(0 <= id < 50 for prompt in prompts for id in prompt)
    assert [one["prompt"] for one in first] == [one["prompt"] for one in bodies[:2]]
    for one in bodies:
        assert one["ignore_eos"] is one["return_token_ids"] is True and one["temperature"] == 0.5
    document = json.loads((tmp_path / "one.json").read_text())
    (named,) = (tmp_path / "new").iterdir()
    assert json.loads(named.read_text()) == document
    assert named.name == f"openai-200.0qps-theirs-{document['date']}.json"
    assert document["itl_between"] == "tokens" and document["request_goodput"] > 0
    assert document["goodput"] == {"ttft": 60000, "e2el": 60000}
    for words in (
        "theirs at http://127.0.0.1:",
        "8 requests, 200 a second, at random times; random prompts of 4 tokens, up to 5 new ones",
        "Successful requests       8\n",
        "Failed requests           0\n",
        "requests/s; 8 of 8 within ttft 60000 ms, e2el 60000 ms",
        "those of one chunk share the time",
    ):
        assert words in out, out


def test_failures_are_counted_by_status(call: Run, custom: tuple[object, ...]):
    torn = streamed(piece("It"), done=False)
    wrong = streamed({"error": {"message": "the step failed"}})
    answers = [TEXT, refusal(429, "full", Retry_After="1"), torn, refusal(429, "still full")]
    answers += [refusal(503, "loading"), wrong, written(piece("a", token_ids=[1])), TEXT]
    with replaying(completions=answers) as server:
        more = ("--num-prompts", 7, "--max-concurrency", 1)
        code, out, _ = call("--base-url", server.url, *custom, *more)
    assert code == 1
    for words in (
        "Successful requests       1\n",
        "Failed requests           6\n",
        "  429                     2, the first: full\n",
        "  503                     1, the first: loading\n",
        "  stream                  3, the first: the server broke off before the text's end\n",
        "Total generated tokens    5\n",
    ):
        assert words in out, out


def test_all_fail(call: Run, custom: tuple[object, ...]):
    with replaying(completions=[TEXT, refusal(500, "broken")]) as server:
        code, out, _ = call("--base-url", server.url, *custom, "--num-prompts", 3)
    assert code == 1 and "500                     3, the first: broken" in out and "TTFT" not in out


def test_ctrl_c_reports_what_is_over(call: Run, custom: tuple[object, ...]):
    """The fourth request, behind a warm-up and two that end, never goes on."""
    stuck = streamed(piece("It"), None)
    with replaying(completions=[TEXT, TEXT, TEXT, stuck]) as server:

        def press() -> None:
            until(lambda: len(server.bodies("/v1/completions")) == 4)
            os.kill(os.getpid(), signal.SIGINT)

        thread = Thread(target=press)
        thread.start()
        more = ("--num-prompts", 9, "--max-concurrency", 1)
        code, out, _ = call("--base-url", server.url, *custom, *more)
        thread.join()
    assert code == 130 and "Successful requests       2\n" in out
    assert "Interrupted               7 requests were not sent or not over\n" in out


def test_a_key(call: Run, custom: tuple[object, ...], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("FORETOKEN_API_KEY", "secret")
    with replaying(completions=[TEXT]) as server:
        assert call("--base-url", server.url, *custom, "--num-prompts", 1).code == 0
        assert {headers.get("authorization") for *_, headers in server.requests} == {
            "Bearer secret"
        }


@pytest.mark.parametrize(
    ("answers", "options", "said"),
    [
        ([refusal(400, "no such field")], RANDOM, "a first request failed (400): no such field"),
        (
            [TEXT],
            RANDOM[2:],
            "does not tell its vocabulary, of which random prompts are made; give",
        ),
    ],
)
def test_servers_that_cannot_be_measured(
    call: Run, answers: list[Answer], options: tuple[object, ...], said: str
):
    with replaying(completions=answers) as server:
        mistake(call("--base-url", server.url, *options), said)


def test_nobody_is_there(call: Run):
    mistake(call("--base-url", "http://127.0.0.1:9"), "http://127.0.0.1:9 cannot be reached")


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--num-prompts", 0), "num_prompts is 0"),
        (("--request-rate", 0), "request_rate is 0"),
        (("--request-rate", "nan"), "request_rate is nan"),
        (("--max-concurrency", 0), "max_concurrency is 0"),
        (("--seed", -1), "seed is -1"),
        (("--dataset-name", "sharegpt"), "dataset_name is 'sharegpt'; give one of random, custom"),
        (("--dataset-name", "custom"), "give --dataset-path"),
        (("--dataset-path", "x"), "--dataset-path is for --dataset-name custom"),
        (("--custom-output-len", 5), "--custom-output-len is for --dataset-name custom"),
        (("--random-input-len", 0), "random_input_len is 0"),
        (("--percentile-metrics", "ttft,x"), "percentile_metrics holds 'x'"),
        (("--metric-percentiles", "50,101"), "metric_percentiles is '50,101'"),
        (("--metric-percentiles", "p50"), "metric_percentiles is 'p50'"),
        (("--goodput", "itl:3"), "goodput holds 'itl:3'"),
        (("--result-dir", "x"), "--result-dir is for --save-result"),
        (("--out", "missing/x.json"), "there is no folder missing"),
        (("--temperature", -1), "temperature is -1"),
        (("--base-url", "127.0.0.1"), "url is '127.0.0.1'; give one such as"),
    ],
)
def test_mistakes(call: Run, options: tuple[object, ...], said: str):
    mistake(call(*options), said)


def test_an_option_of_random_beside_custom(call: Run, custom: tuple[object, ...]):
    mistake(call(*custom, "--vocab-size", 5), "--vocab-size is for --dataset-name random")


def test_bench_is_what_it_was(console: Run):
    assert "--prompts" in console("bench", "--help").out
    assert "--num-prompts" in console("bench", "serve", "--help").out
    mistake(console("bench", "serv"), "Missing option '--prompts'")
