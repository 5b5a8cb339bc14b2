"""The server as its clients meet it, by plain HTTP. The texts are those that `generate` gives."""

from __future__ import annotations

import json
import os
import signal
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx2
import openai
import pytest

import foretoken
from foretoken.errors import InputError
from foretoken.server.access import AccessPolicy
from foretoken.server.options import ServerOptions
from foretoken.server.process.client import EngineClient, spawn
from served import BAD_REQUESTS, HELLO, LOADING, pair, require_refused, serving, until

SAMPLING: dict[str, Any] = {"model": "tiny", "seed": 7, "temperature": 1.0}
LONG = {"prompt": "a", "max_tokens": 900, "ignore_eos": True, "temperature": 1.0}
WITH_USAGE = {"stream": True, "stream_options": {"include_usage": True}}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    return pair(tmp_path_factory.mktemp("served"))


@pytest.fixture(scope="module")
def spec(folders: tuple[str, str]) -> foretoken.Speculator:
    return foretoken.load(*folders, **LOADING)


@pytest.fixture(scope="module")
def server(folders: tuple[str, str]) -> Iterator[tuple[str, EngineClient]]:
    with serving(*folders, max_waiting=64) as running:
        yield running


@pytest.fixture
def url(server: tuple[str, EngineClient]) -> str:
    return server[0]


def offline(spec: foretoken.Speculator, prompt: Any, row: int = 0, **options: Any) -> Any:
    sampling = {"temperature": 1.0, "max_new_tokens": 24, "gamma": 2} | options
    return spec.generate([prompt], seed=[(7, row)], **sampling)[0]


def post(url: str, path: str, body: Any) -> httpx2.Response:
    # To load certificates takes longer than the answer
    return httpx2.post(f"{url}{path}", json=body, timeout=60, verify=False)


def complete(url: str, **body: Any) -> httpx2.Response:
    """Send a completion of 24 sampled tokens, at gamma 2 unless the body says otherwise."""
    sampling = SAMPLING | {"prompt": "It was", "max_tokens": 24, "speculation": {"gamma": 2}}
    return post(url, "/v1/completions", sampling | body)


def events(response: Any) -> list[Any]:
    """The data of server-sent events, the last of which says that they are done."""
    lines = [line for line in response.text.split("\n\n") if line]
    assert all(line.startswith("data: ") for line in lines) and lines[-1] == "data: [DONE]"
    return [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]


GOOD_REQUESTS = json.loads(Path(__file__).with_name("good_requests.json").read_text())


@pytest.mark.parametrize("path", GOOD_REQUESTS)
def test_good_requests_get_the_text_of_generate(url: str, spec: Any, path: str) -> None:
    """Of the prompt beside each, with the reason of its end and the number of its tokens."""
    limit = "max_output_tokens" if path == "/v1/responses" else "max_tokens"
    for body, prompt in GOOD_REQUESTS[path]:
        asked = SAMPLING | {limit: 12, "speculation": {"gamma": 2}} | body
        answer = post(url, path, asked).json()
        expected = offline(spec, prompt, max_new_tokens=12)
        if path == "/v1/responses":
            (item,) = answer["output"]
            text, count = item["content"][0]["text"], answer["usage"]["output_tokens"]
            reason = {"incomplete": "length", "completed": "stop"}[answer["status"]]
        else:
            (choice,) = answer["choices"]
            text, reason = choice.get("text"), choice["finish_reason"]
            text = choice["message"]["content"] if text is None else text
            count = answer["usage"]["completion_tokens"]
            (read,) = spec.inputs.list_prompts([prompt])
            read = spec.inputs.encode_prompt(read) if isinstance(read, str) else read
            assert answer["usage"]["prompt_tokens"] == len(read)
        assert (text, reason) == (expected.text, expected.finish_reason), body
        assert count == len(expected.tokens)


@pytest.mark.parametrize("path", BAD_REQUESTS["text"])
def test_bad_requests_name_their_field(url: str, path: str) -> None:
    require_refused(url, "text", path)


