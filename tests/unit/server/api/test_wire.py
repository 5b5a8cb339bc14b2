"""Every field that OpenAI's clients can send is honoured, or refused by name."""

from __future__ import annotations

import typing
from pathlib import Path
from typing import Any

import pytest
from openai.types import completion_create_params
from openai.types.chat import completion_create_params as chat_create_params
from openai.types.responses import response_create_params
from pydantic import ValidationError

from foretoken.server.api import wire
from foretoken.server.api.chat import Chat
from foretoken.server.api.completions import Text
from foretoken.server.api.errors import BadRequestError, invalid
from foretoken.server.api.responses import Responses
from foretoken.server.api.tokens import Detokenize, Tokenize
from foretoken.server.api.unsupported import NOTED, UNSUPPORTED
from foretoken.server.api.wire import Wire
from foretoken.server.process.messages import GenerateRequest

pytestmark = pytest.mark.daily

CLIENTS: dict[type[Wire], Any] = {
    Chat: chat_create_params.CompletionCreateParamsBase,
    Text: completion_create_params.CompletionCreateParamsBase,
    Responses: response_create_params.ResponseCreateParamsBase,
}
LEAST: dict[type[Wire], dict[str, Any]] = {
    Chat: {"messages": [{"role": "user", "content": "a"}]},
    Text: {"prompt": "a"},
    Responses: {"input": "a"},
}
TOOL = {"type": "function", "function": {"name": "now"}}
DOCS = Path(__file__).parents[4] / "docs" / "serving.md"


def read(kind: Any, body: Any) -> Any:
    """A request of this kind, or the error that its sender is told."""
    try:
        return kind.model_validate(body)
    except ValidationError as error:
        problems = [{**each, "loc": ("body", *each["loc"])} for each in error.errors()]
        raise invalid(problems) from None


def asked(kind: Any, body: Any, suggested: Any = None) -> GenerateRequest:
    """Return what the engine is asked for by a request."""
    return read(kind, body).to_engine("", suggested or {})


def fields(kind: type[Wire]) -> set[str]:
    return {field.alias or name for name, field in kind.model_fields.items()}


@pytest.mark.parametrize("kind", CLIENTS)
def test_the_docs_name_every_field(kind: type[Wire]) -> None:
    text = DOCS.read_text(encoding="utf-8")
    theirs = set(typing.get_type_hints(CLIENTS[kind])) | fields(kind)
    assert [name for name in sorted(theirs) if f"`{name}`" not in text] == []


@pytest.mark.parametrize("kind", CLIENTS)
def test_every_field_of_the_client_is_known(kind: type[Wire]) -> None:
    theirs = set(typing.get_type_hints(CLIENTS[kind]))
    assert theirs - fields(kind) - set(UNSUPPORTED) - NOTED == set()
    for name in NOTED:
        read(kind, LEAST[kind] | {name: "somebody"})


@pytest.mark.parametrize("name", sorted(UNSUPPORTED))
def test_refused_fields_say_why_and_neutral_values_pass(name: str) -> None:
    neutral, reason = UNSUPPORTED[name]
    for kind in (kind for kind in CLIENTS if name not in fields(kind)):
        for value in (None, *neutral):
            read(kind, LEAST[kind] | {name: value})
        with pytest.raises(BadRequestError) as caught:
            read(kind, LEAST[kind] | {name: {"un": "likely"}})
        assert caught.value.param == name and reason in caught.value.message


def test_null_hides_no_mistake() -> None:
    with pytest.raises(BadRequestError, match="temprature: .* did you mean temperature"):
        read(Text, {"prompt": "a", "temprature": None})
    for part in ({"user": 3}, {"gama": None}, {"store": False}):
        with pytest.raises(BadRequestError, match=r"speculation\.\w+: unknown field"):
            read(Text, {"prompt": "a", "speculation": part})
    read(Text, {"prompt": "a", "max_completion_tokens": None})  # of chats, and known


@pytest.mark.parametrize("kind", [Chat, Text])
def test_a_prediction_is_text_or_parts_of_it(kind: type[Wire]) -> None:
    def predicted(prediction: Any) -> str | None:
        return asked(kind, LEAST[kind] | {"prediction": prediction}).prediction

    parts = [{"type": "text", "text": "ab"}, {"type": "text", "text": "c"}]
    for content in ("abc", parts):
        assert predicted({"type": "content", "content": content}) == "abc"
    for nothing in (None, {"type": "content", "content": ""}, {"type": "content", "content": []}):
        assert predicted(nothing) is None
    image = [{"type": "image_url", "text": "a"}]
    for wrong in ("abc", {"content": "abc"}, {"type": "content"}, {"type": "x", "content": "a"}):
        with pytest.raises(BadRequestError, match="^prediction"):
            predicted(wrong)
    with pytest.raises(BadRequestError, match="^prediction.content"):
        predicted({"type": "content", "content": image})


