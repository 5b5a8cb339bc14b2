"""What a server tells of a text is the same at every gamma, whole and in streams: a model that
writes what its prompt names, with a draft that is often right."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from typing import Any

import httpx2
import pytest

from engines import Threaded
from foretoken import Speculator
from foretoken.drafters.lm import LMDrafter
from foretoken.generation_config import EndTokens
from foretoken.server.options import ServerOptions
from foretoken.server.process.client import Child
from foretoken.server.process.messages import EngineSetup
from served import TEMPLATE, serving_all
from table import TableModel
from tiny import byte_level

V = 320
TOKENIZER = byte_level()
TOKENIZER.chat_template = TEMPLATE + "{% if false %}<think>\n</think>{% endif %}"
MARK = TOKENIZER("<assistant>").input_ids
CALL = '<tool_call>\n{"name": "now", "arguments": {"zone": "\U0001f327 sea"}}\n</tool_call>'
SCRIPTS = {
    "plain": "It was \U0001f327\U0001f327 the sea, and the end of the é day\n\nof the captain",
    "thoughts": "<think>\nso \U0001f327 it\n</think>\n\nthe sea \U0001f327 was\nthe day",
    "endless": "<think>\nso \U0001f327 it is, and the captain said that it was the sea",
    "call": f"the sea \U0001f327\n{CALL}",
    "calls": f"<think>\nso it\n</think>\n\n{CALL}\n{CALL}",
    "text behind": f"so\n{CALL}\nthe sea \U0001f327 was",
}
GAMMAS = (0, 2, 8, 20)
TOOLS = [{"type": "function", "function": {"name": "now"}}]


def written(text: tuple[int, ...]) -> int:
    """The next token of the script that the prompt names; the end behind it."""
    start = max(i for i in range(len(text)) if list(text[i : i + len(MARK)]) == MARK)
    asked = TOKENIZER.decode(list(text[:start])).rsplit("<user>")[-1].strip()
    script = TOKENIZER(SCRIPTS[asked]).input_ids
    done = len(text) - start - len(MARK)
    return script[done] if done < len(script) else 0


def distribution(text: tuple[int, ...]) -> list[float]:
    """Most on the script, and more on greater ids: no two are equal."""
    weights = [1e-5 * (1 + id) for id in range(V)]
    weights[written(text)] = 2.0
    total = sum(weights)
    return [weight / total for weight in weights]


def guessed(text: tuple[int, ...]) -> list[float]:
    """As the target, and wrong at every seventh token."""
    return distribution(text) if len(text) % 7 else [1 / V] * V


def begin(setup: EngineSetup) -> Child:
    target = TableModel(distribution, V, context=2000)
    draft = LMDrafter(TableModel(guessed, V), V)
    spec = Speculator(target, draft, TOKENIZER, EndTokens(frozenset({0})))
    engine = Threaded(setup, spec=spec)
    return Child(engine, engine.pipe)


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    settings = ServerOptions("tiny", drain=1.0)
    setup = EngineSetup(None, None, engine={"max_rows": 4})
    with serving_all({"tiny": setup}, settings, begin) as (url, _):
        yield url


def post(url: str, path: str, body: dict[str, Any]) -> httpx2.Response:
    response = httpx2.post(f"{url}/v1/{path}", json={"model": "tiny", **body}, timeout=300)
    assert response.status_code == 200, response.text
    return response


def events(response: httpx2.Response) -> list[dict[str, Any]]:
    lines = [line[6:] for line in response.text.splitlines() if line.startswith("data: ")]
    return [json.loads(line) for line in lines if line != "[DONE]"]


WITH_USAGE: dict[str, Any] = {"completions": {}, "responses": {}}
WITH_USAGE["chat/completions"] = {"stream_options": {"include_usage": True}}


def told(answer: Any) -> Any:
    """An answer without what is new each time, or is about draft tokens."""
    names = {"id", "created", "created_at", "call_id", "item_id", "speculation", "sequence_number"}
    names |= {"accepted_prediction_tokens", "rejected_prediction_tokens"}
    if isinstance(answer, list):
        return [told(each) for each in answer]
    if isinstance(answer, dict):
        return {name: told(value) for name, value in answer.items() if name not in names}
    return pytest.approx(answer, abs=1e-9) if isinstance(answer, float) else answer


def streamed_chat(chunks: list[dict[str, Any]]) -> dict[str, Any]:
    """A chat's whole message, of its chunks."""
    text, thoughts, calls, logprobs = "", "", dict[int, dict[str, str]](), list[Any]()
    reason = None
    for chunk in chunks:
        for choice in chunk["choices"]:
            delta = choice["delta"]
            text += delta.get("content") or ""
            thoughts += delta.get("reasoning_content", "")
            for call in delta.get("tool_calls", ()):
                whole = calls.setdefault(call["index"], {"name": "", "arguments": ""})
                for name, value in call["function"].items():
                    whole[name] += value
            logprobs += (choice["logprobs"] or {"content": []})["content"]
            reason = choice["finish_reason"] or reason
    parts = {"text": text, "thoughts": thoughts, "calls": [*calls.values()]}
    return parts | {"logprobs": logprobs, "reason": reason, "usage": chunks[-1]["usage"]}


