"""`foretoken generate --output`: the texts of a file's prompts, a line of JSON for each as it is
done, by an engine in this process or by workers on Ray. After a kill the same command resumes.
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Generator, Iterable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from io import FileIO
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from foretoken.cli import answer, option
from foretoken.cli.command import quiet
from foretoken.cli.prompts import ModelTask, Template, parquet
from foretoken.cluster import session
from foretoken.errors import ForetokenError, InputError
from foretoken.sampling.params import SamplingParams
from foretoken.storage.files import lock, naming, parse_json

if TYPE_CHECKING:
    from foretoken.loading.target import KnownTarget
    from foretoken.request import Completion

READ = 64  # prompts that run or wait
COPY = 2**40  # rows from one text of a line to the next: no file has as many lines
Name = tuple[int, int]  # a prompt's line in its file, and the number of its text
Completed = Generator[tuple[Name, "Completion | ForetokenError"]]


@dataclass(slots=True)
class Results:
    """An output file, locked while it is open; opening removes what a kill left of a last line,
    and closing a new file without a result."""

    path: Path
    done: dict[Name, str]  # each with its origin
    out: FileIO

    @classmethod
    @contextmanager
    def opened(cls, path: Path) -> Iterator[Results]:
        """Open a file of results, old or new."""
        option.require_folder(path, "--output")
        if path.exists() and not path.is_file():
            raise InputError(f"{path} is no file; give another --output")
        new = not path.exists()
        with naming(path):
            # without a buffer, which would be written again where the disk is full
            out = open(path, "ab", buffering=0)
        with out:
            lock(out, path)
            with naming(path):
                content = path.read_bytes()
            lines = content[: content.rfind(b"\n") + 1]
            rows = enumerate(lines.splitlines(), 1)
            results = cls(path, dict(_read(path, n, line) for n, line in rows), out)
            with naming(path):
                out.truncate(len(lines))
            try:
                yield results
            finally:
                if new and not results.done:
                    path.unlink(missing_ok=True)

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
        head = {"line": name[0], "copy": name[1], "origin": origin}
        line = json.dumps(head | result, allow_nan=False)
        rest, size = line.encode() + b"\n", self.out.seek(0, 2)
        try:
            with naming(self.path):
                while rest:  # a disk that is nearly full takes a part
                    rest = rest[self.out.write(rest) :]
        except OSError:
            self.out.truncate(size)
            raise
        self.done[name] = origin


def _read(path: Path, number: int, line: bytes) -> tuple[Name, str]:
    try:
        result = parse_json(line)
        return (int(result["line"]), int(result["copy"])), str(result["origin"])
    except (KeyError, TypeError, ValueError):
        raise InputError(
            f"{path}, line {number} is no result of this command; give another --output"
        ) from None


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
        (line, copy), own = name, self.tasks[name[0]].line.seed
        return (self.seed, line - 1 + copy * COPY) if own is None else (own, copy)

    def require_any(self, target: KnownTarget) -> None:
        """Raise the first prompt's error if the target can be given none of the prompts."""
        first: ForetokenError | None = None
        for each in self.tasks.values():
            try:
                self.template.prompts([each.line], target)
                return
            except ForetokenError as error:
                first = first or error
        if first is not None:
            raise first

    def params(self, name: Name) -> SamplingParams:
        return replace(self.tasks[name[0]].params, num_return_sequences=1)

    @property
    def engine(self) -> dict[str, Any]:
        return {"rule": self.speculation["rule"], "lenience": self.speculation["lenience"]}

    def origin(self, name: Name) -> str:
        """Return a digest of all that a text depends on."""
        each = self.tasks[name[0]]
        common = self.names, self.loading.arguments, self.template, self.speculation
        settings = repr((common, each.line.prompt, each.line.messages, each.params, self.key(name)))
        return hashlib.sha256(settings.encode(errors="surrogatepass")).hexdigest()[:16]