def test_unknown_fields_get_the_nearest_known() -> None:
    with pytest.raises(BadRequestError, match="did you mean max_tokens"):
        read(Text, {"prompt": "a", "max_token": 3})
    with pytest.raises(BadRequestError, match="known are"):
        read(Text, {"prompt": "a", "length_penalty": 3})


@pytest.mark.parametrize(
    ("kind", "name", "here"),
    [
        (Text, "max_completion_tokens", "max_tokens"),
        (Responses, "max_tokens", "max_output_tokens"),
        (Chat, "max_output_tokens", "max_completion_tokens"),
        (Text, "response_format", "structured_outputs"),
        (Responses, "response_format", "text"),
        (Chat, "guided_json", "structured_outputs"),
    ],
)
def test_what_is_called_otherwise_elsewhere(kind: type[Wire], name: str, here: str) -> None:
    with pytest.raises(BadRequestError, match=f"{name!r}; did you mean {here}\\?"):
        read(kind, LEAST[kind] | {name: 3})


def test_items_of_other_types_are_refused_by_their_type() -> None:
    with pytest.raises(BadRequestError, match="it is 'web_search_call'") as e:
        read(Responses, {"input": [{"type": "web_search_call", "id": "a"}]})
    assert e.value.param == "input[0].type"
    part = {"type": "output_text", "text": "b", "annotations": [], "logprobs": None}
    answer = {"type": "message", "id": "m", "status": "completed", "phase": None}
    answer |= {"role": "assistant", "content": [part]}  # as clients have it of an answer
    assert read(Responses, {"input": [answer]}).prompts == [[{"role": "assistant", "content": "b"}]]


def test_unknown_parts_of_a_field_get_the_nearest_known() -> None:
    with pytest.raises(BadRequestError, match="speculation.gama: .* did you mean gamma"):
        read(Text, {"prompt": "a", "speculation": {"gama": 3}})
    named = {"type": "json_schema", "json_schema": {"nam": "a"}}
    with pytest.raises(BadRequestError, match="did you mean name?"):
        read(Chat, LEAST[Chat] | {"response_format": named})


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"max_tokens": 2, "min_tokens": 3}, "min_tokens is 3, above the 2 new tokens asked for"),
        ({"max_tokens": 2, "max_completion_tokens": 3}, "give one"),
        ({"tool_choice": "auto"}, "tool_choice goes with tools"),
        ({"stream_options": {"include_usage": True}}, "goes with stream: true"),
        ({"stream": True, "stream_options": {"include_obfuscation": True}}, "one of False"),
        ({"structured_outputs": {"choice": "abc"}}, "must be a list"),
        ({"structured_outputs": {"json": {}, "regex": "a"}}, "several grammars; give one"),
        ({"continue_final_message": True, "add_generation_prompt": True}, "are both true; leave"),
        ({"add_generation_prompt": True, "chat_template_kwargs": {"add_generation_prompt": False}},
         "another add_generation_prompt than the field"),
        ({"reasoning_effort": "low", "chat_template_kwargs": {"reasoning_effort": "high"}},
         "another reasoning_effort than the field"),
        ({"tools": [TOOL], "chat_template_kwargs": {"tools": []}}, "another tools than the field"),
        ({"tools": [TOOL], "tool_choice": "required", "structured_outputs": {"regex": "a"}},
         "tool_choice asks for calls alone; leave one out"),
        ({"response_format": {"type": "text", "schema": {}}}, "text, which reads no schema; give"),
        ({"response_format": {"type": "json_object", "json_schema": {"schema": {}}}},
         "json_object, which reads no json_schema; give the type json_schema"),
    ],
)  # fmt: skip
def test_what_contradicts_itself(more: dict[str, Any], said: str) -> None:
    with pytest.raises(BadRequestError, match=said):
        asked(Chat, LEAST[Chat] | more)


def test_a_schema_of_a_response_has_its_type() -> None:
    with pytest.raises(BadRequestError, match="json_object, which reads no schema"):
        read(Responses, {"input": "a", "text": {"format": {"type": "json_object", "schema": {}}}})


