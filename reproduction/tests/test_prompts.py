"""Prompts of lines, TSV and JSONL, with references where there are."""

from __future__ import annotations

import gzip
import json

import pytest

from foretoken.errors import InputError
from reproduction.recipe import Prompts, RecipePrompt, read_prompts


def test_lines_and_their_limit(tmp_path):
    path = tmp_path / "prompts.txt"
    path.write_text("one\n\ntwo\nthree\n")
    assert read_prompts(Prompts(file=str(path))) == [
        RecipePrompt("one"),
        RecipePrompt("two"),
        RecipePrompt("three"),
    ]
    some = Prompts(file=str(path), limit=2, prefix="say: ")
    assert read_prompts(some) == [RecipePrompt("say: one"), RecipePrompt("say: two")]


def test_prompts_that_are_too_long_are_left_out(tmp_path):
    path = tmp_path / "prompts.txt"
    path.write_text("one\nthirteen\ntwo\nfour\n")
    parsed = read_prompts(Prompts(file=str(path), longest=4, limit=2))
    assert parsed == [RecipePrompt("one"), RecipePrompt("two")]
    with pytest.raises(InputError, match="holds 0 prompts of 2 characters at most"):
        read_prompts(Prompts(file=str(path), longest=2))


def test_tsv_zipped(tmp_path):
    path = tmp_path / "pairs.tsv.gz"
    path.write_bytes(gzip.compress(b"a house\tein Haus\na dog\tein Hund\n"))
    assert read_prompts(Prompts(file=str(path))) == [
        RecipePrompt("a house", "ein Haus"),
        RecipePrompt("a dog", "ein Hund"),
    ]


def test_jsonl_by_its_keys(tmp_path):
    path = tmp_path / "articles.jsonl"
    lines = [
        {"article": "long", "highlights": "short"},
        {"article": ["first", "second"]},
        {"article": [3, 4], "highlights": None},
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    parsed = read_prompts(Prompts(file=str(path), prompt="article", reference="highlights"))
    assert parsed == [RecipePrompt("long", "short"), RecipePrompt("first"), RecipePrompt([3, 4])]


@pytest.mark.parametrize(
    ("name", "text", "says"),
    [
        ("p.txt", "one\n", "holds 1 prompts; give 2 or more"),
        ("p.tsv", "a\tb\n\tc\n", "line 2: 2 columns, the first ''"),
        ("p.tsv", "a\tb\nc\td\te\n", "line 2: 3 columns, the first 'c'; give prompt<TAB>reference"),
        ("p.tsv", "a\tb\nc\nd\n", "2 of 3 prompts have no reference, the first 'c'; give all of"),
        ("p.jsonl", '{"prompt": "a"}\n{"text": "b"}\n', "line 2 has no 'prompt'"),
        ("p.jsonl", '{"prompt": "a"}\n{"prompt": 3}\n', "line 2: the prompt is 3"),
        ("p.jsonl", '{"prompt": "a"}\n{"prompt"\n', "line 2 has no 'prompt' .Expecting"),
        ("p.jsonl", '{"prompt": "a"}\n[1]\n', "line 2 has no 'prompt'"),
        ("p.gz", "no zip\nat all\n", "cannot be read"),
    ],
)
def test_mistakes_name_file_line_and_remedy(tmp_path, name, text, says):
    (tmp_path / name).write_text(text)
    with pytest.raises(InputError, match=says):
        read_prompts(Prompts(file=str(tmp_path / name)))


def test_no_file(tmp_path):
    with pytest.raises(InputError, match="there is no .*"):
        read_prompts(Prompts(file=str(tmp_path / "none.txt")))
