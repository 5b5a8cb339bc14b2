"""`foretoken generate --output`: the texts of a file's prompts, a line of JSON for each as it is
done, by an engine in this process or by workers on Ray. After a kill the same command resumes.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from io import FileIO
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from foretoken.cli import answer, option, prompts
from foretoken.cli.cluster import Cluster, needing
from foretoken.cli.messages import Template
from foretoken.cli.prompts import ModelTask
from foretoken.errors import ForetokenError, InputError
from foretoken.sampling.params import SamplingParams
from foretoken.storage.files import lock, naming, parse_json

if TYPE_CHECKING:
    from foretoken.request import Completion
    from foretoken.serving.engine import Engine

READ = 64  # prompts that run or wait
Name = tuple[int, int]  # a prompt's line in its file, and the number of its text


@dataclass(slots=True)
class Results:
    """An output file, locked while it is open.

    Opening removes what a kill left of a last line; closing removes a new file without a result.
    """

    path: Path
    done: dict[Name, str] = field(default_factory=dict[Name, str])  # each with its origin
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
            with naming(self.path):
                content = self.path.read_bytes()
            lines = content[: content.rfind(b"\n") + 1]
            self.done = dict(self._read(n, line) for n, line in enumerate(lines.splitlines(), 1))
            with naming(self.path):
                self._out.truncate(len(lines))
        except BaseException:
            self._out.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        if self._out is not None:
            if self._new and not self._out.seek(0, 2):
                self.path.unlink(missing_ok=True)
            self._out.close()

    def require(self, origins: dict[Name, str]) -> None:
        """Raise InputError if a result in the file has another origin than now."""
        for name, origin in self.done.items():
            if origins.get(name) != origin:
                raise InputError(
                    f"{self.path} holds a text of line {name[0]} with another prompt, seed, model "
                    "or option; give another --output, or what it was begun with"
                )

    def write(self, name: Name, origin: str, result: dict[str, Any]) -> None:
        """Append a result. On a full disk, leave the lines before it whole."""
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
    """Counts of a run."""

    tokens: int = 0
    accepted: int = 0
    drafted: int = 0
    failed: int = 0  # texts

    def add(self, completion: Completion) -> None:
        self.tokens += len(completion.tokens)
        self.accepted += completion.stats.accepted
        self.drafted += completion.stats.drafted
        self.failed += completion.error is not None

    def pass_over(self, error: object) -> None:
        """Tell of a prompt that cannot be continued, and count it."""
        self.failed += 1
        print(f"error: {error}", file=sys.stderr)

    def rates(self, seconds: float) -> str:
        share = (
            f", {self.accepted / self.drafted:.0%} of draft tokens accepted" if self.drafted else ""
        )
        return f"{self.tokens / max(seconds, 1e-9):.0f} tokens/s{share}"


Complete = Callable[[list[Name], Tally], Iterator[tuple[Name, "Completion"]]]


def fill(
    results: Results, ids: dict[Name, Any], origins: dict[Name, str], complete: Complete
) -> Tally:
    """Complete the texts that the file lacks, with a bar on standard error.

    ids: the id of each text, from its line. origins: a digest of what each text depends on.
    complete: yields texts as they are done; tells and counts those that fail.
    """
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


@dataclass(frozen=True, slots=True)
class Lines:
    """Prompts by their lines' numbers, and the models and options they share."""

    tasks: dict[int, ModelTask]
    names: tuple[str | None, str | None]
    loading: option.PairLoading
    template: Template
    seed: int
    speculation: dict[str, Any]

    def key(self, name: Name) -> tuple[int, int]:
        """Return the key of a text's random numbers, which depends on its own line only."""
        line, copy = name
        return prompts.key(self.tasks[line], line - 1, copy, self.seed)

    def params(self, name: Name) -> SamplingParams:
        return replace(self.tasks[name[0]].params, num_return_sequences=1)

    @property
    def engine(self) -> dict[str, Any]:
        return {"rule": self.speculation["rule"], "lenience": self.speculation["lenience"]}


def completing(lines: Lines, where: Cluster) -> AbstractContextManager[Complete]:
    """Return `on_ray` or `here`, as the options say."""
    return on_ray(lines, where) if where.used else here(lines)


@contextmanager
def here(lines: Lines) -> Iterator[Complete]:
    """Complete texts by an engine in this process."""
    spec = lines.loading.load(*lines.names)
    from foretoken.serving.engine import Engine  # late: torch, which takes seconds

    def add(name: Name) -> int:
        each = lines.tasks[name[0]]
        with each.line.named():
            text = lines.template.prompt(each.line, spec)
            options = {"gamma": lines.speculation["gamma"], "seed": lines.key(name)}
            return engine.add(text, lines.params(name), **options)

    with Engine(spec, **lines.engine) as engine:
        yield partial(_stepped, engine, add)


@contextmanager
def on_ray(lines: Lines, where: Cluster) -> Iterator[Complete]:
    """Complete texts by workers on Ray; by default one worker with all threads."""
    with needing("ray"):
        from foretoken.cluster import session

        session.prepare(where.address)  # before ray is imported
        from foretoken.cluster import lines as cluster
    session.join(where.address)
    try:
        count = where.replicas or 1
        each = session.threads(count, where.threads)
        session.require_memory(count, session.weights(*lines.names), 0)
        workers = cluster.Workers(count, each, *lines.names, lines.loading.arguments, lines.engine)

        def complete(names: list[Name], tally: Tally) -> Iterator[tuple[Name, Completion]]:
            asks = [
                cluster.PromptTask(
                    partial(lines.template.prompt, lines.tasks[name[0]].line),
                    lines.params(name),
                    lines.key(name),
                    lines.speculation["gamma"],
                )
                for name in names
            ]
            for place, text in cluster.texts(asks, workers):
                if isinstance(text, ForetokenError):
                    line = lines.tasks[names[place][0]].line
                    tally.pass_over(f"{line.place}: {text}" if line.place else text)
                else:
                    yield names[place], text

        yield complete
    finally:
        session.leave()


def _stepped(
    engine: Engine, add: Callable[[Name], int], names: list[Name], tally: Tally
) -> Iterator[tuple[Name, Completion]]:
    """Yield each text as it is done, with READ prompts in the engine at a time."""
    unsent, running = iter(names), dict[int, Name]()
    while True:
        while len(running) < READ and (name := next(unsent, None)) is not None:
            try:
                running[add(name)] = name
            except ForetokenError as error:
                tally.pass_over(error)
        if not running:
            return
        for event in engine.step():
            if event.completion is not None:
                yield running.pop(event.id), event.completion