@pytest.mark.parametrize("kind", [Chat, Tokenize])
def test_a_final_message_is_continued_or_a_new_one_begun(kind: Any) -> None:
    """To begin one is the default, and no contradiction."""
    both = {"continue_final_message": True, "add_generation_prompt": True}
    with pytest.raises(BadRequestError, match="both true") as refused:
        read(kind, LEAST[Chat] | both)
    assert refused.value.param == "continue_final_message"
    for name, value in both.items():
        assert read(kind, LEAST[Chat] | {name: value}).variables[name] is value
    assert read(kind, LEAST[Chat] | both | {"add_generation_prompt": False}).variables
    assert read(kind, LEAST[Chat]).variables is None


@pytest.mark.parametrize(
    "field", [{"tools": [TOOL]}, {"add_generation_prompt": False}, {"chat_template_kwargs": {}}]
)
def test_what_belongs_to_messages_is_refused_beside_a_prompt(field: dict[str, Any]) -> None:
    with pytest.raises(BadRequestError, match="goes with messages"):
        read(Tokenize, {"prompt": "a"} | field)


def test_draft_tokens_that_others_would_wait_for() -> None:
    with pytest.raises(BadRequestError, match="speculation.gamma: it must be 32 or less"):
        read(Text, {"prompt": "a", "speculation": {"gamma": 33}})


def test_types_are_not_guessed() -> None:
    for value in ("0.5", True, [1]):
        with pytest.raises(BadRequestError, match="temperature"):
            read(Text, {"prompt": "a", "temperature": value})


def test_what_is_left_out_follows_the_model() -> None:
    facts = {"temperature": 0.6, "top_p": 0.9, "top_k": 20}
    options = asked(Text, {"prompt": "a"}, facts).controls
    assert (options["temperature"], options["top_p"], options["top_k"]) == (0.6, 0.9, 20)
    own = asked(Text, {"prompt": "a", "temperature": 0, "top_k": -1}, facts).controls
    assert (own["temperature"], own["top_k"]) == (0, 0)
    assert asked(Text, {"prompt": "a"}).controls["temperature"] == 1.0


def test_one_grammar_at_a_time() -> None:
    both = LEAST[Chat] | {
        "response_format": {"type": "json_object"},
        "structured_outputs": {"regex": "a"},
    }
    with pytest.raises(BadRequestError, match="give one"):
        asked(Chat, both)
    with pytest.raises(BadRequestError, match="known are choice, grammar, json, regex"):
        asked(Text, {"prompt": "a", "structured_outputs": {"xml": "a"}})


def test_what_is_no_text_is_named() -> None:
    said = [{"role": "user", "content": [{"type": "input_audio"}]}]
    for kind, name in ((Chat, "messages"), (Responses, "input")):
        with pytest.raises(
            BadRequestError,
            match=rf"^{name}\[0\].content: a part is .*give a text",
        ):
            read(kind, {name: said})
        with pytest.raises(BadRequestError, match=rf"^{name}\[0\]: it must be an object"):
            read(kind, {name: ["a"]})


WEATHER = {"name": "weather", "parameters": {"type": "object"}, "strict": True}


@pytest.mark.parametrize("kind", [Chat, Responses])
def test_templates_get_tools_in_one_form(kind: type[Wire]) -> None:
    """A response's tool carries its function's name itself, a chat's in a part of its own."""
    flat, nested = {"type": "function", **WEATHER}, {"type": "function", "function": WEATHER}
    for tool in [flat, nested]:
        told = asked(kind, LEAST[kind] | {"tools": [tool]})
        assert told.chat_template_kwargs == {"tools": [nested]}
    silent = asked(kind, LEAST[kind] | {"tools": [flat], "tool_choice": "none"})
    assert silent.chat_template_kwargs is None


@pytest.mark.parametrize("kind", [Chat, Responses])
@pytest.mark.parametrize(
    ("tool", "param"),
    [
        ({"type": "web_search"}, "tools[1].type"),
        ({}, "tools[1].type"),
        ({"type": "function"}, "tools[1].function.name"),
        ({"type": "function", "function": "weather"}, "tools[1].function"),
        ({"type": "function", "function": {"name": 3}}, "tools[1].function.name"),
        ({"type": "function", "function": {"name": "a b"}}, "tools[1].function.name"),
        (
            {"type": "function", "function": {"name": "a", "parameters": {"type": "string"}}},
            "tools[1].function.parameters",
        ),
    ],
)
def test_tools_that_are_no_functions_are_named(kind: type[Wire], tool: Any, param: str) -> None:
    tools = [{"type": "function", **WEATHER}, tool]
    with pytest.raises(BadRequestError) as refused:
        asked(kind, LEAST[kind] | {"tools": tools})
    assert refused.value.param == param