def test_a_stream_tells_its_usage_so_far(url: str) -> None:
    options = {"stream_options": {"include_usage": True, "continuous_usage_stats": True}}
    options |= {"stream": True, "return_token_ids": True}
    *chunks, last = events(complete(url, **options))
    written = 0
    for chunk in chunks:
        written += len(chunk["choices"][0]["token_ids"])
        assert chunk["usage"]["completion_tokens"] == written
    assert last["usage"] == chunks[-1]["usage"]
    chat = events(post(url, "/v1/chat/completions", SAMPLING | {"messages": HELLO} | options))
    told = [chunk["usage"]["completion_tokens"] for chunk in chat if chunk["usage"] is not None]
    assert len(told) > 2 and told == sorted(told)


def test_the_events_of_a_response_are_numbered(url: str, spec: Any) -> None:
    body = {"input": "Hello", "max_output_tokens": 24, "speculation": {"gamma": 2}}
    answer = post(url, "/v1/responses", SAMPLING | body | {"stream": True}).text
    sent = [json.loads(line[6:]) for line in answer.splitlines() if line.startswith("data: ")]
    deltas = [each["delta"] for each in sent if each["type"] == "response.output_text.delta"]
    assert "".join(deltas) == offline(spec, HELLO).text
    assert [each["sequence_number"] for each in sent] == list(range(len(sent)))


def test_several_texts_have_keys_of_their_own(url: str, spec: Any) -> None:
    answer = complete(url, prompt=["It was", "She"], n=2).json()
    prompts = ["It was", "It was", "She", "She"]
    expected = [offline(spec, prompt, i).text for i, prompt in enumerate(prompts)]
    assert [choice["text"] for choice in answer["choices"]] == expected
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2, 3]
    assert len(set(expected)) == 4
    read = len(spec.inputs.encode_prompt("It was")) + len(spec.inputs.encode_prompt("She"))
    assert answer["usage"]["prompt_tokens"] == read


def test_a_prompts_logprobs_are_told_as_vllm_does(url: str, spec: Any) -> None:
    ids = spec.inputs.encode_prompt("It was")
    expected = offline(spec, ids, prompt_logprobs=2).prompt_logprobs
    (choice,) = complete(url, prompt=ids, prompt_logprobs=2).json()["choices"]
    assert choice["prompt_logprobs"][0] is None and len(choice["prompt_logprobs"]) == len(ids)
    for token, known, each in zip(ids[1:], expected, choice["prompt_logprobs"][1:], strict=True):
        likeliest = {str(id): (value, rank) for rank, (id, value) in enumerate(known.top, 1)}
        likeliest[str(token)] = (known.logprob, known.rank)
        assert {id: (x["logprob"], x["rank"]) for id, x in each.items()} == {
            id: (pytest.approx(value), rank) for id, (value, rank) in likeliest.items()
        }
    chat = SAMPLING | {"messages": HELLO, "prompt_logprobs": 0}
    told = post(url, "/v1/chat/completions", chat).json()["prompt_logprobs"]
    assert told[0] is None and len(told) == len(spec.inputs.list_prompts([HELLO])[0])


def test_a_prompt_is_told_again_with_its_logprobs(url: str, spec: Any) -> None:
    ids = spec.inputs.encode_prompt("It was")
    expected = offline(spec, ids, prompt_logprobs=2, logprobs=2)
    known = [*expected.prompt_logprobs, *expected.logprobs]
    for prompt in ("It was", ids):
        (choice,) = complete(url, prompt=prompt, echo=True, logprobs=2).json()["choices"]
        told = choice["logprobs"]
        assert choice["text"] == "It was" + expected.text
        assert told["token_logprobs"][0] is told["top_logprobs"][0] is None
        assert told["token_logprobs"][1:] == pytest.approx([e.logprob for e in known], abs=1e-12)
        assert "".join(told["tokens"])[:6] == "It was" and told["text_offset"][len(ids)] == 6
        for token, top in [*zip(told["tokens"], told["top_logprobs"], strict=True)][1:]:
            assert token in top and len(top) <= 3  # the two likeliest, and the token itself
    scored = complete(url, echo=True, logprobs=2, max_tokens=0).json()  # as evaluations ask
    (choice,) = scored["choices"]
    assert choice["text"] == "It was" and scored["usage"]["completion_tokens"] == 0
    assert len(choice["logprobs"]["tokens"]) == len(ids)


