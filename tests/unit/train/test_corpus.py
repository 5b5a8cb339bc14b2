"""Text into ids: what is read, what is held out, and that every byte comes back."""

from __future__ import annotations

import gzip

import numpy as np
import pytest
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

from foretoken.errors import InputError
from foretoken.train import corpus
from tiny import byte_level


def test_texts_by_name_packed_or_not_and_in_folders(tmp_path):
    (tmp_path / "sub").mkdir()
    (tmp_path / "b.txt").write_text("second")
    (tmp_path / "a.txt.gz").write_bytes(gzip.compress("f\u00efrst".encode()))
    (tmp_path / "sub" / "c.txt").write_bytes(b"\xef\xbb\xbfthird")  # with a byte order mark
    (tmp_path / "notes.md").write_text("not this")
    assert corpus.read_texts(tmp_path) == ["f\u00efrst", "second", "third"]
    assert corpus.read_texts(tmp_path / "b.txt") == ["second"]


def test_line_ends_and_blank_lines_are_made_uniform(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"\r\n\r\n one \r\n\r\n\r\n\ntwo\nthree\n\n")
    assert corpus.read_texts(tmp_path) == ["one\n\ntwo\nthree"]


@pytest.mark.parametrize(
    "broken", [b"no gzip", gzip.compress(b"text" * 99)[:-9]], ids=["foreign", "cut short"]
)
def test_a_file_that_cannot_be_unpacked_is_named(tmp_path, broken):
    (tmp_path / "a.txt.gz").write_bytes(broken)
    with pytest.raises(InputError, match="a.txt.gz cannot be read"):
        corpus.read_texts(tmp_path)


def test_nothing_to_read(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"a\xffb")
    with pytest.raises(InputError, match=r"a.txt is not UTF-8 \(byte 1\)"):
        corpus.read_texts(tmp_path)
    (tmp_path / "a.txt").unlink()
    with pytest.raises(InputError, match="no .txt or .txt.gz file in .*"):
        corpus.read_texts(tmp_path)
    with pytest.raises(InputError, match="there is no .*missing"):
        corpus.read_texts(tmp_path / "missing")


@pytest.mark.parametrize("count", [2, 3, 15, 16, 17, 33])
def test_one_whole_text_in_sixteen_is_held_out(count):
    texts = [str(i) for i in range(count)]
    train, held_out = corpus.split_texts(texts)
    assert sorted(train + held_out, key=int) == texts and train
    assert len(held_out) == max(1, count // 16) and not set(train) & set(held_out)


def test_a_single_text_is_cut():
    (train,), (held_out,) = corpus.split_texts(["x" * 1500 + "y" * 100])
    assert train == "x" * 1500 and held_out == "y" * 100


def test_ids_have_an_end_of_text_around_every_text():
    ids = corpus.encode(["It was", "the sea\nand"], byte_level())
    assert ids.dtype == np.uint16
    first, second = (byte_level()(t).input_ids for t in ("It was", "the sea\nand"))
    assert ids.tolist() == [0, *first, 0, *second, 0]
    assert corpus.encode([""], byte_level()).tolist() == [0, 0]


def test_a_tokenizer_must_name_its_end():
    nameless = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordLevel({"a": 0}, "a")))
    with pytest.raises(InputError, match="no end-of-text token"):
        corpus.encode(["a"], nameless)
