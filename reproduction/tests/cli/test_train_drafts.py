"""`python -m reproduction train ngram` and `samples` as a user meets them."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import pytest

from console import Run, mistake
from tiny import TEXT, byte_level, folder, llama, t5


@pytest.fixture
def run(console: Run) -> Run:
    return console


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folders `target`, `t5`, and `bare` without a tokenizer; a text."""
    base = tmp_path_factory.mktemp("cli")
    folder(base / "target", llama(320), byte_level())
    folder(base / "bare", llama(64))
    folder(base / "t5", t5(320), byte_level())
    (base / "text").mkdir()
    (base / "text" / "book.txt").write_text(TEXT * 40, encoding="utf-8")
    return base


def test_samples(run, base, tmp_path):
    out = tmp_path / "samples.txt"
    args = ("--data", base / "text", "--target", base / "target", "--tokens", 20)
    result = run("train", "samples", "--out", out, *args)
    assert result.code == 0 and str(out) in result.out
    first = out.read_text(encoding="utf-8")
    assert first and run("train", "samples", "--out", out, *args).code == 0
    assert out.read_text(encoding="utf-8") == first  # the seed is the same
    assert [path.name for path in tmp_path.iterdir()] == ["samples.txt"]
    (use,) = [line for line in result.out.splitlines() if line.startswith("use it: ")]
    learn = shlex.split(use.removeprefix("use it: python -m reproduction "))
    learn[-1] = str(tmp_path / "draft")  # for FOLDER
    small = ("--context", 4, "--steps", 1, "--layers", 1)
    assert run(*learn, *small).code == 0
    mistake(run("train", "samples", "--out", tmp_path, *args), "is a folder")


@pytest.mark.parametrize("source", ["text", "samples"])
def test_ngram(run, product, base, tmp_path, source):
    out, target = tmp_path / "table.safetensors", base / "target"
    args = {
        "text": ("--data", base / "text", "--tokenizer", target),
        "samples": ("--target", target, "--tokens", 2000),
    }[source]
    result = run("train", "ngram", "--out", out, "--order", 2, *args)
    assert result.code == 0 and "order 2, vocabulary 320" in result.out
    bits = re.search(r"held-out text: (\d+\.\d+) bits a token", result.out)
    assert bits and 0 < float(bits[1]) < 20
    command = f"generate --target {target} --draft reproduction.ngram:{out} PROMPT\n"
    assert result.out.endswith(f"use it: foretoken {command}")
    document = json.loads(run("train", "ngram", "--out", out, "--order", 2, *args, "--json").out)
    assert document.pop("held_out_bits_per_token") == pytest.approx(float(bits[1]), abs=0.01)
    assert document == {"order": 2, "vocab_size": 320, "bytes": out.stat().st_size}
    options = ("--target", target, "--draft", f"reproduction.ngram:{out}", "--max-new-tokens", 9)
    drafted = product("generate", "It was", *options, "--gamma", 3)
    plain = product(
        "generate", "It was", "--target", target, "--draft", "none", "--max-new-tokens", 9
    )
    assert drafted.code == 0 and drafted.out == plain.out


def test_options_of_samples_are_none_of_text(run, base, tmp_path):
    of = ("--data", base / "text", "--tokenizer", base / "target")
    for option in (("--tokens", 5), ("--temperature", 0.5)):
        result = run("train", "ngram", "--out", tmp_path / "t.safetensors", *of, *option)
        mistake(result, "--tokens and --temperature are of samples")


def test_bad_training_input(run, base, tmp_path):
    out, target, text = tmp_path / "out", base / "target", base / "text"
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "book.txt.gz").write_bytes(b"no gzip")
    ngram = ("train", "ngram", "--out", out)
    mistake(run(*ngram), "give --data with --tokenizer, or --target")
    mistake(run(*ngram, "--data", text), "give --data with --tokenizer, or --target")
    mistake(run(*ngram, "--target", base / "t5"), "an encoder-decoder has no text of its own")
    mistake(run(*ngram, "--data", text, "--tokenizer", text), "holds no tokenizer")
    mistake(run(*ngram, "--data", text, "--tokenizer", "no"), "the tokenizer in no cannot be")
    counted = ("--tokenizer", target, "--data")
    mistake(run(*ngram, *counted, tmp_path / "no"), "there is no")
    mistake(run(*ngram, *counted, tmp_path / "broken"), "book.txt.gz cannot be read")
    mistake(run(*ngram, *counted, text, "--order", 0), "order is 0")
    samples = ("train", "samples", "--out", out, "--data", text, "--tokens", 5)
    mistake(run(*samples, "--target", base / "bare"), "the target has no tokenizer")
    mistake(run(*samples, "--target", base / "t5"), "an encoder-decoder has no text of its own")
    assert not out.exists()


def test_an_output_that_cannot_be_written(run, base, tmp_path):
    (tmp_path / "file").write_text("in the way")
    args = ("--data", base / "text", "--tokenizer", base / "target")
    result = run("train", "ngram", "--out", tmp_path / "file" / "table", *args)
    mistake(result, "file")


@pytest.mark.parametrize(
    "args", [["samples", "--data", "no"], ["ngram", "--data", "no", "--tokenizer", "no"]]
)
def test_a_missing_folder_of_the_output_is_said_before_the_work(run, tmp_path, args):
    result = run("train", *args, "--out", tmp_path / "no" / "file")
    mistake(result, f"there is no folder {tmp_path / 'no'}; make it or give another --out")
