"""Tools, thoughts and ids as clients of a server meet them: the official openai package. A tiny
random model writes nothing of use by itself; what it is forced to write is what is tested."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx2
import jsonschema
import openai
import pytest

from foretoken.server.options import ServerOptions
from foretoken.server.process.messages import GenerateRequest
from foretoken.server.process.replies import ReplyPreparer
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
FORMS = ["hermes", "qwen3-coder", "llama-pythonic", "glm", "mistral-list", "lfm2", "llama-json"]
NAMED: Any = {"type": "function", "function": {"name": "weather"}}


@pytest.fixture(
    scope="module",
    params=[FORMS[0], *(pytest.param(form, marks=pytest.mark.prove) for form in FORMS[1:])],
)
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


def test_a_named_function_is_called(served: openai.OpenAI) -> None:
    """The same call whole and in pieces, and with draft tokens or without."""
    asked: Any = {"messages": ASK, "tools": TOOLS, "tool_choice": NAMED, **SAMPLING}
    functions: list[Any] = []
    for gamma in (0, 3):
        asked["extra_body"] = {"speculation": {"gamma": gamma, "rule": "coupled"}}
        done = served.chat.completions.create(**asked).choices[0]
        (call,) = done.message.tool_calls or ()
        assert done.finish_reason == "tool_calls" and done.message.content is None
        functions.append([call.function.name, json.loads(call.function.arguments)])
        text, calls, reason = streamed(served.chat.completions.create(stream=True, **asked))
        ((_, name, arguments),) = calls.values()
        functions.append([name, json.loads(arguments)])
        assert (text, reason) == ("", "tool_calls")
    assert functions == [functions[0]] * 4 and functions[0][0] == "weather"
    jsonschema.validate(functions[0][1], WEATHER)


def written_by(client: openai.OpenAI, limit: int, choice: Any) -> tuple[list[Any], str]:
    """The calls of a reply that is cut at a limit, and why it ended: alike whole and streamed, in
    chats and in responses, all without text."""
    sampling = {**SAMPLING, "max_tokens": limit, "temperature": 0.0}
    asked: Any = {"messages": ASK, "tools": TOOLS, "tool_choice": choice, **sampling}
    done = client.chat.completions.create(**asked).choices[0]
    assert done.message.content is None and not hasattr(done.message, "reasoning_content")
    calls = [[c.function.name, c.function.arguments] for c in done.message.tool_calls or ()]  # pyright: ignore
    chunks = list(client.chat.completions.create(stream=True, **asked))
    assert all(chunk.choices[0].delta.content is None for chunk in chunks)
    _, told, reason = streamed(chunks)
    assert ([call[1:] for call in told.values()], reason) == (calls, done.finish_reason)

    tools: Any = [{"type": "function", **tool["function"]} for tool in TOOLS]
    named: Any = {"type": "function", "name": "weather"} if choice != "required" else choice
    request: Any = {"model": "tiny", "input": "Hello", "tools": tools, "tool_choice": named}
    request |= {"max_output_tokens": limit, "temperature": 0.0}
    events = list(client.responses.create(stream=True, **request))
    for response in (client.responses.create(**request), events[-1].response):
        assert [[item.name, item.arguments] for item in response.output] == calls
        assert response.status == ("incomplete" if reason == "length" else "completed")
    assert {item.type for item in response.output} <= {"function_call"}
    return calls, reason


@pytest.mark.parametrize(
    "limits", [(3, 27, 61), pytest.param(range(1, 64), marks=pytest.mark.prove)], ids=len
)
def test_where_a_call_is_required_there_is_no_text(served: openai.OpenAI, limits: Any) -> None:
    """Wherever a limit cuts the reply; its calls grow with it."""
    for choice in ("required", NAMED):
        before: list[Any] = []
        for limit in limits:
            calls, reason = written_by(served, limit, choice)
            assert len(calls) >= len(before) and reason in ("length", "tool_calls")
            for (name, arguments), longer in zip(before, calls, strict=False):
                assert name == longer[0] and longer[1].startswith(arguments)
            before = calls


def test_the_loop_of_an_agent(served: openai.OpenAI) -> None:
    """A call, what it gave, and an answer; in chats and in responses."""
    create = served.chat.completions.create
    message = create(messages=ASK, tools=TOOLS, tool_choice=NAMED, **SAMPLING).choices[0].message
    assert message.tool_calls
    told: Any = {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "sunny"}
    turns = [*ASK, message.model_dump(exclude_none=True), told]
    again = create(messages=turns, tools=TOOLS, **SAMPLING)
    assert again.choices[0].finish_reason in ("stop", "length")

    asked: Any = {"model": "tiny", "temperature": 1.0, "extra_body": {"seed": 7}}
    asked["tools"] = [{"type": "function", **tool["function"]} for tool in TOOLS]
    choice: Any = {"type": "function", "name": "weather"}
    asks: Any = asked | {"input": "Hello", "tool_choice": choice, "max_output_tokens": 160}
    (call,) = served.responses.create(**asks).output
    assert call.type == "function_call" and call.name == "weather"
    jsonschema.validate(json.loads(call.arguments), WEATHER)
    events = list(served.responses.create(**asks, stream=True))
    pieces = [e.delta for e in events if e.type == "response.function_call_arguments.delta"]
    assert json.loads("".join(pieces)) == json.loads(call.arguments)
    output: Any = {"type": "function_call_output", "call_id": call.call_id, "output": "sunny"}
    items: Any = [*ASK, call.model_dump(exclude_none=True), output]
    answer = served.responses.create(input=items, max_output_tokens=9, **asked)
    assert answer.output[0].type == "message"


THINKS = TEMPLATE + "{% if add_generation_prompt and not quick %}<think>\n{% endif %}"


@pytest.fixture(scope="module")
def thinking(tmp_path_factory: pytest.TempPathFactory) -> Iterator[openai.OpenAI]:
    """A model that thinks: its template begins every answer with thoughts."""
    folders = pair(tmp_path_factory.mktemp("thinking"), THINKS)
    with (
        serving(*folders, ServerOptions("tiny", drain=1.0)) as (url, _),
        openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client,
    ):
        yield client


def ask(client: openai.OpenAI, **more: Any) -> Any:
    return client.chat.completions.create(messages=ASK, **SAMPLING, **more).choices[0]


def test_thoughts_are_a_field_of_their_own(thinking: openai.OpenAI) -> None:
    done = ask(thinking)
    assert done.message.content == "" and len(done.message.reasoning_content) > 50
    answered = ask(thinking, extra_body={"chat_template_kwargs": {"quick": True}})
    assert not hasattr(answered.message, "reasoning_content") and answered.message.content
    chunks = list(thinking.chat.completions.create(messages=ASK, stream=True, **SAMPLING))
    deltas = [chunk.choices[0].delta for chunk in chunks]
    thoughts = "".join(getattr(delta, "reasoning_content", None) or "" for delta in deltas)
    assert thoughts == done.message.reasoning_content
    response = thinking.responses.create(
        input="Hello", model="tiny", max_output_tokens=160, extra_body={"seed": 7}
    )
    (item,) = response.output
    assert item.type == "reasoning" and item.content and item.content[0].text == thoughts
    assert response.usage and response.usage.output_tokens_details.reasoning_tokens == 160


@pytest.mark.parametrize("gamma", [pytest.param(0, marks=pytest.mark.prove), 4])
def test_thoughts_end_with_their_budget(thinking: openai.OpenAI, gamma: int) -> None:
    body = {"thinking_token_budget": 20, "speculation": {"gamma": gamma, "rule": "coupled"}}
    done = thinking.chat.completions.create(messages=ASK, **SAMPLING, extra_body=body)
    message, usage = done.choices[0].message, done.usage
    assert message.content and len(message.reasoning_content.encode()) >= 10  # pyright: ignore
    closing = len("</think>")  # of a tokenizer of bytes
    assert usage and usage.completion_tokens_details
    assert 20 <= usage.completion_tokens_details.reasoning_tokens <= 20 + closing


def test_a_grammar_holds_behind_thoughts(thinking: openai.OpenAI) -> None:
    schema = {"type": "json_schema", "json_schema": {"name": "a", "schema": WEATHER}}
    done = ask(thinking, response_format=schema, extra_body={"thinking_token_budget": 9})
    jsonschema.validate(json.loads(done.message.content), WEATHER)
    called = ask(thinking, tools=TOOLS, tool_choice=NAMED, extra_body={"thinking_token_budget": 9})
    assert called.message.reasoning_content and len(called.message.tool_calls) == 1
    assert called.finish_reason == "tool_calls"


def test_ids_of_prompts_and_bans_of_tokens_and_words(thinking: openai.OpenAI) -> None:
    more = {"return_token_ids": True, "allowed_token_ids": [70, 71, 72], "bad_words": ["g"]}
    sampling = {"model": "tiny", "max_tokens": 30, "temperature": 1.0}
    done = thinking.completions.create(prompt="Hello", **sampling, extra_body=more)
    choice: Any = done.choices[0]
    assert len(choice.prompt_token_ids) == done.usage.prompt_tokens  # pyright: ignore
    assert set(choice.token_ids) <= {70, 71, 72} and "g" not in choice.text
    assert len(set(choice.token_ids)) == 2
    chat = thinking.chat.completions.create(messages=ASK, **SAMPLING, extra_body=more)
    assert len(chat.prompt_token_ids) == chat.usage.prompt_tokens  # pyright: ignore


def test_the_ids_of_a_chat_as_it_would_be_read(thinking: openai.OpenAI) -> None:
    root = str(thinking.base_url).removesuffix("/v1/")

    def count(**more: Any) -> Any:
        return httpx2.post(f"{root}/tokenize", json={"messages": ASK, **more}).json()

    opened, closed = count()["tokens"], count(add_generation_prompt=False)["tokens"]
    assert opened[: len(closed)] == closed and len(opened) > len(closed)
    assert "supports no tools" in count(tools=TOOLS)["error"]["message"]


def test_an_effort_that_no_template_reads(served: openai.OpenAI, thinking: openai.OpenAI) -> None:
    """Others, and budgets of thoughts: bad_requests.json."""
    assert ask(served, reasoning_effort="none").message.content is not None
    with pytest.raises(openai.BadRequestError, match="'none'") as e:
        ask(thinking, reasoning_effort="none")
    assert e.value.param == "reasoning_effort"


def test_no_effort_closes_thoughts() -> None:
    """Also where the template reads the effort itself."""
    for template in ("{{ enable_thinking }}", "{{ enable_thinking }}{{ reasoning_effort }}"):
        replies = ReplyPreparer(None, template, "auto")
        variables = {"reasoning_effort": "none"}
        request = GenerateRequest("", chat_template_kwargs=variables)
        assert replies.get_template_variables(request) == {"enable_thinking": False, **variables}


def test_marks_in_a_message_leave_the_answer_text(thinking: openai.OpenAI) -> None:
    said: Any = [{"role": "user", "content": "What does <think> do?"}]
    quick = {"chat_template_kwargs": {"quick": True}}
    answer = thinking.chat.completions.create(messages=said, **SAMPLING, extra_body=quick)
    message = answer.choices[0].message
    assert message.content and not hasattr(message, "reasoning_content")


def test_earlier_calls_are_told_to_templates_that_know_none(served: openai.OpenAI) -> None:
    call: Any = {"id": "a", "type": "function"}
    call["function"] = {"name": "now", "arguments": '{"zone": "sea"}'}
    turns: Any = [*ASK, {"role": "assistant", "tool_calls": [call]}]
    told: Any = {"role": "tool", "tool_call_id": "a", "content": "noon"}
    more = {"extra_body": {"return_token_ids": True}}
    with_calls = served.chat.completions.create(
        messages=[*turns, told], tools=TOOLS, **SAMPLING, **more
    )
    ids = {"tokens": with_calls.prompt_token_ids}  # pyright: ignore
    root = str(served.base_url).removesuffix("/v1/")
    prompt = httpx2.post(f"{root}/detokenize", json=ids).json()["prompt"]
    assert '{"name": "now", "arguments": {"zone": "sea"}}' in prompt and "noon" in prompt
    system: Any = [{"role": "system", "content": None}, *ASK]
    served.chat.completions.create(messages=system, tools=TOOLS, **SAMPLING)


def test_logprobs_of_text_that_is_held_back_come_with_it(thinking: openai.OpenAI) -> None:
    asked: Any = {"model": "tiny", "input": "Hello", "max_output_tokens": 40, "top_logprobs": 1}
    asked["extra_body"] = {"seed": 7, "chat_template_kwargs": {"quick": True}}
    whole = thinking.responses.create(**asked)
    told = [
        each
        for event in thinking.responses.create(stream=True, **asked)
        if event.type == "response.output_text.delta"
        for each in event.logprobs
    ]
    (message,) = whole.output
    assert message.type == "message" and message.content[0].type == "output_text"
    assert len(told) == len(message.content[0].logprobs or []) == 40
