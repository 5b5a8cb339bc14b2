"""Parquet files of prompts and of results, beside lines of JSON."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet

from foretoken.errors import InputError, one_line
from foretoken.storage.files import write

KNOWN = {  # columns of results; what else a line has is a column of JSON
    "line": pyarrow.int64(),
    "copy": pyarrow.int64(),
    "text": pyarrow.string(),
    "tokens": pyarrow.list_(pyarrow.int64()),
    "finish_reason": pyarrow.string(),
    "error": pyarrow.string(),
    "seed": pyarrow.list_(pyarrow.uint64()),
}


def lines(file: Path) -> list[str]:
    """The rows of a file as lines of JSON, without what is null. InputError where it cannot be
    read."""
    try:
        rows: list[dict[str, Any]] = pyarrow.parquet.read_table(file).to_pylist()
        present = [
            {name: value for name, value in row.items() if value is not None} for row in rows
        ]
        return [json.dumps(row) for row in present]
    except (OSError, TypeError, pyarrow.ArrowException) as error:
        raise InputError(f"{file} cannot be read as Parquet: {one_line(error)}") from None


def convert(results: Path, file: Path) -> None:
    """Results, lines of JSON, as a Parquet file, by line and copy; whole or not at all."""
    rows = [json.loads(line) for line in results.read_bytes().splitlines()]
    rows.sort(key=lambda row: (row["line"], row["copy"]))
    names = dict.fromkeys([*KNOWN, *(name for row in rows for name in row)])
    columns = {name: [row.get(name) for row in rows] for name in names}
    arrays = {
        name: pyarrow.array(
            values if name in KNOWN else [json.dumps(value) for value in values],
            KNOWN.get(name, pyarrow.string()),
        )
        for name, values in columns.items()
    }
    out = io.BytesIO()
    pyarrow.parquet.write_table(pyarrow.table(arrays), out)
    write(file, out.getvalue())
