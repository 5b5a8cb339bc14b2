"""What the stand-ins' scripts make of texts, and of two drafts which they keep."""

from __future__ import annotations

import argparse
import gzip
import json

import pytest
import torch
from safetensors.torch import load_file

from foretoken.errors import InputError
from foretoken.train import corpus
from foretoken_lab.standins import (
    commands,
    news,
    novels,
    summarization,
    translation,
)
from pairs import relative
from tiny import byte_level, folder, t5

KEYS = ("en", "de")


def test_pairs_are_read_from_every_kind_of_file(tmp_path):
    read = commands.read
    (tmp_path / "a.tsv").write_text("one\teins\ntwo\tzwei\n")
    (tmp_path / "a.jsonl").write_text('{"en": "one", "de": "eins"}\n{"en": "two", "de": "zwei"}\n')
    (tmp_path / "b.en").write_text("one\ntwo\n")
    (tmp_path / "b.de.gz").write_bytes(gzip.compress(b"eins\nzwei\n"))
    expected = [("one", "eins"), ("two", "zwei")]
    for name in ("a.tsv", "a.jsonl", "b"):
        assert read(str(tmp_path / name), KEYS) == expected
    (tmp_path / "b.en").write_text("one\n")
    with pytest.raises(InputError, match="has 1 sources and 2 targets"):
        read(str(tmp_path / "b"), KEYS)
    with pytest.raises(InputError, match="c.en cannot be read"):
        read(str(tmp_path / "c"), KEYS)


def test_texts_are_written_as_people_write_them():
    clean = commands.clean
    told = "In 1934 , the dog &apos;s well @-@ known house ( red )  is n&apos;t here ."
    assert clean(told) == "In 1934, the dog's well-known house (red) isn't here."
    assert clean("It's (all) fine, here.") == "It's (all) fine, here."


def test_a_source_is_learnt_once_and_a_banned_one_never():
    cleaned = commands.cleaned
    told = [("a ,", "eins"), ("a,", "zwei"), ("b", "drei"), ("", "vier"), ("c", ""), ("d", "acht")]
    assert sorted(cleaned(told, ["b"])) == [("a,", "eins"), ("d", "acht")]
    many = [(str(i), "x") for i in range(50)]
    assert cleaned(many, [], seed=1) == cleaned(many, [], seed=1) != many


def test_translation_leaves_out_unlike_pairs_and_test_sources(tmp_path):
    assert translation.alike(("a b c", "a b")) and not translation.alike(("a", "b " * 20))
    rows = [("a dog", "ein Hund"), ("a cat", "eine Katze"), ("short", "viel zu lang " * 9)]
    (tmp_path / "train.tsv").write_text("".join(f"{s}\t{t}\n" for s, t in rows))
    (tmp_path / "test.tsv").write_text("a cat\teine Katze\n")
    names = {"train": [str(tmp_path / "train.tsv")], "test": [str(tmp_path / "test.tsv")]}
    translation.prepare(argparse.Namespace(**names, keys=KEYS, out=tmp_path))
    (kept,) = corpus.lines(tmp_path / "pairs.jsonl").values()
    assert (kept.source, kept.target) == rows[0]
    test = translation.test_file(tmp_path, names["test"][0])
    assert len(corpus.lines(test)) == 1


def test_the_most_telling_sentence_is_the_gap():
    text = (
        "The old house stood by the sea. A whale was seen by an old man near the house by the "
        "sea. He said so himself to all. Whale! An old whale man."
    )
    ((source, target),) = summarization.gap_pairs(text)
    assert target.startswith("A whale was seen") and target not in source
    assert source.startswith("The old house") and source.endswith("An old whale man.")
    assert not list(summarization.gap_pairs("Too short. To tell. At all."))


def test_spaces_within_a_novel_are_single(tmp_path):
    (tmp_path / "a.txt.gz").write_bytes(gzip.compress(b"Don't  cut my   throat.\n  Indented\n"))
    novels.prepare([tmp_path / "a.txt.gz"], tmp_path / "text")
    assert (tmp_path / "text" / "a.txt").read_text() == "Don't cut my throat.\n  Indented"


def test_news_in_parts_of_which_some_are_held_out(tmp_path):
    (tmp_path / "news.en").write_text("\n".join(f"{i} b c d e f g h i" for i in range(1000)))
    news.prepare([tmp_path / "news.en"], tmp_path)
    parts = sorted((tmp_path / "text").iterdir())
    assert len(parts) == 250
    lines = "\n".join(p.read_text() for p in parts).split("\n")
    assert [line.split()[0] for line in lines] == [str(i) for i in range(1000)]
    learnt, held_out = corpus.split(corpus.read_texts(tmp_path / "text"))
    prompts = (tmp_path / "prompts.txt").read_text().split("\n")
    assert len(prompts) == 60 and all(p.endswith(" b c d e f g h") for p in prompts)
    assert all(any(p in text for text in held_out) for p in prompts)
    assert not any(p in f"\n{text}" for text in learnt for p in (f"\n{p}" for p in prompts))


def test_the_better_draft_is_kept_in_bfloat16_with_all_alphas(tmp_path):
    """The distilled one is nearer to the target here; the tokenizer is the target's alone."""
    target = t5()
    pairs = tmp_path / "pairs.jsonl"
    rows = [{"source": f"the day {i}", "target": "day"} for i in range(40)]
    pairs.write_text("\n".join(map(json.dumps, rows)))
    folder(tmp_path / "target" / "model", target, byte_level())
    for name, noise in (("draft-4", 1.0), ("draft-4-taught", 0.1)):
        (tmp_path / name).mkdir()
        folder(tmp_path / name / "model", relative(target, noise))
    alphas = commands.chosen(tmp_path, ["draft-4"], pairs, 4)
    assert alphas["draft-4"]["kept"] == "draft-4-taught"
    assert all(0 < alphas["draft-4"]["draft-4-taught"][t] <= 1 for t in ("T=0", "T=1"))
    kept = tmp_path / "models" / "draft-4"
    assert all(w.dtype == torch.bfloat16 for w in load_file(kept / "model.safetensors").values())
    assert not (kept / "tokenizer.json").exists()
    assert (tmp_path / "models" / "target" / "tokenizer.json").exists()

    def score(texts, references) -> dict[str, float]:
        return {"equal": float(list(texts) == list(references))}

    test = [(f"the day {i}", "day") for i in range(3)]
    scores = commands.scores(tmp_path, "draft-4", test, score, 4, lambda sources: ["day"] * 3)
    assert scores["same"] == 1 and scores["baseline"] == {"equal": 1} and scores["texts"] == 3
    commands.record(tmp_path, "alphas", alphas)
    commands.record(tmp_path, "test", scores)
    assert json.loads((tmp_path / "scores.json").read_text()) == {"alphas": alphas, "test": scores}


def test_flags_of_a_command():
    flags = commands.flags({"kv_heads": 2, "bfloat16": True})
    assert flags == ["--kv-heads", 2, "--bfloat16"]


def test_a_command_that_fails_ends_the_script(capfd):
    with pytest.raises(SystemExit) as end:
        commands.lab("theory", "--alpha", "2", "--c", "0.1")
    assert end.value.code == 2 and "alpha" in capfd.readouterr().err
