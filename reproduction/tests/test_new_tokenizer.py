"""Tokenizers of runs, and text encoded by them."""

from __future__ import annotations

import pytest

from foretoken.errors import InputError
from reproduction.new_tokenizer import build, read_tokenizer
from tiny import TEXT, byte_level, metaspace


def test_a_corpus_knows_the_bytes_it_held_out():
    texts = [TEXT, "h\u00e9ld"]
    built = build(texts, byte_level())
    assert built.held_out_bytes == 5 and built.held_out[0] == built.held_out[-1] == 0
    assert len(built.train) > len(built.held_out)


def test_a_tokenizer_in_a_folder(tmp_path):
    metaspace().save_pretrained(tmp_path / "m")
    assert read_tokenizer(tmp_path / "m").get_vocab() == metaspace().get_vocab()
    with pytest.raises(InputError, match="holds no tokenizer that can be read") as error:
        read_tokenizer(tmp_path)
    assert "\n" not in str(error.value)