def test_parts_of_a_character_have_entries_and_offsets_of_their_own(url: str) -> None:
    """Each its own logprob, by a name of its own, at the place of its character; echoed prompts
    and new text, whole and in streams."""
    text = "It \U0001f327 was \U0001f327é"
    (choice,) = complete(url, prompt=text, max_tokens=0, echo=True, logprobs=5).json()["choices"]
    told = choice["logprobs"]
    assert choice["text"] == text and r"bytes:\xf0\x9f" in told["tokens"]
    own = zip(told["tokens"], told["token_logprobs"], told["top_logprobs"], strict=True)
    for token, logprob, top in [*own][1:]:
        assert top[token] == logprob and len(top) >= 5
    first = next(i for i, token in enumerate(told["tokens"]) if token.startswith("bytes:"))
    assert told["text_offset"][first : first + 4] == [3, 3, 3, 4]
    assert max(told["text_offset"]) == len(text) - 1
    bias = {str(id): 100 for id in range(130, 256)}  # bytes that are no characters, most of them
    more: dict[str, Any] = {"prompt": "It", "logprobs": 3, "logit_bias": bias}
    (choice,) = complete(url, **more).json()["choices"]
    offsets = choice["logprobs"]["text_offset"]
    assert offsets == sorted(offsets) and len(choice["text"]) >= offsets[-1]
    assert all(len(top) >= 3 for top in choice["logprobs"]["top_logprobs"])
    chunks = events(complete(url, **more, stream=True))
    assert offsets == [at for c in chunks for at in c["choices"][0]["logprobs"]["text_offset"]]
    chat = SAMPLING | {"messages": HELLO, "logprobs": True, "top_logprobs": 5, "logit_bias": bias}
    (choice,) = post(url, "/v1/chat/completions", chat).json()["choices"]
    for each in choice["logprobs"]["content"]:
        names = [top["token"] for top in each["top_logprobs"]]
        assert len(set(names)) == 5 and "\ufffd" not in names


def test_offsets_end_with_the_text(url: str, spec: Any) -> None:
    """Tokens behind a stop string are told, and their place is the text's end."""
    free = offline(spec, "It was").text
    asked = {"logprobs": 0, "stop": free[4:9]}
    (choice,) = complete(url, **asked).json()["choices"]
    assert choice["text"] == free[: free.index(free[4:9])] and choice["finish_reason"] == "stop"
    offsets = choice["logprobs"]["text_offset"]
    assert max(offsets) == len(choice["text"]) and len(offsets) > len(set(offsets))
    told = [c["choices"][0]["logprobs"] for c in events(complete(url, **asked, stream=True))]
    assert told[-1]["text_offset"][-1] == len(choice["text"])


def test_a_prediction_saves_calls_and_is_counted(url: str, spec: Any) -> None:
    """Right, in parts, wrong; streamed, several at once; of digits, whose text has one spelling,
    and coupled, so that a seed gives one text whatever is guessed."""
    digits = {str(id): 100 for id in spec.tokenizer("0123456789").input_ids}
    sampling = SAMPLING | {"max_tokens": 40, "messages": HELLO, "logit_bias": digits}
    sampling |= {"speculation": {"gamma": 4, "rule": "coupled", "steps": True}}

    def told(content: Any = None, **more: Any) -> httpx2.Response:
        asked = sampling if content is None else sampling | {"prediction": predicted(content)}
        return post(url, "/v1/chat/completions", asked | more)

    def predicted(content: Any) -> dict[str, Any]:
        return {"type": "content", "content": content}

    def counted(answer: Any) -> tuple[int, int]:
        assert answer["usage"]["completion_tokens"] == 40
        details = answer["usage"]["completion_tokens_details"]
        return details["accepted_prediction_tokens"], details["rejected_prediction_tokens"]

    plain = told().json()
    text = plain["choices"][0]["message"]["content"]
    assert counted(plain) == (0, 0) and len(text) == 40 and text.isdigit()
    for content in (text, [{"type": "text", "text": part} for part in (text[:9], text[9:])]):
        done = told(content).json()
        assert done["choices"][0]["message"]["content"] == text and counted(done) == (31, 0)
        made = done["speculation"]
        assert made["target_calls"] == 9 and made["draft_calls"] == 0

    wrong = told("none" + text[20:30] + "x" + text[20:]).json()
    assert wrong["choices"][0]["message"]["content"] == text
    steps = [step for step in wrong["speculation"]["steps"][0] if step["predicted"]]
    kept = [token["source"] for step in steps for token in step["tokens"]].count("accepted")
    assert counted(wrong) == (kept, sum(len(step["rejected"]) for step in steps))
    assert kept > 8 and counted(wrong)[1] >= 4

    *chunks, last = events(told(text, n=2, **WITH_USAGE))
    own = [c["choices"][0] for c in chunks if c["choices"][0]["index"] == 0]
    assert "".join(choice["delta"].get("content") or "" for choice in own) == text
    details = last["usage"]["completion_tokens_details"]
    assert details["accepted_prediction_tokens"] >= 31 and last["usage"]["completion_tokens"] == 80

    grammar = {"structured_outputs": {"regex": "(xyz ){9}"}, "max_tokens": 60}
    answer = complete(url, **grammar, prediction=predicted("xyz xyz xyz nothing more")).json()
    assert answer["choices"][0]["text"] == "xyz " * 9
    assert answer["usage"]["completion_tokens_details"]["accepted_prediction_tokens"]


