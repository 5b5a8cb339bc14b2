"""The results' file: resumed, cut off, overtaken, and whole on a full disk."""

from __future__ import annotations

import pytest

from foretoken.lab.report.results import Line, Results


def line(draft: str, alpha: float = 0.5, failed: str | None = None) -> Line:
    return Line(
        recipe="tables",
        of="digest",
        experiment="acceptance",
        case={"draft": draft, "temperature": 1.0},
        seconds=2.0,
        result={} if failed else {"alpha": alpha},
        failed=failed,
    )


def alpha(results: Results, draft: str) -> float | None:
    row = results.row("digest", "acceptance", {"temperature": 1.0, "draft": draft})
    return None if row is None else row.result.get("alpha")


def test_what_is_there_is_read_again(tmp_path):
    path = tmp_path / "results.jsonl"
    first = Results(path)
    assert alpha(first, "a") is None and not path.exists()
    first.add(line("a"))
    first.add(line("b", failed="no room"))
    again = Results(path)
    assert alpha(again, "a") == 0.5
    row = again.row("digest", "acceptance", line("b").case)
    assert row is not None and row.failed == "no room" and row.seconds == 2.0
    assert again.row("another", "acceptance", line("a").case) is None
    assert again.seconds("digest", "acceptance") == [2.0] and again.seconds("another") == []
    assert again.seconds("digest", "walltime") == [] and again.seconds("digest") == [2.0]


def test_the_latest_of_a_recipe_and_where_it_was_measured(tmp_path):
    results = Results(tmp_path / "results.jsonl")
    assert results.last("tables") is None and results.origin("digest") == ""
    here = {"machine": "a machine", "date": "2026-11-23"}
    for draft, changed in [
        ("a", {"of": "old"}),
        ("b", here),
        ("c", here | {"date": "2026-11-24"}),
        ("d", here | {"date": "2026-11-25"}),
    ]:
        results.add(line(draft).model_copy(update=changed))
    for again in (results, Results(results.path)):
        assert again.last("tables") == "digest" and again.last("another") is None
        assert again.origin("digest") == "2026-11-23 to 2026-11-25, a machine"
        assert again.origin("old") == "not recorded, not recorded"
    results.add(line("a").model_copy(update={"of": "old"}))  # measured again
    assert results.last("tables") == Results(results.path).last("tables") == "old"


def test_a_later_line_takes_the_place_of_one_before(tmp_path):
    path = tmp_path / "results.jsonl"
    first = Results(path)
    first.add(line("a", failed="no room"))
    first.add(line("a", 0.7))
    assert alpha(first, "a") == alpha(Results(path), "a") == 0.7


@pytest.mark.parametrize("cut", [1, 30])
def test_a_line_cut_off_is_dropped_and_the_next_follows_whole(tmp_path, cut):
    path = tmp_path / "results.jsonl"
    first = Results(path)
    first.add(line("a"))
    first.add(line("b"))
    path.write_bytes(path.read_bytes()[:-cut])  # 1: the end of the line alone
    again = Results(path)
    assert alpha(again, "a") == 0.5 and alpha(again, "b") is None
    again.add(line("c", 0.9))
    last = Results(path)
    assert (alpha(last, "a"), alpha(last, "b"), alpha(last, "c")) == (0.5, None, 0.9)


@pytest.mark.parametrize("wrong", [b"{}\n", b'{"recipe": 1}\n', b"[]\n", b"\xff\xfe\n"])
def test_what_follows_a_line_that_is_none_is_not_read(tmp_path, wrong):
    path = tmp_path / "results.jsonl"
    first = Results(path)
    first.add(line("a"))
    whole = path.read_bytes()
    path.write_bytes(whole + wrong + whole)
    assert alpha(Results(path), "a") == 0.5 and path.read_bytes() == whole


def test_a_full_disk_leaves_results_whole(tmp_path, full_disk):
    path = tmp_path / "results.jsonl"
    first = Results(path)
    first.add(line("a"))
    whole = path.read_bytes()
    with (
        full_disk(len(whole) + 40),
        pytest.raises(OSError, match="results.jsonl cannot be written"),
    ):
        first.add(line("b"))
    assert path.read_bytes() == whole and alpha(first, "b") is None
    first.add(line("b"))
    assert alpha(Results(path), "b") == 0.5


def test_a_folder_in_the_files_place(tmp_path):
    with pytest.raises(OSError, match="cannot be written"):
        Results(tmp_path)
