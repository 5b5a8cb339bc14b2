"""What the stand-ins' scripts make of texts, and the commands that they run."""

from __future__ import annotations

import gzip
import json
import subprocess
from itertools import pairwise

import pytest
import typer

from foretoken.errors import InputError
from foretoken.train import corpus
from reproduction import standins

KEYS = ("en", "de")


@pytest.fixture
def ran(monkeypatch) -> list[list[str]]:
    """The commands that a script would run."""
    commands: list[list[str]] = []

    def noted(command: list[str]) -> subprocess.CompletedProcess[bytes]:
        commands.append(command[2:])
        return subprocess.CompletedProcess(command, 0)

    monkeypatch.setattr(standins.subprocess, "run", noted)
    return commands


def test_pairs_are_read_from_every_kind_of_file(tmp_path):
    read = standins.read
    (tmp_path / "a.jsonl").write_text('{"en": "one", "de": "eins"}\n{"en": "two", "de": "zwei"}\n')
    (tmp_path / "b.en").write_text("one\ntwo\n")
    (tmp_path / "b.de.gz").write_bytes(gzip.compress(b"eins\nzwei\n"))
    expected = [("one", "eins"), ("two", "zwei")]
    for name in ("a.jsonl", "b"):
        assert read(str(tmp_path / name), KEYS) == expected
    (tmp_path / "b.en").write_text("one\n")
    with pytest.raises(InputError, match="has 1 sources and 2 targets"):
        read(str(tmp_path / "b"), KEYS)
    with pytest.raises(InputError, match="c.en cannot be read"):
        read(str(tmp_path / "c"), KEYS)


def test_texts_are_written_as_people_write_them():
    clean = standins.clean
    told = "In 1934 , the dog &apos;s well @-@ known house ( red )  is n&apos;t here ."
    assert clean(told) == "In 1934, the dog's well-known house (red) isn't here."
    assert clean("It's (all) fine, here.") == "It's (all) fine, here."


def test_a_source_is_learnt_once_and_a_banned_one_never():
    cleaned = standins.cleaned
    told = [("a ,", "eins"), ("a,", "zwei"), ("b", "drei"), ("", "vier"), ("c", ""), ("d", "acht")]
    assert sorted(cleaned(told, ["b"])) == [("a,", "eins"), ("d", "acht")]
    many = [(str(i), "x") for i in range(50)]
    assert cleaned(many, [], seed=1) == cleaned(many, [], seed=1) != many


def test_translation_leaves_out_unlike_pairs_and_test_sources(tmp_path, ran):
    assert standins.alike(("a b c", "a b")) and not standins.alike(("a", "b " * 20))
    rows = [("a dog", "ein Hund"), ("a cat", "eine Katze"), ("short", "viel zu lang " * 9)]
    for name, pairs in (("train", rows), ("test", rows[1:2])):
        lines = [json.dumps({"en": source, "de": target}) for source, target in pairs]
        (tmp_path / f"{name}.jsonl").write_text("\n".join(lines))
    names = [str(tmp_path / f"{name}.jsonl") for name in ("train", "test")]
    standins.translation(names[:1], tmp_path / "out", names[1:], distill_steps=7)
    (kept,) = corpus.read_lines(tmp_path / "out" / "pairs.jsonl").values()
    assert (kept.source, kept.target) == rows[0]
    trained = [line for line in ran if line[:3] == ["reproduction", "train", "seq2seq"]]
    taught = [line for line in ran if line[:3] == ["foretoken", "train", "distill"]]
    assert len(trained) == 4 and "--tokenizer" in trained[1] and "--hidden" in trained[1]
    assert len(taught) == 3 and "--steps=7" in [f"{a}={b}" for a, b in pairwise(taught[0])]


def test_news_in_parts_of_which_some_are_held_out(tmp_path, ran):
    (tmp_path / "news.en").write_text("\n".join(f"{i} b c d e f g h i" for i in range(1000)))
    standins.news([tmp_path / "news.en"], tmp_path)
    parts = sorted((tmp_path / "text").iterdir())
    assert len(parts) == 250
    lines = "\n".join(p.read_text() for p in parts).split("\n")
    assert [line.split()[0] for line in lines] == [str(i) for i in range(1000)]
    learnt, held_out = corpus.split_texts(corpus.read_texts(tmp_path / "text"))
    prompts = (tmp_path / "prompts.txt").read_text().split("\n")
    assert len(prompts) == 60 and all(p.endswith(" b c d e f g h") for p in prompts)
    assert all(any(p in text for text in held_out) for p in prompts)
    assert not any(p in f"\n{text}" for text in learnt for p in (f"\n{p}" for p in prompts))


def test_baselines_are_scored(tmp_path, capsys):
    (tmp_path / "known.jsonl").write_text(
        '{"source": "the old house", "target": "das alte Haus"}\n'
    )
    (tmp_path / "test.jsonl").write_text('{"en": "an old house", "de": "das alte Haus"}\n')
    standins.look_up(str(tmp_path / "known.jsonl"), [str(tmp_path / "test.jsonl")])
    assert "test.jsonl: bleu 0.0, chrf 100.0" in capsys.readouterr().out  # no 4-gram for BLEU
    (tmp_path / "a.jsonl").write_text('{"article": "One. Two. Three. Four.", "highlights": "One."}')
    standins.lead([str(tmp_path / "a.jsonl")], sentences=1)
    assert "rouge1 100.0, rouge2 0.0, rougeL 100.0" in capsys.readouterr().out


def test_the_flags_of_a_command(ran):
    standins.execute("reproduction", "theory", c_hat=0.5, as_json=True, quick=False)
    assert ran == [["reproduction", "theory", "--c-hat", "0.5", "--as-json"]]


def test_a_command_that_fails_ends_the_script(capfd):
    with pytest.raises(typer.Exit) as end:
        standins.execute("reproduction", "theory", alpha=2, c=0.1)
    assert end.value.exit_code == 2 and "alpha" in capfd.readouterr().err
