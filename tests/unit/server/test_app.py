"""The server as its clients meet it: the official openai package, and plain HTTP for what that
never sends. The texts are those that `generate` gives."""

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
from foretoken.server.access import Access
from foretoken.server.options import ServerOptions
from foretoken.server.process.client import EngineClient, spawn
from served import LOADING, pair, serving, until

SAMPLING: dict[str, Any] = {"model": "tiny", "max_tokens": 24, "seed": 7, "temperature": 1.0}
GREEDY: dict[str, Any] = {"max_tokens": 12, "temperature": 0}
HELLO = [{"role": "user", "content": "Hello"}]


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


@pytest.fixture
def client(url: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client_:
        yield client_


def offline(spec: foretoken.Speculator, prompt: Any, row: int = 0, **options: Any) -> Any:
    sampling = {"temperature": 1.0, "max_new_tokens": 24, "gamma": 2} | options
    return spec.generate([prompt], seed=[(7, row)], **sampling)[0]


def post(url: str, path: str, body: Any) -> httpx2.Response:
    content = body if isinstance(body, str | bytes) else json.dumps(body)
    headers = {"Content-Type": "application/json"}
    return httpx2.post(f"{url}{path}", content=content, headers=headers, timeout=60)


def events(response: Any) -> list[Any]:
    """The data of server-sent events, the last of which says that they are done."""
    lines = [line for line in response.text.split("\n\n") if line]
    assert all(line.startswith("data: ") for line in lines) and lines[-1] == "data: [DONE]"
    return [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]


GAMMA = {"speculation": {"gamma": 2}}


def test_completions_are_what_generate_gives(client: openai.OpenAI, spec: Any) -> None:
    response = client.completions.create(prompt="It was", **SAMPLING, extra_body=GAMMA)
    expected = offline(spec, "It was")
    assert response.choices[0].text == expected.text
    assert response.choices[0].finish_reason == expected.finish_reason
    assert response.usage is not None and response.usage.completion_tokens == len(expected.tokens)
    assert response.usage.prompt_tokens == len(spec.inputs.ids("It was"))


def test_chat_goes_through_the_models_template(client: openai.OpenAI, spec: Any) -> None:
    response = client.chat.completions.create(messages=HELLO, **SAMPLING, extra_body=GAMMA)
    assert response.choices[0].message.content == offline(spec, HELLO).text


def test_parts_of_text_are_one_text(client: openai.OpenAI, spec: Any) -> None:
    parts = [{"type": "text", "text": "Hel"}, {"type": "text", "text": "lo"}]
    messages = [{"role": "user", "content": parts}]
    response = client.chat.completions.create(messages=messages, **SAMPLING, extra_body=GAMMA)
    assert response.choices[0].message.content == offline(spec, HELLO).text


def test_a_stream_concatenates_to_the_answer(client: openai.OpenAI) -> None:
    whole = client.chat.completions.create(
        messages=HELLO, **SAMPLING, logprobs=True, top_logprobs=2, extra_body=GAMMA
    )
    stream = client.chat.completions.create(
        messages=HELLO,
        **SAMPLING,
        logprobs=True,
        top_logprobs=2,
        stream=True,
        stream_options={"include_usage": True},
        extra_body=GAMMA,
    )
    *chunks, last = list(stream)
    choices = [chunk.choices[0] for chunk in chunks]
    assert choices[0].delta.role == "assistant"
    text = "".join(choice.delta.content or "" for choice in choices)
    assert text == whole.choices[0].message.content
    told = [each for c in choices if c.logprobs for each in c.logprobs.content or ()]
    assert whole.choices[0].logprobs is not None
    assert told == whole.choices[0].logprobs.content
    assert choices[-1].finish_reason == whole.choices[0].finish_reason
    assert last.usage == whole.usage and not last.choices


def test_a_stream_tells_its_usage_so_far(client: openai.OpenAI) -> None:
    options: Any = {"include_usage": True, "continuous_usage_stats": True}
    asked = {"return_token_ids": True, **GAMMA}
    stream = client.completions.create(
        prompt="It was", **SAMPLING, stream=True, stream_options=options, extra_body=asked
    )
    *chunks, last = list(stream)
    written = 0
    for chunk in chunks:
        written += len(chunk.choices[0].model_dump()["token_ids"])
        assert chunk.usage is not None and chunk.usage.completion_tokens == written
    assert last.usage == chunks[-1].usage
    chat = client.chat.completions.create(
        messages=HELLO, **SAMPLING, stream=True, stream_options=options, extra_body=GAMMA
    )
    told = [chunk.usage.completion_tokens for chunk in chat if chunk.usage is not None]
    assert len(told) > 2 and told == sorted(told)


def test_several_texts_have_keys_of_their_own(client: openai.OpenAI, spec: Any) -> None:
    response = client.completions.create(
        prompt=["It was", "She"], n=2, **SAMPLING, extra_body=GAMMA
    )
    prompts = ["It was", "It was", "She", "She"]
    expected = [offline(spec, prompt, i).text for i, prompt in enumerate(prompts)]
    assert [choice.text for choice in response.choices] == expected
    assert [choice.index for choice in response.choices] == [0, 1, 2, 3]
    assert len(set(expected)) == 4
    read = len(spec.inputs.ids("It was")) + len(spec.inputs.ids("She"))
    assert response.usage is not None and response.usage.prompt_tokens == read


def test_ids_go_in_and_texts_end_at_stop_strings(client: openai.OpenAI, spec: Any) -> None:
    ids = spec.inputs.ids("It was")
    free = offline(spec, ids).text
    stop = free[5:7]
    response = client.completions.create(prompt=ids, stop=[stop], **SAMPLING, extra_body=GAMMA)
    assert response.choices[0].text == free[: free.index(stop)]
    assert response.choices[0].finish_reason == "stop"


def test_logprobs_are_the_targets(client: openai.OpenAI, spec: Any) -> None:
    response = client.completions.create(prompt="It was", logprobs=2, **SAMPLING, extra_body=GAMMA)
    told, expected = response.choices[0].logprobs, offline(spec, "It was", logprobs=2)
    assert told is not None and told.token_logprobs == pytest.approx(
        [each.logprob for each in expected.logprobs], abs=1e-12
    )
    assert "".join(told.tokens or ()).encode() == b"".join(t.encode() for t in told.tokens or ())
    assert told.text_offset is not None and told.text_offset[0] == 0
    assert told.top_logprobs is not None and told.tokens is not None
    for token, top in zip(told.tokens, told.top_logprobs, strict=True):
        assert token in top and len(top) <= 3  # the two likeliest, and the token itself


def test_a_prompts_logprobs_are_told_as_vllm_does(url: str, spec: Any) -> None:
    ids = spec.inputs.ids("It was")
    expected = offline(spec, ids, prompt_logprobs=2).prompt_logprobs
    more = SAMPLING | {"prompt": ids, "prompt_logprobs": 2}
    logprobs = post(url, "/v1/completions", more).json()["choices"][0]["prompt_logprobs"]
    assert logprobs[0] is None and len(logprobs) == len(ids)
    for token, known, each in zip(ids[1:], expected, logprobs[1:], strict=True):
        own = each[str(token)]
        assert own["logprob"] == pytest.approx(known.logprob) and own["rank"] == known.rank
        likeliest = {str(id): (value, rank) for rank, (id, value) in enumerate(known.top, 1)}
        for id, (value, rank) in likeliest.items():
            assert each[id]["logprob"] == pytest.approx(value) and each[id]["rank"] == rank
        assert set(each) == {*likeliest, str(token)}
    chat = SAMPLING | {"messages": HELLO, "prompt_logprobs": 0}
    told = post(url, "/v1/chat/completions", chat).json()["prompt_logprobs"]
    assert told[0] is None and len(told) == len(spec.inputs.prompts([HELLO])[0])


def test_a_prompt_is_told_again_with_its_logprobs(client: openai.OpenAI, spec: Any) -> None:
    ids = spec.inputs.ids("It was")
    expected = offline(spec, ids, prompt_logprobs=2, logprobs=2)
    known = [*expected.prompt_logprobs, *expected.logprobs]
    for prompt in ("It was", ids):
        asked = SAMPLING | {"prompt": prompt, "echo": True, "logprobs": 2, "extra_body": GAMMA}
        (choice,) = client.completions.create(**asked).choices
        told = choice.logprobs
        assert choice.text == "It was" + expected.text and told is not None
        assert told.token_logprobs is not None and told.top_logprobs is not None
        assert told.token_logprobs[0] is told.top_logprobs[0] is None
        assert told.token_logprobs[1:] == pytest.approx([e.logprob for e in known], abs=1e-12)
        assert "".join(told.tokens or ())[:6] == "It was"
        assert (told.text_offset or [])[len(ids)] == 6
    scored = client.completions.create(**asked | {"max_tokens": 0})  # as evaluations ask
    (choice,) = scored.choices
    assert choice.text == "It was" and scored.usage is not None
    assert scored.usage.completion_tokens == 0
    assert choice.logprobs is not None and len(choice.logprobs.tokens or ()) == len(ids)


def test_parts_of_a_character_have_entries_and_offsets_of_their_own(url: str) -> None:
    """Each its own logprob, by a name of its own, at the place of its character; echoed prompts
    and new text, whole and in streams."""
    text = "It \U0001f327 was \U0001f327é"
    asked: dict[str, Any] = {"prompt": text, "max_tokens": 0, "echo": True, "logprobs": 5}
    (choice,) = post(url, "/v1/completions", {"model": "tiny", **asked}).json()["choices"]
    told = choice["logprobs"]
    assert choice["text"] == text and r"bytes:\xf0\x9f" in told["tokens"]
    own = zip(told["tokens"], told["token_logprobs"], told["top_logprobs"], strict=True)
    for token, logprob, top in [*own][1:]:
        assert top[token] == logprob and len(top) >= 5
    parts = [token for token in told["tokens"] if token.startswith("bytes:")]
    first = told["tokens"].index(parts[0])
    assert told["text_offset"][first : first + 3] == [3] * 3
    assert told["text_offset"][first + 3] == 4 and max(told["text_offset"]) == len(text) - 1
    bias = {str(id): 100 for id in range(130, 256)}  # bytes that are no characters, most of them
    more = SAMPLING | GAMMA | {"prompt": "It", "logprobs": 3, "logit_bias": bias}
    (choice,) = post(url, "/v1/completions", more).json()["choices"]
    offsets = choice["logprobs"]["text_offset"]
    assert offsets == sorted(offsets) and len(choice["text"]) >= offsets[-1]
    assert all(len(top) >= 3 for top in choice["logprobs"]["top_logprobs"])
    chunks = events(post(url, "/v1/completions", more | {"stream": True}))
    assert offsets == [at for c in chunks for at in c["choices"][0]["logprobs"]["text_offset"]]
    chat = SAMPLING | {"messages": HELLO, "logprobs": True, "top_logprobs": 5, "logit_bias": bias}
    (choice,) = post(url, "/v1/chat/completions", chat).json()["choices"]
    for each in choice["logprobs"]["content"]:
        names = [top["token"] for top in each["top_logprobs"]]
        assert len(set(names)) == 5 and "\ufffd" not in names


def test_offsets_end_with_the_text(url: str, spec: Any) -> None:
    """Tokens behind a stop string are told, and their place is the text's end."""
    free = offline(spec, "It was").text
    asked = SAMPLING | GAMMA | {"prompt": "It was", "logprobs": 0, "stop": free[4:9]}
    (choice,) = post(url, "/v1/completions", asked).json()["choices"]
    assert free.startswith(choice["text"]) and len(choice["text"]) <= 4
    offsets = choice["logprobs"]["text_offset"]
    assert max(offsets) == len(choice["text"]) and len(offsets) > len(set(offsets))
    chunks = events(post(url, "/v1/completions", asked | {"stream": True}))
    told = [chunk["choices"][0]["logprobs"]["text_offset"] for chunk in chunks]
    assert told[-1][-1] == len(choice["text"])


def test_a_schema_is_kept_to(client: openai.OpenAI) -> None:
    schema = {
        "type": "object",
        "properties": {"good": {"type": "boolean"}},
        "required": ["good"],
        "additionalProperties": False,
    }
    sampling = SAMPLING | {"max_tokens": 60}
    asked = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    response = client.chat.completions.create(messages=HELLO, **sampling, response_format=asked)
    assert isinstance(json.loads(response.choices[0].message.content or "")["good"], bool)


def test_a_prediction_saves_calls_and_is_counted(client: openai.OpenAI, spec: Any) -> None:
    """Right, in parts, wrong; streamed, several at once; of digits, whose text has one spelling,
    and coupled, so that a seed gives one text whatever is guessed."""
    digits = {str(id): 100 for id in spec.tokenizer("0123456789").input_ids}
    sampling = SAMPLING | {"max_tokens": 40, "messages": HELLO, "logit_bias": digits}

    def told(prediction: Any = None, **more: Any) -> Any:
        speculation = {"gamma": 4, "rule": "coupled", "steps": True}
        asked: dict[str, Any] = {} if prediction is None else {"prediction": prediction}
        asked |= {"extra_body": {"speculation": speculation}}
        return client.chat.completions.create(**sampling, **asked, **more)

    plain = told()
    text = plain.choices[0].message.content
    counted = plain.usage.completion_tokens_details
    assert counted.accepted_prediction_tokens == counted.rejected_prediction_tokens == 0
    assert len(text) == 40 and text.isdigit()

    parts = [{"type": "text", "text": text[:9]}, {"type": "text", "text": text[9:]}]
    for content in (text, parts):
        done = told({"type": "content", "content": content})
        assert done.choices[0].message.content == text
        assert done.usage.completion_tokens == plain.usage.completion_tokens == 40
        counted = done.usage.completion_tokens_details
        assert (counted.accepted_prediction_tokens, counted.rejected_prediction_tokens) == (31, 0)
        assert done.speculation["target_calls"] == 9 and done.speculation["draft_calls"] == 0

    wrong = told({"type": "content", "content": "none" + text[20:30] + "x" + text[20:]})
    assert wrong.choices[0].message.content == text
    counted = wrong.usage.completion_tokens_details
    predicted = [step for step in wrong.speculation["steps"][0] if step["predicted"]]
    kept = [token["source"] for step in predicted for token in step["tokens"]].count("accepted")
    rejected = sum(len(step["rejected"]) for step in predicted)
    assert counted.accepted_prediction_tokens == kept > 8
    assert counted.rejected_prediction_tokens == rejected >= 4
    assert wrong.usage.completion_tokens == 40

    options = {"n": 2, "stream": True, "stream_options": {"include_usage": True}}
    *chunks, last = list(told({"type": "content", "content": text}, **options))
    own = [c.choices[0].delta.content or "" for c in chunks if c.choices[0].index == 0]
    assert "".join(own) == text
    assert last.usage.completion_tokens_details.accepted_prediction_tokens >= 31
    assert last.usage.completion_tokens == 80


def test_a_prediction_beside_a_grammar(client: openai.OpenAI) -> None:
    asked = SAMPLING | {"prompt": "It was", "max_tokens": 60}
    more = {"structured_outputs": {"regex": "(xyz ){9}"}, "speculation": {"gamma": 4}}
    prediction = {"type": "content", "content": "xyz xyz xyz nothing more"}
    response = client.completions.create(**asked, extra_body={**more, "prediction": prediction})
    assert response.choices[0].text == "xyz " * 9 and response.usage is not None
    counted = response.usage.completion_tokens_details
    assert counted is not None and counted.accepted_prediction_tokens


def test_responses(client: openai.OpenAI, spec: Any) -> None:
    sampling = {"model": "tiny", "temperature": 1.0, "max_output_tokens": 24}
    more = {"extra_body": GAMMA | {"seed": 7}}
    response = client.responses.create(input="Hello", **sampling, **more)
    expected = offline(spec, HELLO)
    assert response.output_text == expected.text
    assert response.status == ("incomplete" if expected.finish_reason == "length" else "completed")
    assert response.usage is not None and response.usage.output_tokens == len(expected.tokens)
    events = list(client.responses.create(input="Hello", stream=True, **sampling, **more))
    deltas = [event.delta for event in events if event.type == "response.output_text.delta"]
    assert "".join(deltas) == expected.text
    assert [event.sequence_number for event in events] == list(range(len(events)))
    last = events[-1]
    assert last.type in ("response.completed", "response.incomplete")
    assert last.response.output_text == expected.text and last.response.usage == response.usage


def test_models(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["tiny"]
    assert client.models.retrieve("tiny").owned_by == "foretoken"
    with pytest.raises(openai.NotFoundError, match="'other' is not served here"):
        client.models.retrieve("other")


def test_tokens_and_back(url: str, spec: Any) -> None:
    answer = post(url, "/tokenize", {"prompt": "It was", "return_token_strs": True}).json()
    assert answer["tokens"] == spec.inputs.ids("It was")
    assert answer["count"] == len(answer["tokens"])
    assert "".join(answer["token_strs"]).endswith("was")
    assert post(url, "/detokenize", {"tokens": answer["tokens"]}).json() == {"prompt": "It was"}
    chat = post(url, "/tokenize", {"messages": HELLO}).json()
    assert chat["tokens"] == spec.inputs.prompts([HELLO])[0]


def test_steps_are_told_to_who_asks(url: str, spec: Any) -> None:
    asked = SAMPLING | {
        "prompt": "It was",
        "stream": True,
        "stream_options": {"include_usage": True},
        "speculation": {"gamma": 3, "steps": True},
    }
    *chunks, last = events(post(url, "/v1/completions", asked))
    steps = [step for chunk in chunks for step in chunk["speculation"]["steps"]]
    expected = offline(spec, "It was", gamma=3)
    kept = [[token["id"] for token in step["tokens"]] for step in steps]
    assert kept == [list(step.kept) for step in expected.steps]
    for step, record in zip(steps, expected.steps, strict=True):
        rejected = record.guesses[record.accepted :]
        assert [token["id"] for token in step["rejected"]] == list(rejected)
        sources = [token["source"] for token in step["tokens"]]
        whole = len(record.kept) == record.accepted + 1
        assert sources[: record.accepted] == ["accepted"] * min(record.accepted, len(sources))
        if whole:
            mine = "plain" if not record.guesses else "corrected" if rejected else "bonus"
            assert sources[-1] == mine
    assert last["speculation"]["target_calls"] == len(expected.steps)
    assert last["speculation"]["accepted"] == expected.stats.accepted


def test_what_speculation_does_now(url: str) -> None:
    post(url, "/v1/completions", SAMPLING | {"prompt": "It was"} | GAMMA)
    answer = httpx2.get(f"{url}/v1/speculation").json()
    assert (answer["target"], answer["draft"]) == ("target", "draft")  # not where they lie
    assert answer["active"] is True and answer["chat"] is True
    assert 0 <= answer["alpha"] <= 1 and answer["tokens_per_call"] >= 1
    assert answer["acceptance_by_position"] and answer["running"] == answer["waiting"] == 0
    assert {"c", "v", "predicted_speedup"} <= answer.keys()


def expanded(value: Any) -> Any:
    """A value of `bad_requests.json`: {"repeat": "a", "times": 9} stands for nine of them."""
    if isinstance(value, dict):
        if value.keys() == {"repeat", "times"}:
            return value["repeat"] * value["times"]
        return {name: expanded(each) for name, each in value.items()}
    return [expanded(each) for each in value] if isinstance(value, list) else value


BAD_REQUESTS = json.loads(Path(__file__).with_name("bad_requests.json").read_text())


@pytest.mark.parametrize("path", BAD_REQUESTS)
def test_bad_requests_name_their_field(url: str, path: str) -> None:
    """As `param`, and in one line; streams are refused before they begin."""
    for param, body in BAD_REQUESTS[path]:
        for more in ({}, {"stream": True})[: 1 + path.endswith("completions")]:
            answer = post(url, path, expanded(body) | more)
            error = answer.json()["error"]
            assert answer.status_code == (404 if param == "model" else 400), error
            assert error["type"] == "invalid_request_error" and "\n" not in error["message"]
            assert error["param"] == param or more.keys() & body.keys(), (body, error)


@pytest.mark.parametrize("body", [{"prompt": "\ud800"}, {"\ud800": 1}])
def test_text_that_no_json_holds(url: str, body: Any) -> None:
    answer = post(url, "/v1/completions", body)
    assert answer.status_code == 400 and answer.json()["error"]["param"] is None


def test_a_role_is_told_with_those_that_there_are(url: str, spec: Any) -> None:
    messages = [{"role": "robot", "content": "a"}]
    said = "has the role 'robot'; give one of system, developer, user, assistant, tool, function"
    answer = post(url, "/v1/chat/completions", {"messages": messages})
    assert said in answer.json()["error"]["message"]
    with pytest.raises(InputError, match=said):
        spec.generate(messages)
    answer = post(url, "/v1/responses", {"input": messages})
    assert "input[0].role: it must be one of 'system', 'dev" in answer.json()["error"]["message"]


def test_a_call_of_a_tool_has_no_content(url: str, spec: Any) -> None:
    calls = [{"id": "a", "type": "function", "function": {"name": "look", "arguments": "{}"}}]
    called = {"role": "assistant", "content": None, "tool_calls": calls, "refusal": None}
    messages = [*HELLO, called, {"role": "tool", "tool_call_id": "a", "content": "sea"}]
    empty = [*HELLO, called | {"content": ""}, messages[2]]
    answer = post(url, "/v1/chat/completions", {"messages": messages, **GREEDY})
    assert answer.status_code == 200, answer.text
    expected = spec.generate(empty, max_new_tokens=GREEDY["max_tokens"])
    assert answer.json()["choices"][0]["message"]["content"] == expected[0].text
    assert spec.generate(messages, max_new_tokens=4)[0].tokens == expected[0].tokens[:4]


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ("", "send a JSON object"),
        ("{", "the body is not valid JSON: "),
        ("[]", "object"),
        ("null", "object"),
        ('{"prompt": NaN}', "the body is not valid JSON: "),
        ("[" * 100_000, "the body is not valid JSON: it is nested too deeply; flatten it"),
        (b"\xff", "the body is not valid JSON: it is not in UTF-8; encode it so"),
        ('{"seed": ' + "1" * 5000 + "}", "is not valid JSON: Exceeds the limit (4300 digits)"),
    ],
)
def test_what_is_no_json_object(url: str, body: str | bytes, said: str) -> None:
    answer = post(url, "/v1/completions", body)
    assert answer.status_code == 400 and said in answer.json()["error"]["message"], answer.text