def whole_chat(body: dict[str, Any]) -> dict[str, Any]:
    (choice,) = body["choices"]
    message = choice["message"]
    parts = {"text": message["content"] or "", "thoughts": message.get("reasoning_content", "")}
    calls = [call["function"] for call in message.get("tool_calls", ())]
    logprobs = (choice["logprobs"] or {"content": []})["content"]
    parts |= {"calls": calls, "logprobs": logprobs}
    return parts | {"reason": choice["finish_reason"], "usage": body["usage"]}


OPTIONS: dict[str, dict[str, Any]] = {
    "all": {},
    "cut": {"max_tokens": 31},
    "stopped": {"stop": ["the end", "the sea \U0001f327", "captain said"]},
    "stopped late": {"stop": ["the", "so", "\n"], "min_tokens": 14},
    "stopped and kept": {"stop": [" \U0001f327", "sea"], "include_stop_str_in_output": True},
}


def cases(scripts: Iterable[str], always: set[tuple[str, str]]) -> Any:
    """Every script with every option, those that run `always` and others that prove."""
    pairs = [(script, options) for script in scripts for options in OPTIONS]
    marks = {pair: () if pair in always else (pytest.mark.prove,) for pair in pairs}
    named = [pytest.param(*pair, id="-".join(pair), marks=marks[pair]) for pair in pairs]
    return pytest.mark.parametrize(("script", "options"), named)


def same(url: str, path: str, asked: dict[str, Any], streamed: Any, whole: Any) -> Any:
    """The answer, which is the same at every gamma but for what is about draft tokens, and whose
    stream comes to the same by these two readings."""
    answers: list[Any] = []
    for gamma in GAMMAS:
        asked["speculation"] = {"gamma": gamma}
        answers.append(post(url, path, asked).json())
        chunks = events(post(url, path, asked | {"stream": True, **WITH_USAGE[path]}))
        assert told(streamed(chunks)) == told(whole(answers[-1]))
    assert all(told(other) == told(answers[0]) for other in answers[1:])
    return answers[0]


@cases(SCRIPTS, {("thoughts", "all")})
def test_a_chat_is_the_same_at_every_gamma(url: str, script: str, options: str) -> None:
    asked = {"messages": [{"role": "user", "content": script}], "temperature": 0, "logprobs": True}
    asked |= {"max_tokens": 200, "tools": TOOLS, "top_logprobs": 2, **OPTIONS[options]}
    answer = same(url, "chat/completions", asked, streamed_chat, whole_chat)
    assert answer["usage"]["completion_tokens"] == len(whole_chat(answer)["logprobs"])


@cases(["plain", "call"], {("plain", "stopped")})
def test_a_continuation_is_the_same_at_every_gamma(url: str, script: str, options: str) -> None:
    asked = {"prompt": f"{script}<assistant>", "temperature": 0, "logprobs": 2, "max_tokens": 200}

    def streamed(chunks: list[dict[str, Any]]) -> dict[str, Any]:
        choices = [choice for chunk in chunks for choice in chunk["choices"]]
        reasons = [choice["finish_reason"] for choice in choices]
        assert reasons[:-1] == [None] * (len(choices) - 1)
        logprobs = {
            name: [each for choice in choices for each in choice["logprobs"][name]]
            for name in choices[0]["logprobs"]
        }
        text = "".join(choice["text"] for choice in choices)
        return {"text": text, "logprobs": logprobs, "reason": reasons[-1]}

    def whole(answer: dict[str, Any]) -> dict[str, Any]:
        (choice,) = answer["choices"]
        parts = {"text": choice["text"], "logprobs": choice["logprobs"]}
        return parts | {"reason": choice["finish_reason"]}

    same(url, "completions", asked | OPTIONS[options], streamed, whole)


@pytest.mark.parametrize("limit", [pytest.param(31, marks=pytest.mark.prove), 200])
@pytest.mark.parametrize(
    "script", [x if x == "thoughts" else pytest.param(x, marks=pytest.mark.prove) for x in SCRIPTS]
)
def test_a_response_is_the_same_at_every_gamma(url: str, script: str, limit: int) -> None:
    """And the logprobs of a message are those of its text."""
    tools = [{"type": "function", "name": "now"}]
    asked = {"input": script, "temperature": 0, "top_logprobs": 1, "tools": tools}
    asked |= {"max_output_tokens": limit}
    answer = same(url, "responses", asked, lambda sent: sent[-1]["response"], lambda body: body)
    for item in answer["output"]:
        if item["type"] == "message":
            (part,) = item["content"]
            spelled = b"".join(bytes(each["bytes"]) for each in part["logprobs"])
            assert part["text"].strip() in spelled.decode(errors="replace")
            assert b"think" not in spelled and b"zone" not in spelled


def test_tokens_of_thoughts_are_counted_one_by_one(url: str) -> None:
    """Those that begin, make and end the thoughts, whatever block they came in."""
    thoughts = SCRIPTS["thoughts"].partition("</think>")[0]
    counts = len(TOKENIZER(thoughts).input_ids) - len(TOKENIZER("<think").input_ids)
    counts += len(TOKENIZER("</think>").input_ids)
    asked: dict[str, Any] = {"messages": [{"role": "user", "content": "thoughts"}]}
    for gamma in GAMMAS:
        more = {"temperature": 0, "max_tokens": 200, "speculation": {"gamma": gamma}}
        usage = post(url, "chat/completions", asked | more).json()["usage"]
        assert usage["completion_tokens_details"]["reasoning_tokens"] == counts
