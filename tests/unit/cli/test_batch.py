"""`foretoken generate --output`: every line once, whatever breaks it off."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

import foretoken
from console import mistake
from foretoken.cli.batch_file import COPY_KEY_STRIDE, ResultsFile
from foretoken.errors import InputError

OPTIONS = ("--max-new-tokens", 6, "--temperature", 1, "--seed", 5, "--dtype", "float64")


def prompts(path: Path, *rows: object) -> tuple[object, ...]:
    file = path / "in.jsonl"
    file.write_text("\n".join(row if isinstance(row, str) else json.dumps(row) for row in rows))
    return ("--prompt-file", file, "--output", path / "out.jsonl")


def read(path: Path) -> dict[tuple[int, int], dict]:
    lines = (path / "out.jsonl").read_text().splitlines()
    named = {(row["line"], row["copy"]): row for row in map(json.loads, lines)}
    assert len(named) == len(lines)
    return named


ROWS = [{"prompt": f"It was {i}", "id": f"n{i}", "max_new_tokens": 3 + i % 9} for i in range(30)]


def test_results_are_those_of_generate(run, pair, base, tmp_path) -> None:
    result = run("generate", *prompts(tmp_path, *ROWS), *pair, *OPTIONS)
    assert result.code == 0 and "tokens/s, " in result.err and result.out == ""
    assert "% of draft tokens accepted" in result.err
    parsed = read(tmp_path)
    spec = foretoken.load(base / "target", base / "draft", dtype="float64")
    params = [foretoken.SamplingParams(1.0, max_new_tokens=r["max_new_tokens"]) for r in ROWS]
    completions = spec.generate([r["prompt"] for r in ROWS], params, gamma=2, seed=5)
    assert sorted(parsed) == [(i + 1, 0) for i in range(30)]
    for i, completion in enumerate(completions):
        row = parsed[i + 1, 0]
        assert (row["id"], row["text"], row["tokens"]) == (
            f"n{i}",
            completion.text,
            completion.tokens,
        )
        assert row["finish_reason"] == "length" and row["stats"]["target_calls"] > 0


def test_it_goes_on_where_it_was_broken_off(run, pair, tmp_path) -> None:
    kept = 17
    file = prompts(tmp_path, *ROWS)
    assert run("generate", *file, *pair, *OPTIONS).code == 0
    whole = read(tmp_path)
    out = tmp_path / "out.jsonl"
    lines = out.read_bytes().splitlines(keepends=True)
    out.write_bytes(b"".join(lines[:kept]) + lines[kept][:9])  # as a kill may leave it
    assert run("generate", *file, *pair, *OPTIONS).code == 0
    assert {n: row["tokens"] for n, row in read(tmp_path).items()} == {
        n: row["tokens"] for n, row in whole.items()
    }
    before = out.read_bytes()
    assert run("generate", *file, *pair, *OPTIONS).code == 0
    assert out.read_bytes() == before


def test_bad_lines_are_told_and_the_rest_is_done(run, pair, tmp_path) -> None:
    rows = [
        {"prompt": "a", "num_return_sequences": 2},
        "{broken",
        {"prompt": "b", "temprature": 1},
        {"prompt": [999]},
        "",
        {"prompt": "c", "suppress_tokens": list(range(320))},
        {"prompt": "d", "seed": 9},
    ]
    result = run("generate", *prompts(tmp_path, *rows), *pair, *OPTIONS)
    assert result.code == 1
    for message in (
        "line 2: ",
        "line 3: temprature is unknown here; did you mean temperature?",
        "line 4: prompt 0 holds the id 999",
    ):
        assert message in result.err
    parsed = read(tmp_path)
    assert sorted(parsed) == [(1, 0), (1, 1), (6, 0), (7, 0)]
    assert parsed[6, 0]["finish_reason"] == "error" and "suppress" in parsed[6, 0]["error"]
    assert parsed[7, 0]["seed"] == [9, 0] and parsed[1, 0]["seed"] == [5, 0]
    assert parsed[1, 1]["seed"] == [5, COPY_KEY_STRIDE]


def test_a_target_that_can_read_no_line_is_told_before_a_file_is_made(run, base, tmp_path) -> None:
    result = run("generate", "--target", base / "bare", *prompts(tmp_path, {"prompt": "It was"}))
    assert result.code == 2 and "has no tokenizer" in result.err.splitlines()[-1]
    assert not (tmp_path / "out.jsonl").exists()


def test_a_disk_that_fills_leaves_whole_lines_and_is_named(tmp_path, full_disk) -> None:
    path, text = tmp_path / "out.jsonl", "a" * 700
    with (
        full_disk(1000),
        pytest.raises(OSError, match="out.jsonl cannot be written: .*free space"),
        ResultsFile.open(path) as out,
    ):
        out.write((1, 0), "", {"text": text})
        out.write((2, 0), "", {"text": text})
    assert path.read_bytes().count(b"\n") == 1 and path.read_bytes().endswith(b"\n")
    with ResultsFile.open(path) as out:
        assert out.done == {(1, 0): ""}
        with pytest.raises(ValueError, match="not JSON compliant"):
            out.write((3, 0), "", {"text": float("nan")})
        out.write((2, 0), "", {"text": text})
    assert path.read_bytes().count(b"\n") == 2


def test_results_of_something_else_are_not_gone_on_with(run, pair, tmp_path) -> None:
    """Another prompt in a line, another order, seed or option: nothing is mixed."""
    file = prompts(tmp_path, *ROWS[:3])
    assert run("generate", *file, *pair, *OPTIONS).code == 0
    before = (tmp_path / "out.jsonl").read_bytes()
    again = run("generate", *file, *pair, *OPTIONS)
    assert again.code == 0 and "all 3 results are already there" in again.err
    says = "another prompt, seed, model or option"
    mistake(run("generate", *file, *pair, *OPTIONS, "--top-k", 3), says)
    mistake(run("generate", *file, *pair, *OPTIONS[:-4], "--seed", 6, *OPTIONS[-2:]), says)
    mistake(run("generate", *prompts(tmp_path, *ROWS[1:4]), *pair, *OPTIONS), says)
    assert (tmp_path / "out.jsonl").read_bytes() == before


def test_one_process_at_a_time_writes_a_file(tmp_path) -> None:
    pytest.importorskip("fcntl")
    with ResultsFile.open(tmp_path / "out.jsonl"):
        with pytest.raises(InputError, match="another process writes"):
            ResultsFile.open(tmp_path / "out.jsonl").__enter__()
    with ResultsFile.open(tmp_path / "out.jsonl"):
        pass


def test_what_is_no_file_is_refused(tmp_path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "other").write_text('{"line": 1}\n')
    for path, message in (
        (tmp_path / "other", "line 1 is not a result of this command; give another --output"),
        (tmp_path / "pipe", "not a regular file"),
        (tmp_path, "not a regular file"),
        (tmp_path / "nowhere" / "out.jsonl", "there is no folder"),
    ):
        with pytest.raises(InputError, match=message):
            ResultsFile.open(path).__enter__()


def test_parquet_in_and_out(run, pair, tmp_path) -> None:
    parquet = pytest.importorskip("pyarrow.parquet", reason="pyarrow is not installed")
    import pyarrow

    parquet.write_table(pyarrow.Table.from_pylist(ROWS[:5]), tmp_path / "in.parquet")
    files = ("--prompt-file", tmp_path / "in.parquet", "--output", tmp_path / "out.parquet")
    result = run("generate", *files, *pair, *OPTIONS)
    assert result.code == 0, result.err
    rows = parquet.read_table(tmp_path / "out.parquet").to_pylist()
    lines = read(tmp_path)  # beside it: what is gone on with
    assert [row["line"] for row in rows] == [1, 2, 3, 4, 5] and len(lines) == 5
    assert [json.loads(row["id"]) for row in rows] == [row["id"] for row in ROWS[:5]]
    assert [row["tokens"] for row in rows] == [lines[n, 0]["tokens"] for n in range(1, 6)]
    again = run("generate", *files, *pair, *OPTIONS)
    assert again.code == 0 and "all 5 results are already there" in again.err


def test_a_new_file_without_results_does_not_stay(tmp_path) -> None:
    path = tmp_path / "out.jsonl"
    with ResultsFile.open(path):
        assert path.exists()
    assert not path.exists()
    path.touch()
    with ResultsFile.open(path):
        pass
    assert path.exists()  # as it was
