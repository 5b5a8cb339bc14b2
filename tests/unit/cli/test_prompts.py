"""Prompts from files: what a line is, and what a model without a tokenizer reads."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest

from foretoken.cli.prompts import (
    PROMPT_KEYS,
    SAMPLING_KEYS,
    ChatTemplate,
    MessageOptions,
    PromptLine,
    make_tasks,
    read_prompts,
    to_model_prompt,
)
from foretoken.errors import InputError, RefusedError
from foretoken.sampling.params import SamplingParams
from tiny import byte_level


def test_a_line_of_a_file_ends_with_a_newline_alone(tmp_path):
    """Not with what else Python's splitlines takes for one; a mark at the beginning is none."""
    file = tmp_path / "prompts.txt"
    file.write_bytes("\ufeffIt\u2028was\r\na\x0cb\x85c\n\nd".encode())
    assert [line.prompt for line in read_prompts(None, file)] == ["It\u2028was", "a\x0cb\x85c", "d"]
    file = tmp_path / "prompts.jsonl"
    file.write_bytes('\ufeff{"prompt": "a\u2028b"}\r\n\r\n{"prompt": [1]}\n'.encode())
    assert [line.prompt for line in read_prompts(None, file)] == ["a\u2028b", [1]]


def test_ids_for_a_model_without_a_tokenizer():
    bare, words = SimpleNamespace(tokenizer=None), SimpleNamespace(tokenizer=object())
    assert to_model_prompt(PromptLine("1, 2,,3", id="a"), bare) == [1, 2, 3]
    assert (
        to_model_prompt(PromptLine([4, 5]), bare)
        == to_model_prompt(PromptLine([4, 5]), words)
        == [4, 5]
    )
    assert to_model_prompt(PromptLine("1,2"), words) == "1,2"
    with pytest.raises(InputError, match="'one,2' is not ids separated by commas"):
        to_model_prompt(PromptLine("one,2"), bare)


USER = {"role": "user", "content": "Where?"}


def parse(
    tmp_path: Path, *rows: object, holding: tuple[str, ...] = SAMPLING_KEYS
) -> list[PromptLine]:
    file = tmp_path / "p.jsonl"
    file.write_text("\n".join(row if isinstance(row, str) else json.dumps(row) for row in rows))
    return read_prompts(None, file, holding)


def test_a_line_with_messages_and_options(tmp_path):
    first, second = parse(
        tmp_path,
        {"prompt": "a", "temperature": 0.5, "stop_strings": ["x"], "id": 1},
        {"messages": [USER], "top_k": None},
    )
    assert first.sampling == {"temperature": 0.5, "stop_strings": ["x"]} and first.id == 1
    assert second.messages == [USER] and not second.prompt and second.sampling == {"top_k": None}
    assert second.location == f"{tmp_path / 'p.jsonl'}, line 2"


@pytest.mark.parametrize(
    ("row", "says"),
    [
        ({"prompt": "a", "temprature": 1}, "temprature is unknown here; did you mean tem"),
        ({"prompt": "a", "stop": "x"}, "stop is unknown here; did you mean stop_strings?"),
        ({"prompt": "a", "top-k": 1}, "top-k is unknown here; did you mean top_k?"),
        ({"prompt": "a", "zzz": 1}, "zzz is unknown here; give any of prompt, id, mess"),
        ({"prompt": "a", "top_p": 2}, "top_p is 2"),
        ({"prompt": "a", "messages": [USER]}, "give either a prompt or messages"),
        ({"id": 1}, "give either a prompt or messages"),
        ({"messages": []}, "the conversation is empty"),
        ({"messages": "a"}, "messages is 'a'; give a list of messages"),
        ({"messages": [{"role": "user"}]}, "message 0 has the content None"),
        ({"messages": [{"content": "a"}]}, "message 0 has the role None"),
        ({"prompt": ""}, "the prompt is empty; give text or ids"),
        ({"prompt": []}, "the prompt is empty; give text or ids"),
        ({"prompt": [1, True]}, "prompt is [1, True]; give text or ids"),
        ({"prompt": None}, "prompt is None; give text or ids"),
        ("[]", "it is not a JSON object"),
        ("text", "it is 'text', which is no"),
        ('{"prompt": ', "it is '{\"prompt\": ', which is no"),
        ('{"prompt": ' + "[" * 100_000, 'it is \'{"prompt": [['),
        ('{"prompt": "a", "id": NaN}', 'it is \'{"prompt": "a", "id": NaN}\', which is no'),
        ('{"prompt": "a", "logit_bias": {"5": -Infinity}}', 'it is \'{"prompt": '),
    ],
)
def test_invalid_lines_are_told_by_place(tmp_path, row, says):
    with pytest.raises(InputError) as error:
        make_tasks(parse(tmp_path, {"prompt": "a"}, "", row), {})
    assert str(error.value).startswith(f"{tmp_path / 'p.jsonl'}, line 3: {says}")


