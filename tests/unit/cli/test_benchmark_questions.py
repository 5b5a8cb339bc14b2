"""Questions of published benchmarks as prompts. All questions are invented."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from foretoken.cli.benchmark_questions import PLACEHOLDER
from foretoken.cli.prompts import MESSAGE_KEYS, read_benchmark_prompts, read_prompts
from foretoken.errors import InputError

# the columns of the published files, and of the files that NVIDIA's two scripts write
COLUMNS = {"sub_category": "sorting", "source": "a/b", "src_id": "b_1", "difficulty": "easy"}
COLUMNS |= {"multiturn": True}


def ask(*turns: str, **columns: Any) -> dict[str, Any]:
    return {"question_id": "q1", "category": "coding", **COLUMNS, "turns": list(turns)} | columns


def ask_in_messages(*turns: str) -> dict[str, Any]:
    messages = [{"role": "user", "content": turn} for turn in turns]
    return {"question_id": "q2", "category": "qa", **COLUMNS, "messages": messages}


def write(tmp_path: Path, *rows: dict[str, Any]) -> Path:
    file = tmp_path / "questions.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


def test_the_first_turn_is_the_prompt(tmp_path: Path):
    file = write(tmp_path, ask("Sort 3, 1.", "Why so?"), ask_in_messages("Who?", "When?"))
    first, second = read_benchmark_prompts(file, None)
    assert first.messages == [{"role": "user", "content": "Sort 3, 1."}]
    assert (first.category, first.id) == ("coding", "q1")
    assert second.messages == [{"role": "user", "content": "Who?"}]
    assert (second.category, second.id) == ("qa", "q2") and not second.sampling
    system = {"role": "system", "content": "Be brief."}
    row = ask_in_messages("Who?", "When?")
    row["messages"].insert(0, system)
    (line,) = read_benchmark_prompts(write(tmp_path, row), None)
    assert line.messages == [system, {"role": "user", "content": "Who?"}]


def test_questions_in_parquet(tmp_path: Path):
    parquet = pytest.importorskip("pyarrow.parquet", reason="pyarrow is not installed")
    import pyarrow

    rows = [ask("Sort 3, 1.", "Why so?"), ask("Add 1.", sub_category=None, difficulty=None)]
    parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "test.parquet")
    lines = read_benchmark_prompts(tmp_path / "test.parquet", None)
    assert [line.messages[0]["content"] for line in lines] == ["Sort 3, 1.", "Add 1."]
    assert {line.category for line in lines} == {"coding"}


def test_the_first_prompts_of_each_category(tmp_path: Path):
    rows = [{"prompt": f"{i}", "category": name} for i, name in enumerate("aabab")]
    file = write(tmp_path, *rows)
    for limit, prompts in ((1, "02"), (2, "0124"), (3, "01234"), (None, "01234")):
        assert [line.prompt for line in read_benchmark_prompts(file, limit)] == list(prompts)
    bare = write(tmp_path, {"prompt": "a"}, {"prompt": "b"})
    assert [line.prompt for line in read_benchmark_prompts(bare, 1)] == ["a"]
    with pytest.raises(InputError, match="limit is 0; give the number of prompts"):
        read_benchmark_prompts(bare, 0)


@pytest.mark.parametrize(
    ("row", "error"),
    [
        (ask(f"{PLACEHOLDER}\n\n{{question}}"), "the prompt is missing, because its source"),
        (ask(), r"turns is \[\]; give a list of strings"),
        (ask("a", turns="a"), "turns is 'a'; give a list of strings"),
        ({"question_id": 1, "category": "a"}, "the question has no turns and no messages"),
        (ask_in_messages(), "the conversation is empty"),
        (
            ask_in_messages() | {"messages": [{"role": "system", "content": "a"}]},
            "the question has no message of the user",
        ),
        (ask("a", category=3), "category is 3; give a string"),
    ],
)
def test_invalid_questions(tmp_path: Path, row: dict[str, Any], error: str):
    with pytest.raises(InputError, match=f"questions.jsonl, line 2: {error}"):
        read_benchmark_prompts(write(tmp_path, ask("a"), row), None)


def test_categories_are_complete_or_absent(tmp_path: Path):
    file = write(tmp_path, ask("a"), {"prompt": "a"})
    with pytest.raises(InputError, match="1 lines have no category; give each line a category"):
        read_benchmark_prompts(file, None)


def test_other_commands_refuse_questions(tmp_path: Path):
    with pytest.raises(InputError, match="line 1: question_id is unknown here"):
        read_prompts(None, write(tmp_path, ask("a")), MESSAGE_KEYS)