def test_what_is_nested_too_deeply(url: str) -> None:
    deep = "[" * 900 + "]" * 900
    body = '{"messages": [{"role": "user", "content": "a"}], "chat_template_kwargs": {"a": %s}}'
    for path in ("/v1/chat/completions", "/tokenize"):
        answer = post(url, path, body % deep)
        error = answer.json()["error"]
        assert answer.status_code == 400 and "nested too deeply" in error["message"]
        assert error["param"] == "chat_template_kwargs"


def test_errors_reach_the_official_client(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.completions.create(prompt=[5] * 1100, **SAMPLING)
    assert caught.value.code == "context_length_exceeded"
    with pytest.raises(openai.NotFoundError) as missing:
        client.completions.create(prompt="a", **SAMPLING | {"model": "gpt"})
    assert missing.value.code == "model_not_found"


def test_paths_and_methods_that_are_not_there(url: str) -> None:
    missing = httpx2.get(f"{url}/v1/embeddings")
    assert missing.status_code == 404 and "there is no /v1/embeddings" in missing.text
    assert httpx2.get(f"{url}/v1/completions").status_code == 405


def test_a_client_that_goes_away_frees_its_row(server: tuple[str, EngineClient]) -> None:
    """Long before its text is done: 900 tokens take seconds."""
    url, link = server
    before = httpx2.get(f"{url}/v1/speculation").json()["tokens"]
    long = SAMPLING | {"prompt": "It was", "max_tokens": 900, "ignore_eos": True, "stream": True}
    for stream in (True, False):
        with httpx2.Client(timeout=60) as client:
            with pytest.raises((httpx2.ReadTimeout, StopIteration)):
                body = long | {"stream": stream}
                with client.stream("POST", f"{url}/v1/completions", json=body, timeout=0.5) as s:
                    for n, _ in enumerate(s.iter_lines()):
                        if n > 4:
                            raise StopIteration
        until(lambda: not link.running and not link.open)
    answer = httpx2.get(f"{url}/v1/speculation").json()
    assert answer["running"] == 0 and answer["tokens"] - before < 900


def test_a_full_queue(folders: tuple[str, str]) -> None:
    long = {"prompt": "a", "max_tokens": 300, "ignore_eos": True, "temperature": 1.0}
    with serving(*folders, max_rows=1, max_waiting=1) as (url, _), ThreadPoolExecutor(6) as pool:
        answers = list(pool.map(lambda _: post(url, "/v1/completions", long), range(6)))
    codes = {answer.status_code for answer in answers}
    assert codes == {200, 429}
    refused = next(answer for answer in answers if answer.status_code == 429)
    assert refused.json()["error"]["type"] == "rate_limit_error"
    assert "send the request again later" in refused.json()["error"]["message"]
    assert int(refused.headers["retry-after"]) >= 1


@pytest.mark.prove
def test_an_engine_that_dies_is_started_again(folders: tuple[str, str]) -> None:
    long = {"prompt": "a", "max_tokens": 900, "ignore_eos": True, "temperature": 1.0}
    with serving(*folders, begin=spawn) as (url, link), ThreadPoolExecutor(2) as pool:
        whole = pool.submit(post, url, "/v1/completions", long)
        streamed = pool.submit(post, url, "/v1/completions", long | {"stream": True})
        until(lambda: link.running == 2)
        os.kill(link.info.pid, signal.SIGKILL)
        answer = whole.result()
        assert answer.status_code == 503 and answer.headers["retry-after"]
        assert answer.json()["error"]["code"] == "engine_stopped"
        *_, last = streamed.result().text.strip().split("\n\n")
        assert json.loads(last.removeprefix("data: "))["error"]["code"] == "engine_stopped"
        until(lambda: link.state == "restarting")
        asked = httpx2.get(f"{url}/v1/speculation")  # whose facts would be of the engine before
        for now in (post(url, "/v1/completions", long), asked):
            assert now.status_code == 503 and now.headers["retry-after"]
        until(lambda: link.state == "ready")
        again = post(url, "/v1/completions", long | {"max_tokens": 3})
        assert again.status_code == 200 and link.restarts == 1


def test_a_model_that_cannot_be_loaded(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="nowhere"):
        with serving(str(tmp_path / "nowhere"), None, begin=spawn):
            pass


@pytest.fixture(scope="module")
def guarded(folders: tuple[str, str]) -> Iterator[str]:
    """A server with keys and bounds, for pages of one origin."""
    keys, origins = ("secret", "other"), ("http://a.example",)
    settings = ServerOptions(
        "tiny",
        max_body=2000,
        max_tokens=8,
        max_texts=2,
        api_key=keys,
        allowed_origin=origins,
        drain=1.0,
    )
    with serving(*folders, settings) as (address, _):
        yield address


def test_a_key_has_a_salt_of_its_own() -> None:
    keys = ("one", "two")
    salts = {Access(keys).salt(key) for key in keys}
    assert len(salts) == 2 and None not in salts
    assert "one" not in "".join(str(each) for each in salts)
    for wrong in ("", "on", "one "):
        assert Access(keys).salt(wrong) is None
    assert Access(("clé",)).salt("clé".encode().decode("latin-1")) is not None
    assert Access().salt("") == ""


def test_keys_and_bounds(guarded: str) -> None:
    url = guarded
    assert httpx2.get(f"{url}/health").status_code == 200
    assert httpx2.get(f"{url}/v1/models").status_code == 401
    assert post(url, "/tokenize", {"prompt": "a"}).status_code == 401
    asked = {"prompt": "a", "max_tokens": 4}
    with openai.OpenAI(base_url=f"{url}/v1", api_key="wrong") as client:
        with pytest.raises(openai.AuthenticationError):
            client.completions.create(model="tiny", **asked)
    with openai.OpenAI(base_url=f"{url}/v1", api_key="secret") as client:
        client.completions.create(model="tiny", **asked)
        with pytest.raises(openai.BadRequestError, match="at most 8"):
            client.completions.create(model="tiny", prompt="a", max_tokens=9)
        with pytest.raises(openai.BadRequestError, match="at most 2"):
            client.completions.create(model="tiny", n=3, **asked)
        with pytest.raises(openai.APIStatusError) as caught:
            client.completions.create(model="tiny", prompt="a" * 2000)
    assert caught.value.status_code == 413
    headers = {"Authorization": "Bearer secret", "Content-Type": "application/json"}
    pieces = (b" " * 500 for _ in range(5))  # whose length is not said beforehand
    answer = httpx2.post(f"{url}/v1/completions", content=pieces, headers=headers)
    assert (
        answer.status_code == 413
        and "larger than the 2000 bytes" in answer.json()["error"]["message"]
    )
    headers = {"Authorization": "Bearer other", "X-Request-Id": "mine"}
    answer = httpx2.get(f"{url}/v1/models", headers=headers)
    assert answer.status_code == 200 and answer.headers["x-request-id"] == "mine"


def test_a_key_is_asked_for_before_a_body_is_read(guarded: str) -> None:
    """Nor do the document and what is not there tell anything without one."""
    for answer in (post(guarded, "/v1/completions", "{"), httpx2.get(f"{guarded}/openapi.json")):
        assert answer.status_code == 401 and answer.json()["error"]["code"] == "invalid_api_key"
        assert answer.headers["x-request-id"]
    assert httpx2.get(f"{guarded}/nowhere").status_code == 401
    for key, status in (("", 401), ("secret", 413)):
        assert _announced(guarded, key, 5_000_000) == status


def _announced(url: str, key: str, size: int) -> int:
    """Status of the answer to a body that is announced, and not sent."""
    address = urlsplit(url)
    with socket.create_connection((address.hostname, address.port), 20) as connection:
        head = f"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Length: {size}\r\n"
        head += f"Authorization: Bearer {key}\r\n" if key else ""
        connection.sendall(f"{head}\r\n".encode())
        return int(connection.recv(100).split()[1])


BOTH = "Content-Length: 5\r\nTransfer-Encoding: chunked"


@pytest.mark.parametrize("order", [BOTH, "\r\n".join(BOTH.split("\r\n")[::-1])])
def test_two_lengths_of_a_body_are_refused_and_end_the_connection(url: str, order: str) -> None:
    """RFC 9112, 6.3: the request behind it may be a proxy's part of its body."""
    head = f"POST /v1/completions HTTP/1.1\r\nHost: a\r\n{order}\r\n\r\n"
    behind = "GET /health HTTP/1.1\r\nHost: a\r\n\r\n"
    answer = _exchange(url, f"{head}2\r\n{{}}\r\n0\r\n\r\n{behind}")
    assert answer.startswith("HTTP/1.1 400 ") and answer.count("HTTP/1.1 ") == 1
    assert "connection: close" in answer.lower() and "Transfer-Encoding; send one" in answer


def test_a_client_that_closes_its_sending_half_is_gone(
    server: tuple[str, EngineClient],
) -> None:
    """As docs/serving.md says: it cannot be told from one that is gone altogether."""
    url, link = server
    body = json.dumps(GREEDY | {"prompt": "It", "max_tokens": 1000, "ignore_eos": True})
    head = "POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\n"
    asked = f"{head}Content-Length: {len(body)}\r\n\r\n{body}"
    assert _exchange(url, asked, half_closes=True) == ""
    until(lambda: not link.open)


def _exchange(url: str, sent: str, *, half_closes: bool = False) -> str:
    """All that comes back, until the server closes the connection."""
    address, received = urlsplit(url), b""
    with socket.create_connection((address.hostname, address.port), 20) as connection:
        connection.sendall(sent.encode())
        if half_closes:
            connection.shutdown(socket.SHUT_WR)
        while piece := connection.recv(10_000):
            received += piece
    return received.decode()


def test_numbers_for_prometheus(url: str) -> None:
    post(url, "/v1/completions", SAMPLING | {"prompt": "It was"} | GAMMA)
    lines = httpx2.get(f"{url}/metrics").text.splitlines()
    values = dict(line.rsplit(" ", 1) for line in lines if not line.startswith("#"))
    for name in ("prompt_tokens", "generation_tokens", "drafted_tokens"):
        assert float(values[f'foretoken_{name}_total{{model_name="tiny"}}']) > 0
    assert float(values['foretoken_num_requests_running{model_name="tiny"}']) == 0
    post(url, "/v1/completions", {"prompt": 3})
    lines = httpx2.get(f"{url}/metrics").text.splitlines()
    assert any("requests_total" in line and 'status="400"' in line for line in lines)


def test_pages_of_named_origins_may_ask(guarded: str) -> None:
    """What a browser asks beforehand needs no key; what it then sends does."""
    url = guarded
    asked = {"Origin": "http://a.example", "Access-Control-Request-Method": "POST"}
    answer = httpx2.options(f"{url}/v1/completions", headers=asked)
    assert answer.status_code == 200
    assert answer.headers["access-control-allow-origin"] == "http://a.example"
    other = httpx2.options(f"{url}/v1/completions", headers=asked | {"Origin": "http://b"})
    assert "access-control-allow-origin" not in other.headers
    assert httpx2.get(f"{url}/v1/models", headers=asked).status_code == 401
