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

from foretoken.cli import completion_output, option
from foretoken.cli.command import set_up_logging
from foretoken.cli.prompts import ChatTemplate, PromptWithParams, import_parquet
from foretoken.cluster import session
from foretoken.errors import ForetokenError, InputError
from foretoken.sampling.params import SamplingParams
from foretoken.storage.files import lock_file, name_path_in_errors, parse_json

if TYPE_CHECKING:
    from foretoken.loading.target import TargetInfo
    from foretoken.request import Completion

MAX_ACTIVE_PROMPTS = 64  # prompts that run or wait
COPY_KEY_STRIDE = 2**40  # rows from one text of a line to the next: no file has as many lines
CompletionId = tuple[int, int]  # a prompt's line in its file, and the number of its text
CompletionStream = Generator[tuple[CompletionId, "Completion | ForetokenError"]]


@dataclass(slots=True)
class ResultsFile:
    """An output file, locked while it is open; opening removes what a kill left of a last line,
    and closing a new file without a result."""

    path: Path
    done: dict[CompletionId, str]  # each with its origin
    out: FileIO

    @classmethod
    @contextmanager
    def open(cls, path: Path) -> Iterator[ResultsFile]:
        """Open a file of results, old or new."""
        option.require_folder(path, "--output")
        if path.exists() and not path.is_file():
            raise InputError(f"{path} is no file; give another --output")
        new = not path.exists()
        with name_path_in_errors(path):
            # without a buffer, which would be written again where the disk is full
            out = open(path, "ab", buffering=0)
        with out:
            lock_file(out, path)
            with name_path_in_errors(path):
                content = path.read_bytes()
            lines = content[: content.rfind(b"\n") + 1]
            rows = enumerate(lines.splitlines(), 1)
            results = cls(path, dict(_parse_result(path, n, line) for n, line in rows), out)
            with name_path_in_errors(path):
                out.truncate(len(lines))
            try:
                yield results
            finally:
                if new and not results.done:
                    path.unlink(missing_ok=True)

    def require(self, origins: dict[CompletionId, str]) -> None:
        """Raise InputError if a result in the file has another origin than now."""
        for name, origin in self.done.items():
            if origins.get(name) != origin:
                raise InputError(
                    f"{self.path} holds a text of line {name[0]} with another prompt, seed, model "
                    "or option; give another --output, or what it was begun with"
                )

    def write(self, name: CompletionId, origin: str, result: dict[str, Any]) -> None:
        """Append a result. On a full disk, leave the lines before it whole."""
        head = {"line": name[0], "copy": name[1], "origin": origin}
        line = json.dumps(head | result, allow_nan=False)
        rest, size = line.encode() + b"\n", self.out.seek(0, 2)
        try:
            with name_path_in_errors(self.path):
                while rest:  # a disk that is nearly full takes a part
                    rest = rest[self.out.write(rest) :]
        except OSError:
            self.out.truncate(size)
            raise
        self.done[name] = origin


def _parse_result(path: Path, number: int, line: bytes) -> tuple[CompletionId, str]:
    try:
        result = parse_json(line)
        return (int(result["line"]), int(result["copy"])), str(result["origin"])
    except (KeyError, TypeError, ValueError):
        raise InputError(
            f"{path}, line {number} is no result of this command; give another --output"
        ) from None


@dataclass(frozen=True, slots=True)
class BatchJob:
    """Prompts by their lines' numbers, and the models and options they share."""

    tasks: dict[int, PromptWithParams]
    model_names: tuple[str | None, str | None]
    loading: option.PairLoadOptions
    template: ChatTemplate
    seed: int
    speculation: dict[str, Any]

    def make_key(self, name: CompletionId) -> tuple[int, int]:
        """Return the key of a text's random numbers, which depends on its own line only."""
        (line, copy), own = name, self.tasks[name[0]].line.seed
        return (self.seed, line - 1 + copy * COPY_KEY_STRIDE) if own is None else (own, copy)

    def require_any(self, target: TargetInfo) -> None:
        """Raise the first prompt's error if the target can be given none of the prompts."""
        first: ForetokenError | None = None
        for each in self.tasks.values():
            try:
                self.template.make_prompts([each.line], target)
                return
            except ForetokenError as error:
                first = first or error
        if first is not None:
            raise first

    def params(self, name: CompletionId) -> SamplingParams:
        return replace(self.tasks[name[0]].params, num_return_sequences=1)

    @property
    def engine_options(self) -> dict[str, Any]:
        return {"rule": self.speculation["rule"], "lenience": self.speculation["lenience"]}

    def compute_origin(self, name: CompletionId) -> str:
        """Return a digest of all that a text depends on."""
        each = self.tasks[name[0]]
        common = self.model_names, self.loading.arguments, self.template, self.speculation
        settings = repr(
            (common, each.line.prompt, each.line.messages, each.params, self.make_key(name))
        )
        return hashlib.sha256(settings.encode(errors="surrogatepass")).hexdigest()[:16]


