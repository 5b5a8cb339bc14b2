"""Convert Parquet files of prompts to lines of JSON, and lines of JSON to Parquet files of results,
with pyarrow, on which Ray Data depends."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet

from foretoken.errors import InputError, to_one_line
from foretoken.storage.files import write_atomically

RESULT_COLUMN_TYPES = {  # other columns hold JSON
    "line": pyarrow.int64(),
    "copy": pyarrow.int64(),
    "text": pyarrow.string(),
    "tokens": pyarrow.list_(pyarrow.int64()),
    "finish_reason": pyarrow.string(),
    "error": pyarrow.string(),
    "seed": pyarrow.list_(pyarrow.uint64()),
}


def read_json_lines(file: Path) -> list[str]:
    """Return each row of a Parquet file as a line of JSON, without null values. Raises InputError
    if the file cannot be read."""
    try:
        rows: list[dict[str, Any]] = pyarrow.parquet.read_table(file).to_pylist()
        return [json.dumps({n: v for n, v in row.items() if v is not None}) for row in rows]
    except (OSError, TypeError, pyarrow.ArrowException) as error:
        raise InputError(
            f"{file} cannot be read as Parquet: {to_one_line(error)}; give a .parquet file of "
            "prompts"
        ) from None


def write_parquet(results: Path, file: Path) -> None:
    """Convert a file of results, lines of JSON, to a Parquet file sorted by line and copy. The
    Parquet file is written atomically."""
    rows = [json.loads(line) for line in results.read_bytes().splitlines()]
    rows.sort(key=lambda row: (row["line"], row["copy"]))
    arrays: dict[str, Any] = {}
    for name in dict.fromkeys([*RESULT_COLUMN_TYPES, *(name for row in rows for name in row)]):
        values = [row.get(name) for row in rows]
        column_type = RESULT_COLUMN_TYPES.get(name)
        column = values if column_type else [json.dumps(value) for value in values]
        arrays[name] = pyarrow.array(column, column_type or pyarrow.string())
    out = io.BytesIO()
    pyarrow.parquet.write_table(pyarrow.table(arrays), out)
    write_atomically(file, out.getvalue())
