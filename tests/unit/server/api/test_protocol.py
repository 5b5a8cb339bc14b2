"""Every field that OpenAI's clients can send is honoured, or refused by name; what else is refused:
`bad_requests.json`."""

from __future__ import annotations

import typing
from pathlib import Path
from typing import Any

import pytest
from openai.types import completion_create_params
from openai.types.chat import completion_create_params as chat_create_params
from openai.types.responses import response_create_params
from pydantic import ValidationError

from foretoken.server.api import protocol
from foretoken.server.api.chat import ChatCompletionRequest
from foretoken.server.api.completions import CompletionRequest
from foretoken.server.api.errors import BadRequestError, make_validation_error
from foretoken.server.api.protocol import StrictModel
from foretoken.server.api.responses import ResponsesRequest
from foretoken.server.api.tokenization import TokenizeRequest
from foretoken.server.api.unsupported import IGNORED_FIELDS, UNSUPPORTED
from foretoken.server.process.messages import GenerateRequest

CLIENTS: dict[type[StrictModel], Any] = {
    ChatCompletionRequest: chat_create_params.CompletionCreateParamsBase,
    CompletionRequest: completion_create_params.CompletionCreateParamsBase,
    ResponsesRequest: response_create_params.ResponseCreateParamsBase,
}
LEAST: dict[type[StrictModel], dict[str, Any]] = {
    ChatCompletionRequest: {"messages": [{"role": "user", "content": "a"}]},
    CompletionRequest: {"prompt": "a"},
    ResponsesRequest: {"input": "a"},
}
DOCS = Path(__file__).parents[4] / "docs" / "serving.md"


def read(kind: Any, body: Any) -> Any:
    """A request of this kind, or the error that its sender is told."""
    try:
        return kind.model_validate(body)
    except ValidationError as error:
        problems = [{**each, "loc": ("body", *each["loc"])} for each in error.errors()]
        raise make_validation_error(problems) from None


def asked(kind: Any, body: Any, suggested: Any = None) -> GenerateRequest:
    """Return what the engine is asked for by a request."""
    return read(kind, body).to_engine("", suggested or {})


@pytest.mark.parametrize("kind", CLIENTS)
def test_every_field_of_the_client_is_known_and_documented(kind: type[StrictModel]) -> None:
    theirs = set(typing.get_type_hints(CLIENTS[kind]))
    own = {field.alias or name for name, field in kind.model_fields.items()}
    text = DOCS.read_text(encoding="utf-8")
    assert [name for name in sorted(theirs | own) if f"`{name}`" not in text] == []
    assert theirs - own - set(UNSUPPORTED) - IGNORED_FIELDS == set()
    for name in IGNORED_FIELDS:
        read(kind, LEAST[kind] | {name: "somebody"})
    for name, (neutral, reason) in UNSUPPORTED.items():
        if name in own:
            continue
        for value in (None, *neutral):
            read(kind, LEAST[kind] | {name: value})
        with pytest.raises(BadRequestError) as caught:
            read(kind, LEAST[kind] | {name: {"un": "likely"}})
        assert caught.value.param == name and reason in caught.value.message


@pytest.mark.parametrize("kind", [ChatCompletionRequest, TokenizeRequest])
def test_a_final_message_is_continued_or_a_new_one_begun(kind: Any) -> None:
    """To begin one is the default, and no contradiction."""
    for name in ("continue_final_message", "add_generation_prompt"):
        assert (
            read(kind, LEAST[ChatCompletionRequest] | {name: True}).template_variables[name] is True
        )
    both = {"continue_final_message": True, "add_generation_prompt": False}
    assert read(kind, LEAST[ChatCompletionRequest] | both).template_variables
    assert read(kind, LEAST[ChatCompletionRequest]).template_variables is None


def test_what_is_left_out_follows_the_model() -> None:
    facts = {"temperature": 0.6, "top_p": 0.9, "top_k": 20}
    options = asked(CompletionRequest, {"prompt": "a"}, facts).controls
    assert (options["temperature"], options["top_p"], options["top_k"]) == (0.6, 0.9, 20)
    own = asked(CompletionRequest, {"prompt": "a", "temperature": 0, "top_k": -1}, facts).controls
    assert (own["temperature"], own["top_k"]) == (0, 0)
    assert asked(CompletionRequest, {"prompt": "a"}).controls["temperature"] == 1.0


@pytest.mark.parametrize("kind", [ChatCompletionRequest, ResponsesRequest])
def test_templates_get_tools_in_one_form(kind: type[StrictModel]) -> None:
    """A response's tool carries its function's name itself, a chat's in a part of its own."""
    weather = {"name": "weather", "parameters": {"type": "object"}, "strict": True}
    flat, nested = {"type": "function", **weather}, {"type": "function", "function": weather}
    for tool in [flat, nested]:
        told = asked(kind, LEAST[kind] | {"tools": [tool]})
        assert told.chat_template_kwargs == {"tools": [nested]}
    silent = asked(kind, LEAST[kind] | {"tools": [flat], "tool_choice": "none"})
    assert silent.chat_template_kwargs is None


def test_a_long_list_is_not_looked_through(monkeypatch: pytest.MonkeyPatch) -> None:
    """Others wait meanwhile: the first part says what kind of prompt it is, and lists beyond their
    limit are refused before anything else is read."""
    seen: list[Any] = []
    bias = dict.fromkeys(map(str, range(1025)), 1)
    monkeypatch.setattr(protocol.json, "dumps", lambda *a, **k: seen.append(a) or "")
    for more in ({"allowed_token_ids": [1] * 1025}, {"logit_bias": bias}):
        with pytest.raises(BadRequestError, match="give at most 1024"):
            read(CompletionRequest, {"prompt": "a"} | more)
    assert not seen
    with pytest.raises(ValidationError) as refused:
        CompletionRequest.model_validate({"prompt": [1, *["a"] * 1000]})
    assert {each["loc"][1] for each in refused.value.errors()} == {"prompt:ids"}
