"""The results' file: resumed, cut off, overtaken, and whole on a full disk."""

from __future__ import annotations

import pytest

from reproduction.results import ResultFile, ResultLine, ResultOrigin


def line(draft: str, alpha: float = 0.5, failed: str | None = None) -> ResultLine:
    return ResultLine(
        recipe="tables",
        of="digest",
        experiment="acceptance",
        case={"draft": draft, "temperature": 1.0},
        seconds=2.0,
        result={} if failed else {"alpha": alpha},
        failed=failed,
    )


def alpha(results: ResultFile, draft: str) -> float | None:
    row = results.row("digest", "acceptance", {"temperature": 1.0, "draft": draft})
    return None if row is None else row.result.get("alpha")


def test_what_is_there_is_read_again(tmp_path):
    path = tmp_path / "results.jsonl"
    first = ResultFile(path)
    assert alpha(first, "a") is None and not path.exists()
    first.add(line("a"))
    first.add(line("b", failed="no room"))
    again = ResultFile(path)
    assert alpha(again, "a") == 0.5
    row = again.row("digest", "acceptance", line("b").case)
    assert row is not None and row.failed == "no room" and row.seconds == 2.0
    assert again.row("another", "acceptance", line("a").case) is None


def test_the_latest_of_a_recipe_and_what_it_was_made_with(tmp_path):
    results = ResultFile(tmp_path / "results.jsonl")
    assert results.last("tables") is None and results.origins("digest") == []
    first = ResultOrigin(
        of="digest", recipe={}, cases=2, machine="a", date="2026-11-23", command="b"
    )
    second = first.model_copy(update={"date": "2026-11-24"})
    for each in (line("a").model_copy(update={"of": "old"}), first, line("b"), second):
        results.add(each)
    for again in (results, ResultFile(results.path)):
        assert again.last("tables") == "digest" and again.last("another") is None
        assert again.origins("digest") == [first, second] and again.origins("old") == []
        assert again.cases("digest") == [("acceptance", line("b").case)]
    results.add(line("a").model_copy(update={"of": "old"}))  # measured again
    assert results.last("tables") == ResultFile(results.path).last("tables") == "old"


def test_a_last_line_without_its_end_is_read(tmp_path):
    path = tmp_path / "results.jsonl"
    first = ResultFile(path)
    first.add(line("a"))
    first.add(line("b"))
    path.write_bytes(path.read_bytes()[:-1])
    again = ResultFile(path)
    assert (alpha(again, "a"), alpha(again, "b"), again.unreadable) == (0.5, 0.5, [])
    again.add(line("c", 0.9))
    again.add(line("d", 0.8))
    last = ResultFile(path)
    assert [alpha(last, draft) for draft in "abcd"] == [0.5, 0.5, 0.9, 0.8]
    assert last.unreadable == []


@pytest.mark.parametrize("cut", [2, 30])
def test_a_line_cut_off_is_passed_over_and_the_next_follows_whole(tmp_path, cut):
    path = tmp_path / "results.jsonl"
    first = ResultFile(path)
    first.add(line("a"))
    first.add(line("b"))
    path.write_bytes(path.read_bytes()[:-cut])
    again = ResultFile(path)
    assert alpha(again, "a") == 0.5 and alpha(again, "b") is None
    again.add(line("c", 0.9))
    last = ResultFile(path)
    assert (alpha(last, "a"), alpha(last, "b"), alpha(last, "c")) == (0.5, None, 0.9)


@pytest.mark.parametrize(
    "wrong", [b"{}", b'{"recipe": 1}', b"[]", b"\xff\xfe", b"<<<<<<< HEAD", b'{"command": 1}']
)
def test_what_cannot_be_read_is_passed_over_and_stays(tmp_path, wrong):
    path = tmp_path / "results.jsonl"
    first = ResultFile(path)
    first.add(line("a"))
    first.add(line("b"))
    one, other = path.read_bytes().splitlines(keepends=True)
    content = wrong + b"\n" + one + b"\n" + wrong + b"\n" + other
    path.write_bytes(content)
    again = ResultFile(path)
    assert again.unreadable == [1, 4]
    assert alpha(again, "a") == alpha(again, "b") == 0.5 and path.read_bytes() == content
    again.add(line("c"))
    assert path.read_bytes().startswith(content) and alpha(ResultFile(path), "c") == 0.5


def test_a_full_disk_leaves_results_whole(tmp_path, full_disk):
    path = tmp_path / "results.jsonl"
    first = ResultFile(path)
    first.add(line("a"))
    whole = path.read_bytes()
    with (
        full_disk(len(whole) + 40),
        pytest.raises(OSError, match="results.jsonl cannot be written"),
    ):
        first.add(line("b"))
    assert path.read_bytes() == whole and alpha(first, "b") is None
    first.add(line("b"))
    assert alpha(ResultFile(path), "b") == 0.5


def test_a_folder_in_the_files_place(tmp_path):
    with pytest.raises(OSError, match="cannot be written"):
        ResultFile(tmp_path)
