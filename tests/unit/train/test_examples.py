"""Examples from files."""

from __future__ import annotations

import json

import pytest

from foretoken.errors import InputError
from foretoken.train import corpus
from foretoken.train.corpus import PROMPT_TOKENS, read_examples
from tiny import TEXT, byte_level

LENGTH = 8


def lines(path, rows) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def test_text_is_cut_into_windows(tmp_path):
    (tmp_path / "a.txt").write_text(TEXT * 40, encoding="utf-8")
    parsed = read_examples(tmp_path, byte_level(), LENGTH, encoder_decoder=False)
    train, held_out = corpus.split_texts(corpus.read_texts(tmp_path))
    for examples, texts in ((parsed.train, train), (parsed.held_out, held_out)):
        ids = corpus.encode(texts, byte_level()).tolist()
        joined = [int(t) for e in examples for t in (*e.prompt, *e.reference)]
        assert joined == ids[: len(joined)] and len(ids) - len(joined) < PROMPT_TOKENS + LENGTH
        assert all(len(e.prompt) == PROMPT_TOKENS and len(e.reference) == LENGTH for e in examples)


def test_pairs_end_where_their_target_ends_or_is_long(tmp_path):
    path = tmp_path / "pairs.jsonl"
    rows = [{"source": "the sea", "target": "old"}, {"source": "day", "target": TEXT}]
    lines(path, [*rows, {"source": "It was"}])
    tokenizer = byte_level()
    for encoder_decoder in (False, True):
        examples = read_examples(path, tokenizer, LENGTH, encoder_decoder=encoder_decoder)
        (first,), (second, third) = examples.held_out, examples.train
        assert [first.prompt, third.prompt] == [
            tokenizer("the sea").input_ids,
            tokenizer("It was").input_ids,
        ]
        assert second.reference == tokenizer(TEXT).input_ids[:LENGTH] and third.reference == []
    assert read_examples(path, tokenizer, LENGTH, encoder_decoder=False).held_out[0].reference == [
        *tokenizer("old").input_ids, tokenizer.eos_token_id
    ]  # fmt: skip


def test_pairs_on_both_sides_of_a_tab(tmp_path):
    rows = [("the sea", "old"), ("day", "It was")]
    (tmp_path / "a.tsv").write_text("".join(f"{s}\t {t}\n\n" for s, t in rows))
    lines(tmp_path / "a.jsonl", [{"source": s, "target": t} for s, t in rows])
    tsv, jsonl = (
        read_examples(tmp_path / name, byte_level(), LENGTH, encoder_decoder=True)
        for name in ("a.tsv", "a.jsonl")
    )
    assert (tsv.train, tsv.held_out) == (jsonl.train, jsonl.held_out)
    (tmp_path / "a.tsv").write_text("the sea\told\nday\tIt\twas\n")
    with pytest.raises(InputError, match="a.tsv, line 2: 3 columns"):
        read_examples(tmp_path / "a.tsv", byte_level(), LENGTH, encoder_decoder=True)


def test_plain_lines_are_sources_and_one_in_sixteen_is_held_out(tmp_path):
    path = tmp_path / "sources.txt"
    path.write_text("\n".join(["It was", "", *[f"the day {i}" for i in range(17)]]))
    examples = read_examples(path, byte_level(), LENGTH, encoder_decoder=True)
    assert len(examples.held_out) == 2 and len(examples.train) == 16
    assert examples.held_out[0].prompt == byte_level()("It was").input_ids
    assert not any(e.reference for e in examples.train)


@pytest.mark.parametrize(
    "row, said",
    [
        ("no json", "line 2: it is not valid JSON"),
        ('{"target": "a"}', "line 2: source: it is missing"),
        ('{"source": "a", "other": 1}', "line 2: other: it is unknown"),
        ('{"source": 3}', "line 2: source: it must be text"),
        ('{"source": "", "target": "a"}', "a.jsonl, line 2: the source is empty; give a nonempty"),
    ],
)
def test_an_invalid_line_is_named(tmp_path, row, said):
    (tmp_path / "a.jsonl").write_text('{"source": "a"}\n' + row)
    with pytest.raises(InputError, match=said) as error:
        read_examples(tmp_path / "a.jsonl", byte_level(), LENGTH, encoder_decoder=True)
    assert "\n" not in str(error.value)


def test_too_little_missing_and_unreadable(tmp_path):
    (tmp_path / "a.txt").write_text("It was")
    (tmp_path / "b.txt").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(InputError, match="0 examples for training"):
        read_examples(tmp_path / "a.txt", byte_level(), LENGTH, encoder_decoder=False)
    with pytest.raises(InputError, match="1 held out"):
        read_examples(tmp_path / "a.txt", byte_level(), LENGTH, encoder_decoder=True)
    with pytest.raises(InputError, match="there is no"):
        read_examples(tmp_path / "c.txt", byte_level(), LENGTH, encoder_decoder=True)
    with pytest.raises(InputError, match="b.txt cannot be read"):
        read_examples(tmp_path / "b.txt", byte_level(), LENGTH, encoder_decoder=True)
