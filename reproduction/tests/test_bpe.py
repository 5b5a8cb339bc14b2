"""Tokenizers in folders."""

from __future__ import annotations

from pathlib import Path

import pytest
from reproduction.bpe import read_tokenizer

from foretoken.errors import InputError
from tiny import metaspace


def test_a_tokenizer_in_a_folder(tmp_path: Path) -> None:
    metaspace().save_pretrained(tmp_path / "m")
    assert read_tokenizer(tmp_path / "m").get_vocab() == metaspace().get_vocab()
    with pytest.raises(InputError, match="holds no tokenizer that can be read") as error:
        read_tokenizer(tmp_path)
    assert "\n" not in str(error.value)
