"""Tools, thoughts and ids as clients of a server meet them: the official openai package. A tiny
random model writes nothing of use by itself; what it is forced to write is what is tested."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import jsonschema
import openai
import pytest

from foretoken.server.options import ServerOptions
from served import TEMPLATE, pair, serving

WEATHER = {
    "type": "object",
    "properties": {"city": {"enum": ["Rome", "Oslo"]}, "days": {"type": "integer", "maximum": 9}},
    "required": ["city", "days"],
    "additionalProperties": False,
}
TOOLS: Any = [
    {"type": "function", "function": {"name": "weather", "parameters": WEATHER}},
    {"type": "function", "function": {"name": "now"}},
]
ASK: Any = [{"role": "user", "content": "Hello"}]
SAMPLING: Any = {"model": "tiny", "max_tokens": 160, "seed": 7, "temperature": 1.0}
FORMS = ["hermes", "qwen3-coder", "glm", "mistral-list", "lfm2", "llama-json", "llama-pythonic"]
NAMED: Any = {"type": "function", "function": {"name": "weather"}}


@pytest.fixture(scope="module", params=FORMS)
def served(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[openai.OpenAI]:
    folders = pair(tmp_path_factory.mktemp("tools"), TEMPLATE)
    settings = ServerOptions("tiny", drain=1.0, tool_parser=request.param)
    with (
        serving(*folders, settings) as (url, _),
        openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client,
    ):
        yield client


def streamed(chunks: Any) -> tuple[str, dict[int, list[str]], str]:
    """A stream's text, calls (id, name, arguments) by index, and why it ended."""
    text, calls, reason = "", dict[int, list[str]](), ""
    for chunk in chunks:
        (choice,) = chunk.choices
        text += choice.delta.content or ""
        for call in choice.delta.tool_calls or ():
            if call.index not in calls:
                assert call.id and call.function.name
                calls[call.index] = [call.id, call.function.name, ""]
            else:
                assert call.id is None and call.function.name is None
            calls[call.index][2] += call.function.arguments or ""
        reason = choice.finish_reason or reason
    return text, calls, reason


@pytest.mark.parametrize("guesses", [0, 3])
def test_a_named_function_is_called(served: openai.OpenAI, guesses: int) -> None:
    """The same call whole and in pieces, and with draft tokens or without."""
    asked: Any = {"messages": ASK, "tools": TOOLS, "tool_choice": NAMED, **SAMPLING}
    asked["extra_body"] = {"speculation": {"gamma": guesses, "rule": "coupled"}}
    done = served.chat.completions.create(**asked).choices[0]
    (call,) = done.message.tool_calls or ()
    assert done.finish_reason == "tool_calls" and done.message.content is None
    assert call.type == "function" and call.function.name == "weather"
    jsonschema.validate(json.loads(call.function.arguments), WEATHER)
    text, calls, reason = streamed(served.chat.completions.create(stream=True, **asked))
    assert (text, reason) == ("", "tool_calls")
    ((_, name, arguments),) = calls.values()
    assert (name, json.loads(arguments)) == ("weather", json.loads(call.function.arguments))
    plain = {**asked, "extra_body": {"speculation": {"gamma": 0, "rule": "coupled"}}}
    other = served.chat.completions.create(**plain).choices[0].message.tool_calls
    assert other and other[0].function == call.function


def test_some_function_is_called(served: openai.OpenAI) -> None:
    done = served.chat.completions.create(
        messages=ASK, tools=TOOLS, tool_choice="required", parallel_tool_calls=False, **SAMPLING
    )
    (call,) = done.choices[0].message.tool_calls or ()
    assert call.type == "function" and call.function.name in ("weather", "now")


def test_the_loop_of_an_agent(served: openai.OpenAI) -> None:
    """A call, what it gave, and an answer; in chats and in responses."""
    done = served.chat.completions.create(messages=ASK, tools=TOOLS, tool_choice=NAMED, **SAMPLING)
    message = done.choices[0].message
    assert message.tool_calls
    told: Any = {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "sunny"}
    again = served.chat.completions.create(
        messages=[*ASK, message.model_dump(exclude_none=True), told], tools=TOOLS, **SAMPLING
    )
    assert again.choices[0].finish_reason in ("stop", "length")

    sampling: Any = {"model": "tiny", "temperature": 1.0, "extra_body": {"seed": 7}}
    tools: Any = [{"type": "function", **tool["function"]} for tool in TOOLS]
    choice: Any = {"type": "function", "name": "weather"}
    response = served.responses.create(
        input="Hello", tools=tools, tool_choice=choice, max_output_tokens=160, **sampling
    )
    (call,) = response.output
    assert call.type == "function_call" and call.name == "weather"
    jsonschema.validate(json.loads(call.arguments), WEATHER)
    output: Any = {"type": "function_call_output", "call_id": call.call_id, "output": "sunny"}
    items: Any = [*ASK, call.model_dump(exclude_none=True), output]
    answer = served.responses.create(input=items, tools=tools, max_output_tokens=9, **sampling)
    assert answer.output[0].type == "message"
    events = list(
        served.responses.create(
            input="Hello",
            tools=tools,
            tool_choice=choice,
            max_output_tokens=160,
            stream=True,
            **sampling,
        )
    )
    pieces = [e.delta for e in events if e.type == "response.function_call_arguments.delta"]
    assert json.loads("".join(pieces)) == json.loads(call.arguments)
    (last,) = [e.response for e in events if e.type == "response.completed"]
    assert last.output[0].arguments == "".join(pieces)
