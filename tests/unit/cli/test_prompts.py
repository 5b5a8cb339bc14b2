"""Prompts from files: what a line is, and what a model without a tokenizer reads."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest

from foretoken.cli.prompts import PLAIN, SAMPLING, Line, for_model, read
from foretoken.errors import InputError, RefusedError


def test_a_line_of_a_file_ends_with_a_newline_alone(tmp_path):
    """Not with what else Python's splitlines takes for one; a mark at the beginning is none."""
    file = tmp_path / "prompts.txt"
    file.write_bytes("\ufeffIt\u2028was\r\na\x0cb\x85c\n\nd".encode())
    assert [line.prompt for line in read(None, file)] == ["It\u2028was", "a\x0cb\x85c", "d"]
    file = tmp_path / "prompts.jsonl"
    file.write_bytes('\ufeff{"prompt": "a\u2028b"}\r\n\r\n{"prompt": [1]}\n'.encode())
    assert [line.prompt for line in read(None, file)] == ["a\u2028b", [1]]


def test_ids_for_a_model_without_a_tokenizer():
    bare, words = SimpleNamespace(tokenizer=None), SimpleNamespace(tokenizer=object())
    assert for_model(Line("1, 2,,3", id="a"), bare) == [1, 2, 3]
    assert for_model(Line([4, 5]), bare) == for_model(Line([4, 5]), words) == [4, 5]
    assert for_model(Line("1,2"), words) == "1,2"
    with pytest.raises(InputError, match="'one,2' is not ids separated by commas"):
        for_model(Line("one,2"), bare)


USER = {"role": "user", "content": "Where?"}


def parse(tmp_path: Path, *rows: object, holding: tuple[str, ...] = SAMPLING) -> list[Line]:
    file = tmp_path / "p.jsonl"
    file.write_text("\n".join(row if isinstance(row, str) else json.dumps(row) for row in rows))
    return read(None, file, holding)


def test_a_line_with_messages_and_options(tmp_path):
    first, second = parse(
        tmp_path,
        {"prompt": "a", "temperature": 0.5, "stop_strings": ["x"], "id": 1},
        {"messages": [USER], "top_k": None},
    )
    assert first.sampling == {"temperature": 0.5, "stop_strings": ["x"]} and first.id == 1
    assert second.messages == [USER] and not second.prompt and second.sampling == {"top_k": None}
    assert second.place == f"{tmp_path / 'p.jsonl'}, line 2"


@pytest.mark.parametrize(
    ("row", "says"),
    [
        ({"prompt": "a", "temprature": 1}, "temprature is unknown here; did you mean tem"),
        ({"prompt": "a", "stop": "x"}, "stop is unknown here; did you mean stop_strings?"),
        ({"prompt": "a", "top-k": 1}, "top-k is unknown here; did you mean top_k?"),
        ({"prompt": "a", "zzz": 1}, "zzz is unknown here; give some of prompt, id, mess"),
        ({"prompt": "a", "stopping": []}, "stopping is unknown here; did you mean"),
        ({"prompt": "a", "messages": [USER]}, "give a prompt or messages, one of them"),
        ({"id": 1}, "give a prompt or messages, one of them"),
        ({"messages": []}, "the conversation is empty"),
        ({"messages": "a"}, "messages is 'a'; give a list of messages"),
        ({"prompt": ""}, "the prompt is empty; give text or ids"),
        ({"prompt": [1, True]}, "prompt is [1, True]; give text or ids"),
        ({"messages": [{"role": "user"}]}, "message 0 has the content None"),
        ({"messages": [{"content": "a"}]}, "message 0 has the role None"),
        ({"prompt": None}, "prompt is None; give text or ids"),
        ('{"prompt": "a", "logit_bias": {"5": -Infinity}}', 'it is \'{"prompt": '),
    ],
)
def test_invalid_lines_are_told_by_place(tmp_path, row, says):
    with pytest.raises(InputError) as error:
        parse(tmp_path, {"prompt": "a"}, row)
    assert str(error.value).startswith(f"{tmp_path / 'p.jsonl'}, line 2: {says}")


def test_a_command_that_follows_no_options_refuses_them(tmp_path):
    for row in ({"prompt": "a", "top_k": 1}, {"messages": [USER]}):
        with pytest.raises(InputError, match="is unknown here"):
            parse(tmp_path, row, holding=PLAIN)
    with pytest.raises(InputError, match="line 1: give a prompt or messages"):
        parse(tmp_path, {"id": 1}, holding=PLAIN)


def test_an_error_says_where_a_line_stands():
    with pytest.raises(RefusedError, match="^f, line 3: cannot be$"):
        with Line("a", place="f, line 3").named():
            raise RefusedError("cannot be")
    with pytest.raises(RefusedError, match="^cannot be$"), Line("a").named():
        raise RefusedError("cannot be")