CALL = {"function": {"name": "a", "arguments": "{}"}}
TOO_LONG: list[tuple[Any, dict[str, Any], str, str]] = [
    (Text, {"bad_words": ["a"] * 129}, "bad_words", "128 at most"),
    (Text, {"bad_words": ["a" * 101] * 100}, "bad_words", "10100 characters together, at most"),
    (Text, {"stop": ["a"] * 17}, "stop", "16 at most"),
    (Text, {"stop": ["a" * 600, "b" * 600]}, "stop", "1200 characters together, at most 1024"),
    (Text, {"stop": "a" * 1025}, "stop", "at most 1024"),
    (Text, {"stop_token_ids": [1] * 129}, "stop_token_ids", "128 at most"),
    (Text, {"allowed_token_ids": [1] * 1025}, "allowed_token_ids", "1024 at most"),
    (Text, {"logit_bias": dict.fromkeys(map(str, range(1025)), 1)}, "logit_bias", "1024 at most"),
    (Text, {"prompt": ["a"] * 2049}, "prompt", "2048 at most"),
    (Text, {"prompt": [[1]] * 2049}, "prompt", "2048 at most"),
    (Text, {"n": 129}, "n", "128 or less"),
    (Text, {"structured_outputs": {"choice": ["a"] * 1001}}, "structured_outputs.choice",
     "1000 at most"),
    (Text, {"structured_outputs": {"regex": "a" * 50_001}}, "structured_outputs", "50000 char"),
    (Text, {"prediction": {"type": "content", "content": [{"type": "text", "text": ""}] * 2049}},
     "prediction.content", "at most 2048"),
    (Chat, {"messages": [{"role": "user", "content": ""}] * 2049}, "messages", "2048 at most"),
    (Chat, {"messages": [{"role": "user", "content": [{"type": "text", "text": ""}] * 2049}]},
     "messages[0].content", "at most 2048"),
    (Chat, {"messages": [{"role": "assistant", "tool_calls": [CALL] * 129}]}, "messages[0]",
     "129 tool_calls, at most 128"),
    (Chat, {"metadata": dict.fromkeys(map(str, range(17)), "")}, "metadata", "16 at most"),
    (Chat, {"chat_template_kwargs": {"a": "b" * 200_000}}, "chat_template_kwargs", "200000 char"),
    (Chat, {"tools": [{"type": "function", "name": f"f{i}"} for i in range(129)]}, "tools",
     "128 at most"),
    (Chat, {"tools": [{"type": "function", "name": f"f{i}", "description": "a" * 45_000}
     for i in range(5)]}, "tools", "200000 char"),
    (Responses, {"input": [{"role": "user", "content": ""}] * 2049}, "input", "2048 at most"),
    (Responses, {"metadata": dict.fromkeys(map(str, range(17)), "")}, "metadata", "16 at most"),
    (Tokenize, {"messages": [{"role": "user", "content": ""}] * 2049}, "messages", "2048 at most"),
    (Detokenize, {"tokens": [1] * (2**17 + 1)}, "tokens", "131072 at most"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("kind", "more", "param", "said"), TOO_LONG, ids=[f"{c[2]}-{i}" for i, c in enumerate(TOO_LONG)]
)
def test_what_is_too_long_is_refused_with_its_limit(
    kind: Any, more: dict[str, Any], param: str, said: str
) -> None:
    with pytest.raises(BadRequestError) as refused:
        request = read(kind, LEAST.get(kind, {}) | more)
        request.to_engine("", {})  # a grammar's length is looked at here
    assert refused.value.param == param and said in refused.value.message, refused.value.message
    assert len(refused.value.message) < 200


def test_a_long_list_is_not_looked_through(monkeypatch: pytest.MonkeyPatch) -> None:
    """Others wait meanwhile: the first part says what kind of prompt it is, and lists beyond their
    limit are refused before anything else is read."""
    seen: list[Any] = []
    bias = dict.fromkeys(map(str, range(1025)), 1)
    monkeypatch.setattr(wire.json, "dumps", lambda *a, **k: seen.append(a) or "")
    for more in ({"allowed_token_ids": [1] * 1025}, {"logit_bias": bias}):
        with pytest.raises(BadRequestError, match="1024 at most"):
            read(Text, {"prompt": "a"} | more)
    assert not seen
    with pytest.raises(ValidationError) as refused:
        Text.model_validate({"prompt": [1, *["a"] * 1000]})
    assert {each["loc"][1] for each in refused.value.errors()} == {"prompt:ids"}