def write_completions(output: Path, job: BatchJob, cluster: option.ClusterOptions) -> int:
    """Write the texts that the file lacks, with a bar on standard error; return how many failed.

    A folder gets results.jsonl; a Parquet file is made, at the end, of the lines beside it.
    """
    job.loading.require(job.model_names[0])
    if output.is_dir():
        output /= "results.jsonl"
    if output.suffix == ".parquet":
        table = import_parquet()
        results = output.with_suffix(".jsonl")
        failed = write_completions(results, job, cluster)
        if results.exists():  # one text at least
            table.write_parquet(results, output)
        return failed
    set_up_logging()
    origins = {
        (line, copy): job.compute_origin((line, copy))
        for line, task in job.tasks.items()
        for copy in range(task.num_outputs)
    }
    with ResultsFile.open(output) as results:
        results.require(origins)
        missing = [name for name in origins if name not in results.done]
        if not missing:
            print(f"{output}: all {len(origins)} texts were there", file=sys.stderr)
            return 0
        completed = (
            generate_on_ray(job, missing, cluster) if cluster.used else generate_here(job, missing)
        )
        try:
            with closing(completed) as texts:
                return _write_each(results, job, origins, texts)
        except KeyboardInterrupt:
            print(f"{output} is whole; the same command goes on with it", file=sys.stderr)
            raise


def _write_each(
    results: ResultsFile,
    job: BatchJob,
    origins: dict[CompletionId, str],
    texts: Iterable[tuple[CompletionId, Completion | ForetokenError]],
) -> int:
    """Write each text as it is done; tell and count those that fail."""
    start, failed, tokens, accepted, drafted = perf_counter(), 0, 0, 0, 0
    speed = ""
    columns = (BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    all_columns = (*columns, TextColumn("{task.fields[speed]}"))
    # texts end in bursts, and one may take minutes
    with Progress(*all_columns, console=Console(stderr=True), speed_estimate_period=600) as bar:
        task = bar.add_task("", total=len(origins), completed=len(results.done), speed="")
        for name, text in texts:
            if isinstance(text, ForetokenError):
                failed += 1
                print(f"error: line {name[0]}: {text}", file=sys.stderr)
            else:
                id = job.tasks[name[0]].line.id
                results.write(
                    name, origins[name], {"id": id, **completion_output.completion_to_dict(text)}
                )
                failed += text.error is not None
                tokens += len(text.tokens)
                accepted, drafted = accepted + text.stats.accepted, drafted + text.stats.drafted
                share = f", {accepted / drafted:.0%} of draft tokens accepted" if drafted else ""
                speed = f"{tokens / max(perf_counter() - start, 1e-9):.0f} tokens/s{share}"
            bar.update(task, advance=1, speed=speed)
    if speed:
        print(f"{results.path}: {speed}", file=sys.stderr)
    return failed


def generate_here(job: BatchJob, ids: list[CompletionId]) -> CompletionStream:
    """Yield each text, or why there is none, as it is done by an engine in this process, which has
    READ prompts at a time."""
    spec = job.loading.load(*job.model_names, job.require_any).prepared()
    from foretoken.engine.engine import Engine  # late: after mistakes are told

    unsent, running = iter(ids), dict[int, CompletionId]()
    gamma = job.speculation["gamma"]
    with Engine(spec, **job.engine_options) as engine:
        while True:
            while len(running) < MAX_ACTIVE_PROMPTS and (name := next(unsent, None)) is not None:
                try:
                    prompt = job.template.make_prompt(job.tasks[name[0]].line, spec)
                    params, key = job.params(name), job.make_key(name)
                    running[engine.add(prompt, params, gamma=gamma, seed=key)] = name
                except ForetokenError as error:
                    yield name, error
            if not running:
                return
            for event in engine.step():
                if event.completion is not None:
                    yield running.pop(event.id), event.completion


def generate_on_ray(
    job: BatchJob, ids: list[CompletionId], cluster: option.ClusterOptions
) -> CompletionStream:
    """Yield the same by workers on Ray; by default one worker with all threads."""
    session.prepare_environment(cluster.address)  # before ray is imported
    with option.require_extra("ray"):
        from foretoken.cluster import batch as on_cluster
    session.join(cluster.address)
    try:
        count = cluster.replicas or 1
        threads = session.choose_threads_per_replica(count, cluster.threads)
        session.require_memory(count, session.count_weight_bytes(*job.model_names), 0)
        tasks = [
            on_cluster.PromptTask(
                partial(job.template.make_prompt, job.tasks[name[0]].line),
                job.params(name),
                job.make_key(name),
                job.speculation["gamma"],
            )
            for name in ids
        ]
        engine_arguments = job.model_names, job.loading.arguments, job.engine_options
        for index, text in on_cluster.generate_completions(
            tasks, count, threads, *engine_arguments
        ):
            yield ids[index], text
    finally:
        session.leave()
