"""`foretoken generate --output`: complete the prompts of a file, with an engine in this process or
with workers on Ray, and append each completion to an output file as a line of JSON. Running the
same command again resumes a run."""

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

MAX_ACTIVE_PROMPTS = 64  # prompts that run or wait in the engine
# Distance of the random keys of a line's outputs; larger than the number of lines of any file
COPY_KEY_STRIDE = 2**40
CompletionId = tuple[int, int]  # a prompt's line in its file, and the index of the output
CompletionStream = Generator[tuple[CompletionId, "Completion | ForetokenError"]]


@dataclass(slots=True)
class ResultsFile:
    """The output file of a run, locked while it is open. Opening it removes an incomplete last
    line, which a killed run may have left; closing it removes a new file without results."""

    path: Path
    done: dict[CompletionId, str]  # the origin (see `BatchJob.compute_origin`) of each result
    out: FileIO

    @classmethod
    @contextmanager
    def open(cls, path: Path) -> Iterator[ResultsFile]:
        """Open or create a file of results and parse its lines. Raises InputError if the file has
        other lines."""
        option.require_folder(path, "--output")
        if path.exists() and not path.is_file():
            raise InputError(f"{path} is not a regular file; give another --output")
        new = not path.exists()
        with name_path_in_errors(path):
            # Unbuffered: a buffered file would write again when closed after an error (a full disk)
            out = open(path, "ab", buffering=0)
        with out:
            lock_file(out, path)
            with name_path_in_errors(path):
                content = path.read_bytes()
            lines = content[: content.rfind(b"\n") + 1]
            numbered = enumerate(lines.splitlines(), 1)
            results = cls(path, dict(_parse_result(path, n, line) for n, line in numbered), out)
            with name_path_in_errors(path):
                out.truncate(len(lines))
            try:
                yield results
            finally:
                if new and not results.done:
                    path.unlink(missing_ok=True)

    def require(self, origins: dict[CompletionId, str]) -> None:
        """Raise InputError if the origin of a result in the file is not the origin in `origins`:
        the result was generated from other inputs."""
        for name, origin in self.done.items():
            if origins.get(name) != origin:
                raise InputError(
                    f"{self.path} has a result of line {name[0]} from another prompt, seed, model "
                    "or option; give another --output, or the inputs of the first run"
                )

    def write(self, name: CompletionId, origin: str, result: dict[str, Any]) -> None:
        """Append a result as a line. If writing fails, remove the partial line and raise
        OSError."""
        head = {"line": name[0], "copy": name[1], "origin": origin}
        line = json.dumps(head | result, allow_nan=False)
        rest, size = line.encode() + b"\n", self.out.seek(0, 2)
        try:
            with name_path_in_errors(self.path):
                while rest:  # on a nearly full disk, only a part may be written
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
            f"{path}, line {number} is not a result of this command; give another --output"
        ) from None


@dataclass(frozen=True, slots=True)
class BatchJob:
    """The prompts of a file by line number, and the models and options used for all of them."""

    tasks: dict[int, PromptWithParams]
    model_names: tuple[str | None, str | None]
    loading: option.PairLoadOptions
    template: ChatTemplate
    seed: int
    speculation: dict[str, Any]

    def make_key(self, name: CompletionId) -> tuple[int, int]:
        """Return the random key of an output; other lines of the file do not change the key."""
        (line, copy), own = name, self.tasks[name[0]].line.seed
        return (self.seed, line - 1 + copy * COPY_KEY_STRIDE) if own is None else (own, copy)

    def require_any(self, target: TargetInfo) -> None:
        """Raise the error of the first prompt if none of the prompts is valid for the target."""
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
        """Return a digest of everything that an output depends on: prompt, models, options and
        random key."""
        each = self.tasks[name[0]]
        common = self.model_names, self.loading.arguments, self.template, self.speculation
        settings = repr(
            (common, each.line.prompt, each.line.messages, each.params, self.make_key(name))
        )
        return hashlib.sha256(settings.encode(errors="surrogatepass")).hexdigest()[:16]


def write_completions(output: Path, job: BatchJob, cluster: option.ClusterOptions) -> int:
    """Generate the results that are missing in `output` and append them. Return the number of
    failures.

    If `output` is a folder, results are written to results.jsonl in this folder. If `output` is a
    .parquet file, results are written to the .jsonl file of the same name and converted at the end.
    Progress is shown on standard error.
    """
    job.loading.require(job.model_names[0])
    if output.is_dir():
        output /= "results.jsonl"
    if output.suffix == ".parquet":
        table = import_parquet()
        results = output.with_suffix(".jsonl")
        failed = write_completions(results, job, cluster)
        if results.exists():  # with at least one result
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
            print(f"{output}: all {len(origins)} results are already there", file=sys.stderr)
            return 0
        completed = (
            generate_on_ray(job, missing, cluster) if cluster.used else generate_here(job, missing)
        )
        try:
            with closing(completed) as stream:
                return _write_each(results, job, origins, stream)
        except KeyboardInterrupt:
            print(f"interrupted; the same command resumes {output}", file=sys.stderr)
            raise


def _write_each(
    results: ResultsFile,
    job: BatchJob,
    origins: dict[CompletionId, str],
    completed: Iterable[tuple[CompletionId, Completion | ForetokenError]],
) -> int:
    """Append completions as they finish, with a progress bar. Print failures and return their
    number."""
    start, failed, tokens, accepted, drafted = perf_counter(), 0, 0, 0, 0
    speed = ""
    columns = (BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    all_columns = (*columns, TextColumn("{task.fields[speed]}"))
    # completions finish in bursts, and a single completion may take minutes
    with Progress(*all_columns, console=Console(stderr=True), speed_estimate_period=600) as bar:
        task = bar.add_task("", total=len(origins), completed=len(results.done), speed="")
        for name, result in completed:
            if isinstance(result, ForetokenError):
                failed += 1
                print(f"error: line {name[0]}: {result}", file=sys.stderr)
            else:
                id = job.tasks[name[0]].line.id
                results.write(
                    name, origins[name], {"id": id, **completion_output.completion_to_dict(result)}
                )
                failed += result.error is not None
                tokens += len(result.tokens)
                accepted, drafted = accepted + result.stats.accepted, drafted + result.stats.drafted
                share = f", {accepted / drafted:.0%} of draft tokens accepted" if drafted else ""
                speed = f"{tokens / max(perf_counter() - start, 1e-9):.0f} tokens/s{share}"
            bar.update(task, advance=1, speed=speed)
    if speed:
        print(f"{results.path}: {speed}", file=sys.stderr)
    return failed


def generate_here(job: BatchJob, ids: list[CompletionId]) -> CompletionStream:
    """Generate the outputs `ids` with an engine in this process. Yield (id, completion or error)
    when an output finishes. The engine has at most MAX_ACTIVE_PROMPTS prompts at a time."""
    spec = job.loading.load(*job.model_names, job.require_any).prepared()
    from foretoken.engine.engine import Engine  # late: imports torch

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
    """Generate the outputs `ids` with workers on Ray, by default one worker with all CPUs. Yield
    (id, completion or error) when an output finishes."""
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
        for index, result in on_cluster.generate_completions(
            tasks, count, threads, *engine_arguments
        ):
            yield ids[index], result
    finally:
        session.leave()