def test_tokens_and_back(url: str, spec: Any) -> None:
    answer = post(url, "/tokenize", {"prompt": "It was", "return_token_strs": True}).json()
    assert answer["tokens"] == spec.inputs.encode_prompt("It was")
    assert answer["count"] == len(answer["tokens"])
    assert "".join(answer["token_strs"]).endswith("was")
    assert post(url, "/detokenize", {"tokens": answer["tokens"]}).json() == {"prompt": "It was"}
    chat = post(url, "/tokenize", {"messages": HELLO}).json()
    assert chat["tokens"] == spec.inputs.list_prompts([HELLO])[0]


def test_steps_are_told_to_who_asks(url: str, spec: Any) -> None:
    """Which tokens each kept, and which it refused: test_answers.py."""
    *chunks, last = events(complete(url, **WITH_USAGE, speculation={"gamma": 3, "steps": True}))
    steps = [step for chunk in chunks for step in chunk["speculation"]["steps"]]
    expected = offline(spec, "It was", gamma=3)
    kept = [[token["id"] for token in step["tokens"]] for step in steps]
    assert kept == [list(step.new_tokens) for step in expected.steps]
    rejected = [[token["id"] for token in step["rejected"]] for step in steps]
    assert rejected == [list(step.draft_tokens[step.accepted :]) for step in expected.steps]
    assert last["speculation"]["target_calls"] == len(expected.steps)
    assert last["speculation"]["accepted"] == expected.stats.accepted


def test_what_speculation_does_now(url: str) -> None:
    complete(url)
    answer = httpx2.get(f"{url}/v1/speculation").json()
    assert (answer["target"], answer["draft"]) == ("target", "draft")  # not where they lie
    assert answer["active"] is True and answer["chat"] is True
    assert 0 <= answer["alpha"] <= 1 and answer["tokens_per_call"] >= 1
    assert answer["acceptance_by_position"] and answer["running"] == answer["waiting"] == 0
    assert {"c", "v", "predicted_speedup"} <= answer.keys()


def test_errors_have_codes(url: str, spec: Any) -> None:
    answer = complete(url, prompt=[5] * 1100)
    assert answer.json()["error"]["code"] == "context_length_exceeded"
    missing = httpx2.get(f"{url}/v1/embeddings")
    assert missing.status_code == 404 and "there is no /v1/embeddings" in missing.text
    assert httpx2.get(f"{url}/v1/completions").status_code == 405
    answer = httpx2.post(f"{url}/v1/audio/transcriptions", files={"file": b"RIFF"})
    assert (
        answer.status_code == 400
        and "does not transcribe speech" in answer.json()["error"]["message"]
    )
    with pytest.raises(InputError, match="'robot'; give one of"):  # as the server refuses it
        spec.generate([{"role": "robot", "content": "a"}])


