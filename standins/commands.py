"""The package's own commands, one after another: each goes on where it was."""

from __future__ import annotations

import shlex
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

Sizes = Mapping[str, int]


def foretoken(*words: object) -> None:
    """Run `foretoken WORDS`, shown first. Where it fails, the script ends with its exit code."""
    command = [str(word) for word in words]
    print(f"\n$ foretoken {shlex.join(command)}", flush=True)
    code = subprocess.run([sys.executable, "-m", "foretoken", *command]).returncode
    if code:
        sys.exit(code)


def flags(values: Mapping[str, object]) -> list[object]:
    """{"kv_heads": 2} as --kv-heads 2; True as the flag alone, False as nothing."""
    found: list[object] = []
    for name, value in values.items():
        if value is False:
            continue
        flag = f"--{name.replace('_', '-')}"
        found += [flag] if value is True else [flag, value]
    return found


def tables(out: Path, data: Path, tokenizer: Path) -> None:
    """A unigram and a bigram table."""
    for order, name in ((1, "unigram"), (2, "bigram")):
        table = out / f"{name}.safetensors"
        if not table.exists():
            source = ("--from-text", data, "--tokenizer", tokenizer)
            foretoken("train", "ngram", *source, "--order", order, "--out", table)
