"""An option is declared once, on its field of `SamplingParams`: the command line, the server, lines
of JSON and the docs all have it."""

from __future__ import annotations

import importlib.util
import inspect
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from foretoken.cli.option import SamplingOptions, StructuredOutputOptions
from foretoken.cli.prompts import SAMPLING_KEYS, number_lines
from foretoken.cli.remote_model import API_NAMES
from foretoken.cli.serve import serve
from foretoken.engine.options import ENGINE_OPTIONS as ENGINE
from foretoken.engine.options import EngineKeywords, EngineOptions
from foretoken.errors import InputError
from foretoken.sampling.checks import as_flag
from foretoken.sampling.params import (
    FOREIGN_NAMES,
    SAMPLING_FIELDS,
    SAMPLING_OPTIONS,
    TEXT_OPTIONS,
    Controls,
)
from foretoken.server.api.chat import ChatCompletionRequest
from foretoken.server.api.completions import CompletionRequest
from foretoken.server.api.protocol import SAMPLING_DEFAULTS, SHARED_FIELDS
from foretoken.server.api.responses import ResponsesRequest
from foretoken.server.options import OPTIONS as SERVER
from foretoken.server.options import ServerOptions

SERVING = SERVER | ENGINE
DOCS = Path(__file__).parents[3] / "docs"
# One valid value for each kind of field in a request
VALUES = {"logit_bias": {"5": 1.0}, "stop": "a", "stop_token_ids": [5], "allowed_token_ids": [5]}


@pytest.mark.parametrize("name", SAMPLING_FIELDS)
def test_an_option_is_wherever_text_can_hold_it(name: str, tmp_path: Path) -> None:
    option = SAMPLING_OPTIONS[name]
    assert option.help.endswith(".") and name in Controls.__annotations__
    assert all(FOREIGN_NAMES[alias] == name for alias in option.aliases)
    options = {field.name for field in fields(SamplingOptions)}
    options |= (
        {"structured"}
        if {field.name for field in fields(StructuredOutputOptions)} <= options
        else set()
    )
    assert (name in options) == (name in TEXT_OPTIONS) == (option.panel is not None)
    file = tmp_path / "prompts.jsonl"
    file.write_text(f'{{"prompt": "a", "{name}": null}}')
    ((_, parse),) = number_lines(file, SAMPLING_KEYS)
    if option.panel:
        assert parse().sampling == {name: None}
    else:
        with pytest.raises(ValueError, match=f"{name} is unknown here"):
            parse()


@pytest.mark.parametrize("name", SHARED_FIELDS)
@pytest.mark.parametrize(
    ("kind", "least"),
    [(ChatCompletionRequest, {"messages": [{"role": "user", "content": "a"}]}),
     (CompletionRequest, {"prompt": "a"}),
     (ResponsesRequest, {"input": "a"})],
)  # fmt: skip
def test_a_field_of_a_request_is_its_option(kind: Any, least: dict[str, Any], name: str) -> None:
    field = SHARED_FIELDS[name]
    if kind is ResponsesRequest and name == "prompt_logprobs":
        return  # a response has no place for them
    value = VALUES.get(
        field, not SAMPLING_DEFAULTS[name] if SAMPLING_OPTIONS[name].check is as_flag else 1
    )
    parsed: Any = kind.model_validate(least | {field: value})
    assert API_NAMES[name] == field and parsed.find_field(name) == field
    if name != "num_return_sequences":  # a request of its own for each text
        expected = {"stop": ["a"]}.get(field, value)
        assert parsed._build_controls({})[name] == expected
        assert kind.model_validate(least)._build_controls({}).get(name) in (None, 0, 1)


@pytest.mark.parametrize(
    ("name", "options"), [("controls.md", SAMPLING_OPTIONS), ("serving.md", SERVING)]
)
def test_the_table_of_the_docs_is_up_to_date(name: str, options: Any) -> None:
    spec = importlib.util.spec_from_file_location("options_table", DOCS / "options_table.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    text = (DOCS / name).read_text(encoding="utf-8")
    assert module.page(name) == text, "run `python docs/options_table.py`"
    for each, option in options.items():
        flag = option.flag or f"--{each.replace('_', '-')}"
        assert f"| `{each if name == 'controls.md' else flag}` |" in text or not option.panel


def test_options_of_engine_and_server_are_wherever_text_can_hold_them() -> None:
    line = inspect.signature(serve).parameters
    assert {name for name, each in SERVING.items() if each.panel} <= {*line}
    assert {*ENGINE} == {*EngineKeywords.__annotations__, "max_rows"}
    with pytest.raises(InputError, match="port is 65536; give a port from 0 to 65535"):
        ServerOptions(port=65536)
    with pytest.raises(InputError, match="max_rows is 0; give a whole number from 1") as error:
        EngineOptions(0)
    assert error.value.option == "max_rows"
