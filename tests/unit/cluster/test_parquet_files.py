"""Parquet in and out holds what the lines of JSON hold."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from foretoken.errors import InputError

pa = pytest.importorskip("pyarrow", reason="pyarrow is not installed")
from pyarrow import parquet  # noqa: E402

from foretoken.cluster import parquet_files  # noqa: E402


def test_rows_are_lines_without_what_is_null(tmp_path: Path) -> None:
    rows = [
        {"prompt": "a", "id": 1, "messages": None},
        {"prompt": None, "id": None, "messages": [{"role": "user", "content": "é"}]},
    ]
    parquet.write_table(pa.Table.from_pylist(rows), tmp_path / "in.parquet")
    lines = [json.loads(line) for line in parquet_files.read_json_lines(tmp_path / "in.parquet")]
    assert lines == [{k: v for k, v in row.items() if v is not None} for row in rows]


def test_what_is_no_parquet(tmp_path: Path) -> None:
    (tmp_path / "in.parquet").write_text("prompt")
    for name in ("in.parquet", "nowhere.parquet"):
        with pytest.raises(InputError, match=f"{name} cannot be read as Parquet"):
            parquet_files.read_json_lines(tmp_path / name)


def test_results_are_all_there_and_in_order(tmp_path: Path) -> None:
    rows = [
        {"line": n, "copy": 0, "id": [n], "text": "é" * n, "tokens": [n, 0], "seed": [2**63, n]}
        | {"finish_reason": "stop", "stop_reason": stop, "error": None, "stats": {"alpha": None}}
        for n, stop in ((3, "x"), (1, 7), (2, None))
    ]
    (tmp_path / "out.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    parquet_files.write_parquet(tmp_path / "out.jsonl", tmp_path / "out.parquet")
    records = parquet.read_table(tmp_path / "out.parquet").to_pylist()
    for row in records:
        row |= {name: json.loads(row[name]) for name in ("id", "stop_reason", "stats")}
    assert records == sorted(rows, key=lambda row: row["line"])
    assert [path.name for path in tmp_path.iterdir() if "part" in path.suffixes] == []
