"""Text files that options name."""

from __future__ import annotations

import pytest

from foretoken.errors import InputError
from foretoken.storage.files import read_text


def test_text_without_its_mark(tmp_path):
    file = tmp_path / "a.txt"
    file.write_bytes("\ufeffsea\r\n".encode())
    assert read_text(file, "prompts") == "sea\r\n"


def test_files_that_cannot_be_read(tmp_path):
    with pytest.raises(InputError, match="no such file"):
        read_text(tmp_path / "no", "a schema")
    (tmp_path / "b").write_bytes(b"\xff")
    for file in (tmp_path, tmp_path / "b"):
        with pytest.raises(InputError, match="cannot be read as text in UTF-8"):
            read_text(file, "a schema")
