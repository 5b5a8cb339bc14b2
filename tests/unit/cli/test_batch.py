"""`foretoken generate --output`: every line once, whatever breaks it off."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from rich.progress import TimeRemainingColumn

import foretoken
from console import Run, mistake
from foretoken.cli.batch import Results
from foretoken.errors import InputError
from tiny import byte_level, folder, llama

OPTIONS = ("--max-new-tokens", 6, "--temperature", 1, "--seed", 5, "--dtype", "float64")


@pytest.fixture
def run(console: Run) -> Run:
    return console


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    base = tmp_path_factory.mktemp("results")
    folder(base / "target", llama(320, eos_token_id=None), byte_level())
    folder(base / "draft", llama(320, seed=1, num_hidden_layers=1), byte_level())
    return base


@pytest.fixture
def pair(base: Path) -> tuple[object, ...]:
    return ("--target", base / "target", "--draft", base / "draft", "--gamma", 2)


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
    assert result.code == 0 and "tokens/s" in result.err and result.out == ""
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


@pytest.mark.daily(17)
@pytest.mark.parametrize("kept", [0, 1, 17])
def test_it_goes_on_where_it_was_broken_off(run, pair, tmp_path, kept) -> None:
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
        {"prompt": "a"},
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
    assert sorted(parsed) == [(1, 0), (6, 0), (7, 0)]
    assert parsed[6, 0]["finish_reason"] == "error" and "suppress" in parsed[6, 0]["error"]
    assert parsed[7, 0]["seed"] == [9, 0] and parsed[1, 0]["seed"] == [5, 0]


def test_several_texts_of_a_line(run, pair, tmp_path) -> None:
    file = prompts(tmp_path, {"prompt": "a", "num_return_sequences": 3}, {"prompt": "a"})
    assert run("generate", *file, *pair, *OPTIONS).code == 0
    parsed = read(tmp_path)
    assert sorted(parsed) == [(1, 0), (1, 1), (1, 2), (2, 0)]
    assert len({tuple(row["seed"]) for row in parsed.values()}) == 4


def test_what_is_refused(run, pair, tmp_path) -> None:
    file = prompts(tmp_path, {"prompt": "a"})
    mistake(run("generate", "a", "--output", tmp_path / "x"), "--output is for a file of prompts")
    mistake(run("generate", *file, "--json"), "--output is for a file of prompts alone")
    unused = run("generate", *file, *pair, "--system", "Be brief.")
    mistake(unused, "--system is for messages, and there are none")
    (tmp_path / "out.jsonl").write_text('{"line": 1}\n')
    message = "out.jsonl, line 1 is no result of this command; give another --output"
    mistake(run("generate", *file, *pair), message)


def test_a_disk_that_fills_leaves_whole_lines_and_is_named(tmp_path, full_disk) -> None:
    path, text = tmp_path / "out.jsonl", "a" * 700
    with (
        full_disk(1000),
        pytest.raises(OSError, match="out.jsonl cannot be written: .*make room"),
        Results.opened(path) as out,
    ):
        out.write((1, 0), "", {"text": text})
        out.write((2, 0), "", {"text": text})
    assert path.read_bytes().count(b"\n") == 1 and path.read_bytes().endswith(b"\n")
    with Results.opened(path) as out:
        assert out.done == {(1, 0): ""}
        out.write((2, 0), "", {"text": text})
    assert path.read_bytes().count(b"\n") == 2


def test_a_disk_without_room_leaves_whole_lines(tmp_path) -> None:
    with Results.opened(tmp_path / "out.jsonl") as out:
        out.write((1, 0), "", {"text": "a"})

        class Full:
            def __init__(self, file) -> None:
                self.file = file

            def write(self, line: bytes) -> None:
                self.file.write(line[:5])
                raise OSError(28, "No space left on device")

            def __getattr__(self, name: str):
                return getattr(self.file, name)

        out.out = Full(out.out)
        with pytest.raises(OSError, match="out.jsonl cannot be written: .*No space left"):
            out.write((2, 0), "", {"text": "b"})
        assert out.done == {(1, 0): ""}
    with Results.opened(tmp_path / "out.jsonl") as out:
        assert out.done == {(1, 0): ""}
        with pytest.raises(ValueError, match="not JSON compliant"):
            out.write((3, 0), "", {"text": float("nan")})
    (tmp_path / "other").write_text("hello\n")
    with pytest.raises(InputError, match="line 1 is no result"), Results.opened(tmp_path / "other"):
        pass


def test_results_of_something_else_are_not_gone_on_with(run, pair, tmp_path) -> None:
    """Another prompt in a line, another order, seed or option: nothing is mixed."""
    file = prompts(tmp_path, *ROWS[:3])
    assert run("generate", *file, *pair, *OPTIONS).code == 0
    before = (tmp_path / "out.jsonl").read_bytes()
    again = run("generate", *file, *pair, *OPTIONS)
    assert again.code == 0 and "all 3 texts were there" in again.err
    says = "another prompt, seed, model or option"
    mistake(run("generate", *file, *pair, *OPTIONS, "--top-k", 3), says)
    mistake(run("generate", *file, *pair, *OPTIONS[:-4], "--seed", 6, *OPTIONS[-2:]), says)
    mistake(run("generate", *prompts(tmp_path, *ROWS[1:4]), *pair, *OPTIONS), says)
    assert (tmp_path / "out.jsonl").read_bytes() == before


def test_one_process_at_a_time_writes_a_file(tmp_path) -> None:
    pytest.importorskip("fcntl")
    with Results.opened(tmp_path / "out.jsonl"):
        with pytest.raises(InputError, match="another process writes"):
            Results.opened(tmp_path / "out.jsonl").__enter__()
    with Results.opened(tmp_path / "out.jsonl"):
        pass


def test_what_is_no_file_is_refused(tmp_path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for path, message in (
        (tmp_path / "pipe", "no file"),
        (tmp_path, "no file"),
        (tmp_path / "nowhere" / "out.jsonl", "there is no folder"),
    ):
        with pytest.raises(InputError, match=message):
            Results.opened(path).__enter__()


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
    assert again.code == 0 and "all 5 texts were there" in again.err


def test_a_folder_holds_results(run, pair, tmp_path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "in.jsonl").write_text(json.dumps(ROWS[0]))
    files = ("--prompt-file", tmp_path / "in.jsonl", "--output", tmp_path / "out")
    assert run("generate", *files, *pair, *OPTIONS).code == 0
    assert (tmp_path / "out" / "results.jsonl").read_text().count("\n") == 1


def test_a_new_file_without_results_does_not_stay(tmp_path) -> None:
    path = tmp_path / "out.jsonl"
    with Results.opened(path):
        assert path.exists()
    assert not path.exists()
    path.touch()
    with Results.opened(path):
        pass
    assert path.exists()  # as it was


def test_the_bar_has_tokens_a_second_acceptance_and_the_time_left(
    run, pair, tmp_path, monkeypatch
) -> None:
    from foretoken.cli import batch

    updates: list[dict] = []

    class Watched(batch.Progress):
        def update(self, task, **fields):
            updates.append(fields)
            super().update(task, **fields)

    monkeypatch.setattr(batch, "Progress", Watched)
    assert run("generate", *prompts(tmp_path, *ROWS[:2]), *pair, *OPTIONS).code == 0
    assert len(updates) == 2 and "tokens/s, " in updates[-1]["speed"]
    assert "% of draft tokens accepted" in updates[-1]["speed"]
    assert any(isinstance(each, TimeRemainingColumn) for each in batch._bar().columns)
