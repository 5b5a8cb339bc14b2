"""Prompts from files: what a line is, and what a model without a tokenizer reads."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from foretoken.cli.prompts import Line, for_model, read
from foretoken.errors import InputError


def test_a_line_of_a_file_ends_with_a_newline_alone(tmp_path):
    """Not with what else Python's splitlines takes for one; a mark at the beginning is none."""
    file = tmp_path / "prompts.txt"
    file.write_bytes("\ufeffIt\u2028was\r\na\x0cb\x85c\n\nd".encode())
    assert [line.prompt for line in read(None, file)] == ["It\u2028was", "a\x0cb\x85c", "d"]
    file = tmp_path / "prompts.jsonl"
    file.write_bytes('\ufeff{"prompt": "a\u2028b"}\r\n\r\n{"prompt": [1]}\n'.encode())
    assert [line.prompt for line in read(None, file)] == ["a\u2028b", [1]]


def test_ids_for_a_model_without_a_tokenizer():
    lines = [Line("1, 2,,3", id="a"), Line([4, 5])]
    assert for_model(lines, SimpleNamespace(tokenizer=None)) == [Line([1, 2, 3], "a"), Line([4, 5])]
    assert for_model(lines, SimpleNamespace(tokenizer=object())) == lines
    with pytest.raises(InputError, match="'one,2' is not ids separated by commas"):
        for_model([Line("one,2")], SimpleNamespace(tokenizer=None))
