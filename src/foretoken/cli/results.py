"""Results of a file of prompts, a line of JSON for each, written as they are done: after a kill the
same command goes on where it was."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from io import FileIO
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from foretoken.cli import answer
from foretoken.errors import InputError
from foretoken.storage.files import lock, naming, parse_json

if TYPE_CHECKING:
    from foretoken.request import Completion

Name = tuple[int, int]  # a prompt's line in its file, and which of its texts


@dataclass(slots=True)
class Results:
    """An output file. What a kill left of a last line is removed when it is opened; one that is new
    and gets no result is removed when it is closed."""

    path: Path
    done: dict[Name, str] = field(default_factory=dict[Name, str])  # and what each follows from
    _out: FileIO | None = None
    _new: bool = False

    def __enter__(self) -> Results:
        if self.path.exists() and not self.path.is_file():
            raise InputError(f"{self.path} is no file that can be gone on with; give another one")
        if not self.path.parent.is_dir():
            raise InputError(f"there is no folder {self.path.parent}; make it, or give another one")
        self._new = not self.path.exists()
        with naming(self.path):
            # without a buffer, which would be written again where the disk is full
            self._out = open(self.path, "ab", buffering=0)
        try:
            lock(self._out, self.path)
        except InputError:
            self._out.close()
            raise
        with naming(self.path):
            content = self.path.read_bytes()
        lines = content[: content.rfind(b"\n") + 1]
        try:
            self.done = dict(self._read(n, line) for n, line in enumerate(lines.splitlines(), 1))
        except InputError:
            self._out.close()
            raise
        with naming(self.path):
            self._out.truncate(len(lines))
        return self

    def __exit__(self, *_: object) -> None:
        if self._out is not None:
            if self._new and not self._out.seek(0, 2):
                self.path.unlink(missing_ok=True)
            self._out.close()

    def require(self, origins: dict[Name, str]) -> None:
        """InputError where a result that is there follows from something else than now."""
        for name, origin in self.done.items():
            if origins.get(name) != origin:
                raise InputError(
                    f"{self.path} holds a text of line {name[0]} with another prompt, seed, model "
                    "or option; give another --output, or what it was begun with"
                )

    def write(self, name: Name, origin: str, result: dict[str, Any]) -> None:
        """Append a result; one that the disk has no room for leaves what is there whole."""
        assert self._out is not None
        head = {"line": name[0], "copy": name[1], "origin": origin}
        line = json.dumps(head | result, allow_nan=False)
        rest, size = line.encode() + b"\n", self._out.seek(0, 2)
        try:
            with naming(self.path):
                while rest:  # a disk that is nearly full takes a part
                    rest = rest[self._out.write(rest) :]
        except OSError:
            self._out.truncate(size)
            raise
        self.done[name] = origin

    def _read(self, number: int, line: bytes) -> tuple[Name, str]:
        try:
            result = parse_json(line)
            return (int(result["line"]), int(result["copy"])), str(result["origin"])
        except (KeyError, TypeError, ValueError):
            raise InputError(
                f"{self.path}, line {number} is no result of this command; give another --output"
            ) from None


@dataclass(slots=True)
class Tally:
    """What a run has done."""

    tokens: int = 0
    accepted: int = 0
    drafted: int = 0
    failed: int = 0  # texts

    def add(self, completion: Completion) -> None:
        self.tokens += len(completion.tokens)
        self.accepted += completion.stats.accepted
        self.drafted += completion.stats.drafted
        self.failed += completion.error is not None

    def rates(self, seconds: float) -> str:
        share = f", {self.accepted / self.drafted:.0%} of guesses kept" if self.drafted else ""
        return f"{self.tokens / max(seconds, 1e-9):.0f} tokens/s{share}"


def fill(
    results: Results,
    ids: dict[Name, Any],
    origins: dict[Name, str],
    complete: Callable[[list[Name], Tally], Iterator[tuple[Name, Completion]]],
) -> Tally:
    """Run what is not done yet, with a bar on standard error. ids: what its line calls every text;
    origins: what it follows from; `complete` has them written, and tells and counts those that it
    passes over."""
    results.require(origins)
    tally, start = Tally(), perf_counter()
    missing = [name for name in ids if name not in results.done]
    if ids and not missing:
        print(f"{results.path}: all {len(ids)} texts were there", file=sys.stderr)
        return tally
    with _bar() as bar:
        task = bar.add_task("", total=len(ids), completed=len(ids) - len(missing), rate="")
        for name, completion in complete(missing, tally):
            results.write(name, origins[name], {"id": ids[name], **answer.result(completion)})
            tally.add(completion)
            bar.update(task, advance=1, rate=tally.rates(perf_counter() - start))
    print(f"{results.path}: {tally.rates(perf_counter() - start)}", file=sys.stderr)
    return tally


def _bar() -> Progress:
    rate = TextColumn("{task.fields[rate]}")
    columns = (BarColumn(), MofNCompleteColumn(), TimeRemainingColumn(), rate)
    return Progress(*columns, console=Console(stderr=True))