def test_a_command_that_follows_no_options_refuses_them(tmp_path):
    for row in ({"prompt": "a", "top_k": 1}, {"messages": [USER]}):
        with pytest.raises(InputError, match="is unknown here"):
            parse(tmp_path, row, holding=PROMPT_KEYS)
    with pytest.raises(InputError, match="line 1: give either a prompt or messages"):
        parse(tmp_path, {"id": 1}, holding=PROMPT_KEYS)


# Messages: who says what, and what no line has a use for

BRIEF = {"role": "system", "content": "Be brief."}


def wrap(messages: MessageOptions, *lines: PromptLine) -> list[PromptLine]:
    wrapped = [messages.wrap_prompt(line) for line in lines]
    messages.require_used(wrapped)
    return wrapped


def test_prompts_become_messages():
    lines = [PromptLine("Where?", id=3), PromptLine("", messages=[USER])]
    assert wrap(MessageOptions(), *lines) == lines
    assert [line.messages for line in wrap(MessageOptions(chat=True), *lines)] == [[USER], [USER]]
    with_system = wrap(MessageOptions(chat=True, system="Be brief."), *lines)
    assert [line.messages for line in with_system] == [[BRIEF, USER], [BRIEF, USER]]
    assert with_system[0].id == 3
    own = {"role": "developer", "content": "Be long."}
    (line,) = wrap(MessageOptions(system="Be brief."), PromptLine("", messages=[own, USER]))
    assert line.messages == [own, USER]


def test_options_without_messages():
    for name in ("system", "chat_template", "chat_template_kwargs"):
        with pytest.raises(InputError, match=f"--{name.replace('_', '-')} needs messages, and"):
            wrap(MessageOptions(**{name: "x"}), PromptLine("a"))
    with pytest.raises(InputError, match="^f, line 2: --chat needs a prompt of text"):
        wrap(MessageOptions(chat=True), PromptLine([1, 2], location="f, line 2"))
    with pytest.raises(InputError, match="--chat needs a prompt of text"):
        wrap(MessageOptions(chat=True), PromptLine(""))


def test_a_template_and_its_variables(tmp_path):
    file = tmp_path / "chat.jinja"
    file.write_text("{{ messages[0].content }}{{ mood }}")
    template = MessageOptions(chat_template=file, chat_template_kwargs='{"mood": "!"}').template
    spec = SimpleNamespace(tokenizer=byte_level())
    assert (
        byte_level().decode(template.make_prompt(PromptLine("", messages=[USER]), spec))
        == "Where?!"
    )
    assert template.make_prompt(PromptLine("a"), spec) == "a"
    assert MessageOptions().template == ChatTemplate()
    for wrong in (
        {"chat_template": tmp_path / "no"},
        *({"chat_template_kwargs": each} for each in ("[1]", "null", "{")),
    ):
        with pytest.raises(InputError, match="no such file|chat_template_kwargs is "):
            MessageOptions(**wrong).template  # noqa: B018


# A line's own options over the command line's


def test_a_line_wins():
    lines = [PromptLine("a"), PromptLine("b", sampling={"top_k": 3, "stop_strings": None})]
    first, second = make_tasks(lines, {"top_k": 5, "temperature": 1.0, "stop_strings": ["x"]})
    assert first.params == SamplingParams(1.0, 5, stop_strings=["x"])
    assert second.params == SamplingParams(1.0, 3) and second.number == 1
    assert second.given == {"top_k": 3, "temperature": 1.0, "stop_strings": None}


def test_errors_of_a_line_say_where_it_stands():
    line = PromptLine("b", sampling={"num_return_sequences": 2}, location="f, line 7")
    with pytest.raises(RefusedError, match="^f, line 7: num_return_sequences=2 at temperature 0"):
        make_tasks([PromptLine("a"), line], {})
    with pytest.raises(RefusedError, match="^num_return_sequences=2"):
        make_tasks([PromptLine("a", location="f, line 1")], {"num_return_sequences": 2})