def test_a_client_that_goes_away_frees_its_row(server: tuple[str, EngineClient]) -> None:
    """Long before its text is done: 900 tokens take seconds. One that closes its sending half
    cannot be told from one that is gone altogether, as docs/serving.md says."""
    url, link = server
    before = httpx2.get(f"{url}/v1/speculation").json()["tokens"]
    with httpx2.stream("POST", f"{url}/v1/completions", json=LONG | {"stream": True}) as answer:
        for _ in zip(range(5), answer.iter_lines(), strict=False):
            pass
    until(lambda: not link.running and not link.num_open)
    with pytest.raises(httpx2.TimeoutException):
        httpx2.post(f"{url}/v1/completions", json=LONG, timeout=0.5)
    until(lambda: not link.running and not link.num_open)
    answer = httpx2.get(f"{url}/v1/speculation").json()
    assert answer["running"] == 0 and answer["tokens"] - before < 900
    body = json.dumps(LONG)
    head = "POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\n"
    asked = f"{head}Content-Length: {len(body)}\r\n\r\n{body}"
    assert _exchange(url, asked, half_closes=True) == ""
    until(lambda: not link.num_open)


def test_a_full_queue(folders: tuple[str, str]) -> None:
    asked = LONG | {"max_tokens": 100}
    with serving(*folders, max_rows=1, max_waiting=1) as (url, _), ThreadPoolExecutor(5) as pool:
        answers = list(pool.map(lambda _: post(url, "/v1/completions", asked), range(5)))
    assert {answer.status_code for answer in answers} == {200, 429}
    refused = next(answer for answer in answers if answer.status_code == 429)
    assert refused.json()["error"]["type"] == "rate_limit_error"
    assert int(refused.headers["retry-after"]) >= 1


@pytest.mark.prove
def test_an_engine_that_dies_is_started_again(folders: tuple[str, str]) -> None:
    with serving(*folders, begin=spawn) as (url, link), ThreadPoolExecutor(2) as pool:
        whole = pool.submit(post, url, "/v1/completions", LONG)
        streamed = pool.submit(post, url, "/v1/completions", LONG | {"stream": True})
        until(lambda: link.running == 2)
        os.kill(link.info.pid, signal.SIGKILL)
        answer = whole.result()
        assert answer.status_code == 503 and answer.headers["retry-after"]
        assert answer.json()["error"]["code"] == "engine_stopped"
        *_, last = streamed.result().text.strip().split("\n\n")
        assert json.loads(last.removeprefix("data: "))["error"]["code"] == "engine_stopped"
        until(lambda: link.state == "restarting")
        asked = httpx2.get(f"{url}/v1/speculation")  # whose facts would be of the engine before
        for now in (post(url, "/v1/completions", LONG), asked):
            assert now.status_code == 503 and now.headers["retry-after"]
        until(lambda: link.state == "ready")
        assert complete(url, max_tokens=3).status_code == 200 and link.restarts == 1


@pytest.mark.prove
def test_a_model_that_cannot_be_loaded(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="nowhere"):
        with serving(str(tmp_path / "nowhere"), None, begin=spawn):
            pass


@pytest.fixture(scope="module")
def guarded(folders: tuple[str, str]) -> Iterator[str]:
    """A server with keys and bounds, for pages of one origin."""
    bounds: Any = {"max_body": 2000, "max_tokens": 8, "max_texts": 2}
    access: Any = {"api_key": ("secret", "other"), "allowed_origin": ("http://a.example",)}
    with serving(*folders, ServerOptions("tiny", drain=1.0, **bounds, **access)) as (address, _):
        yield address


def test_a_key_has_a_salt_of_its_own() -> None:
    keys = ("one", "two")
    salts = {AccessPolicy(keys).get_cache_salt(key) for key in keys}
    assert len(salts) == 2 and None not in salts
    assert "one" not in "".join(str(each) for each in salts)
    for wrong in ("", "on", "one "):
        assert AccessPolicy(keys).get_cache_salt(wrong) is None
    assert AccessPolicy(("clé",)).get_cache_salt("clé".encode().decode("latin-1")) is not None
    assert AccessPolicy().get_cache_salt("") == ""


