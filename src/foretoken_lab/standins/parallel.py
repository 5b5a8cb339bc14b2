"""Pairs of texts out of files: TSV, JSONL, or two files of lines; cleaned, shuffled, each once.

Each may be packed (.gz).
"""

from __future__ import annotations

import gzip
import html
import json
import random
import re
import zlib
from collections.abc import Iterable
from pathlib import Path

from foretoken.errors import InputError
from foretoken.storage import files

Pair = tuple[str, str]
SPACED = ((r" ([.,;:!?%)\]])", r"\1"), (r"([(\[]) ", r"\1"), (r" ('s|n't)\b", r"\1"))


def read(name: str, keys: tuple[str, str]) -> list[Pair]:
    """Sources and targets. `name`: a .tsv or .jsonl file, or the common head of two files of lines,
    NAME.KEY each. `keys`: how source and target are called in JSON or in the files' names."""
    path = Path(name)
    if path.name.endswith((".jsonl", ".jsonl.gz")):
        return [_row(f"{path}, line {n}", line, keys) for n, line in enumerate(lines(path), 1)]
    if path.name.endswith((".tsv", ".tsv.gz")):
        rows = [line.split("\t") for line in lines(path)]
        for number, row in enumerate(rows, 1):
            if len(row) != 2:
                raise InputError(
                    f"{path}, line {number}: {len(row)} columns; give source, tab, target"
                )
        return [(source, target) for source, target in rows]
    sides = [lines(_either(Path(f"{name}.{key}"))) for key in keys]
    if len(sides[0]) != len(sides[1]):
        raise InputError(f"{name} has {len(sides[0])} sources and {len(sides[1])} targets")
    return list(zip(*sides, strict=True))


def _row(place: str, line: str, keys: tuple[str, str]) -> Pair:
    try:
        row = files.parse_json(line)
        source, target = (row[key] for key in keys)
    except (ValueError, KeyError, TypeError) as error:
        raise InputError(
            f"{place} is no object with {keys[0]} and {keys[1]} ({type(error).__name__}); "
            "name them in --keys"
        ) from None
    return source, target


def lines(path: Path) -> list[str]:
    """Of a text file, packed or not."""
    try:
        content = path.read_bytes()
    except OSError as error:
        raise InputError(f"{path} cannot be read: {error}") from None
    try:
        content = gzip.decompress(content) if path.suffix == ".gz" else content
    except (OSError, EOFError, zlib.error) as error:
        raise InputError(f"{path} cannot be unpacked: {error}") from None
    return content.decode("utf-8-sig", errors="replace").removesuffix("\n").split("\n")


def _either(path: Path) -> Path:
    packed = path.with_name(f"{path.name}.gz")
    return packed if packed.exists() else path


def clean(text: str) -> str:
    """As it is written: tokens that an earlier program set apart stand together again."""
    text = html.unescape(text.replace(" @-@ ", "-"))
    for apart, together in SPACED:
        text = re.sub(apart, together, text)
    return " ".join(text.split())


def cleaned(pairs: Iterable[Pair], banned: Iterable[str], seed: int = 0) -> list[Pair]:
    """Pairs to learn from: every source once, none that is banned or empty; shuffled."""
    sources = {clean(source) for source in banned}
    cleaned_pairs: list[Pair] = []
    for source, target in ((clean(s), clean(t)) for s, t in pairs):
        if source and target and source not in sources:
            sources.add(source)
            cleaned_pairs.append((source, target))
    random.Random(seed).shuffle(cleaned_pairs)
    return cleaned_pairs


def write(path: Path, pairs: Iterable[Pair]) -> None:
    """As the package's trainers read them: {"source": ..., "target": ...} on each line."""
    rows = [json.dumps({"source": s, "target": t}, ensure_ascii=False) for s, t in pairs]
    files.write(path, "\n".join(rows).encode())
    print(f"{path}: {len(rows)} pairs", flush=True)