def write(output: Path, lines: Lines, cluster: option.Cluster) -> int:
    """Write the texts that the file lacks, with a bar on standard error; return how many failed.

    A folder gets results.jsonl; a Parquet file is made, at the end, of the lines beside it.
    """
    lines.loading.require(lines.names[0])
    if output.is_dir():
        output /= "results.jsonl"
    if output.suffix == ".parquet":
        table = parquet()
        results = output.with_suffix(".jsonl")
        failed = write(results, lines, cluster)
        if results.exists():  # one text at least
            table.convert(results, output)
        return failed
    quiet()
    origins = {
        (line, copy): lines.origin((line, copy))
        for line, task in lines.tasks.items()
        for copy in range(task.texts)
    }
    with Results.opened(output) as results:
        results.require(origins)
        missing = [name for name in origins if name not in results.done]
        if not missing:
            print(f"{output}: all {len(origins)} texts were there", file=sys.stderr)
            return 0
        completed = on_ray(lines, missing, cluster) if cluster.used else here(lines, missing)
        try:
            with closing(completed) as texts:
                return _fill(results, lines, origins, texts)
        except KeyboardInterrupt:
            print(f"{output} is whole; the same command goes on with it", file=sys.stderr)
            raise


def _fill(
    results: Results,
    lines: Lines,
    origins: dict[Name, str],
    texts: Iterable[tuple[Name, Completion | ForetokenError]],
) -> int:
    """Write each text as it is done; tell and count those that fail."""
    start, failed, tokens, accepted, drafted = perf_counter(), 0, 0, 0, 0
    speed = ""
    columns = (BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    shown = (*columns, TextColumn("{task.fields[speed]}"))
    # texts end in bursts, and one may take minutes
    with Progress(*shown, console=Console(stderr=True), speed_estimate_period=600) as bar:
        task = bar.add_task("", total=len(origins), completed=len(results.done), speed="")
        for name, text in texts:
            if isinstance(text, ForetokenError):
                failed += 1
                print(f"error: line {name[0]}: {text}", file=sys.stderr)
            else:
                id = lines.tasks[name[0]].line.id
                results.write(name, origins[name], {"id": id, **answer.result(text)})
                failed += text.error is not None
                tokens += len(text.tokens)
                accepted, drafted = accepted + text.stats.accepted, drafted + text.stats.drafted
                share = f", {accepted / drafted:.0%} of draft tokens accepted" if drafted else ""
                speed = f"{tokens / max(perf_counter() - start, 1e-9):.0f} tokens/s{share}"
            bar.update(task, advance=1, speed=speed)
    if speed:
        print(f"{results.path}: {speed}", file=sys.stderr)
    return failed


def here(lines: Lines, names: list[Name]) -> Completed:
    """Yield each text, or why there is none, as it is done by an engine in this process, which has
    READ prompts at a time."""
    spec = lines.loading.load(*lines.names, lines.require_any).prepared()
    from foretoken.engine.engine import Engine  # late: after mistakes are told

    unsent, running = iter(names), dict[int, Name]()
    gamma = lines.speculation["gamma"]
    with Engine(spec, **lines.engine) as engine:
        while True:
            while len(running) < READ and (name := next(unsent, None)) is not None:
                try:
                    prompt = lines.template.prompt(lines.tasks[name[0]].line, spec)
                    params, key = lines.params(name), lines.key(name)
                    running[engine.add(prompt, params, gamma=gamma, seed=key)] = name
                except ForetokenError as error:
                    yield name, error
            if not running:
                return
            for event in engine.step():
                if event.completion is not None:
                    yield running.pop(event.id), event.completion


def on_ray(lines: Lines, names: list[Name], cluster: option.Cluster) -> Completed:
    """Yield the same by workers on Ray; by default one worker with all threads."""
    session.prepare(cluster.address)  # before ray is imported
    with option.needing("ray"):
        from foretoken.cluster import lines as on_cluster
    session.join(cluster.address)
    try:
        count = cluster.replicas or 1
        threads = session.threads(count, cluster.threads)
        session.require_memory(count, session.weights(*lines.names), 0)
        tasks = [
            on_cluster.PromptTask(
                partial(lines.template.prompt, lines.tasks[name[0]].line),
                lines.params(name),
                lines.key(name),
                lines.speculation["gamma"],
            )
            for name in names
        ]
        life = lines.names, lines.loading.arguments, lines.engine
        for place, text in on_cluster.texts(tasks, count, threads, *life):
            yield names[place], text
    finally:
        session.leave()