def test_keys_and_bounds(guarded: str) -> None:
    """A key is asked for before a body is read; nothing is told without one."""
    assert httpx2.get(f"{guarded}/health").status_code == 200
    for path in ("v1/models", "openapi.json", "nowhere"):
        answer = httpx2.get(f"{guarded}/{path}")
        assert answer.status_code == 401 and answer.json()["error"]["code"] == "invalid_api_key"
        assert answer.headers["x-request-id"]
    assert post(guarded, "/v1/completions", [1]).status_code == 401
    asked: Any = {"model": "tiny", "prompt": "a", "max_tokens": 4}
    with openai.OpenAI(base_url=f"{guarded}/v1", api_key="wrong") as client:
        with pytest.raises(openai.AuthenticationError):
            client.completions.create(**asked)
    with openai.OpenAI(base_url=f"{guarded}/v1", api_key="secret") as client:
        client.completions.create(**asked)
        for more, status in (
            ({"max_tokens": 9}, 400),
            ({"n": 3}, 400),
            ({"prompt": "a" * 2000}, 413),
        ):
            with pytest.raises(openai.APIStatusError, match="at most [82]|2000 bytes") as caught:
                client.completions.create(**asked | more)
            assert caught.value.status_code == status
    headers = {"Authorization": "Bearer secret", "Content-Type": "application/json"}
    pieces = (b" " * 500 for _ in range(5))  # whose length is not said beforehand
    answer = httpx2.post(f"{guarded}/v1/completions", content=pieces, headers=headers)
    assert answer.status_code == 413 and "2000 bytes" in answer.json()["error"]["message"]
    headers = {"Authorization": "Bearer other", "X-Request-Id": "mine"}
    answer = httpx2.get(f"{guarded}/v1/models", headers=headers)
    assert answer.status_code == 200 and answer.headers["x-request-id"] == "mine"
    for key, status in (("", "401"), ("Authorization: Bearer secret\r\n", "413")):  # never sent
        head = f"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Length: 5000000\r\n{key}\r\n"
        assert _exchange(guarded, head, size=100).split()[1] == status


@pytest.mark.parametrize("reverse", [False, True])
def test_two_lengths_of_a_body_are_refused_and_end_the_connection(url: str, reverse: bool) -> None:
    """RFC 9112, 6.3: the request behind it may be a proxy's part of its body."""
    both = sorted(("Content-Length: 5", "Transfer-Encoding: chunked"), reverse=reverse)
    head = "\r\n".join(("POST /v1/completions HTTP/1.1", "Host: a", *both, "\r\n"))
    behind = "GET /health HTTP/1.1\r\nHost: a\r\n\r\n"
    answer = _exchange(url, f"{head}2\r\n{{}}\r\n0\r\n\r\n{behind}")
    assert answer.startswith("HTTP/1.1 400 ") and answer.count("HTTP/1.1 ") == 1
    assert "connection: close" in answer.lower() and "Transfer-Encoding; send one" in answer


def _exchange(url: str, sent: str, *, half_closes: bool = False, size: int = 10**6) -> str:
    """What comes back, until the server closes the connection or this much is there."""
    address, received = urlsplit(url), b""
    with socket.create_connection((address.hostname, address.port), 20) as connection:
        connection.sendall(sent.encode())
        if half_closes:
            connection.shutdown(socket.SHUT_WR)
        while len(received) < size and (piece := connection.recv(10_000)):
            received += piece
    return received.decode()


def test_numbers_for_prometheus(url: str) -> None:
    complete(url)
    complete(url, prompt=3)
    lines = httpx2.get(f"{url}/metrics").text.splitlines()
    values = dict(line.rsplit(" ", 1) for line in lines if not line.startswith("#"))
    for name in ("prompt_tokens", "generation_tokens", "drafted_tokens"):
        assert float(values[f'foretoken_{name}_total{{model_name="tiny"}}']) > 0
    assert float(values['foretoken_num_requests_running{model_name="tiny"}']) == 0
    assert any("requests_total" in line and 'status="400"' in line for line in lines)


def test_pages_of_named_origins_may_ask(guarded: str) -> None:
    """What a browser asks beforehand needs no key; what it then sends does."""
    asked = {"Origin": "http://a.example", "Access-Control-Request-Method": "POST"}
    answer = httpx2.options(f"{guarded}/v1/completions", headers=asked)
    assert answer.status_code == 200
    assert answer.headers["access-control-allow-origin"] == "http://a.example"
    other = httpx2.options(f"{guarded}/v1/completions", headers=asked | {"Origin": "http://b"})
    assert "access-control-allow-origin" not in other.headers
    assert httpx2.get(f"{guarded}/v1/models", headers=asked).status_code == 401
