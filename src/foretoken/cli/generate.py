"""`foretoken generate`: continue prompts, show the steps, and compare with plain decoding."""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer import Argument, Option

from foretoken.cli import answer, batch, option, prompts
from foretoken.cli.cluster import Cluster, needing
from foretoken.cli.command import command, quiet
from foretoken.cli.messages import Messages, Template
from foretoken.cli.prompts import ModelTask
from foretoken.cli.render import bar
from foretoken.cli.sampling_options import SamplingOptions
from foretoken.errors import ControlError, InputError

if TYPE_CHECKING:
    from foretoken.cli.answer import TaskAnswer
    from foretoken.request import Completion, Request
    from foretoken.speculator import Speculator

PROMPTS = (
    'File of prompts: one per line, or .jsonl or .parquet of {"prompt": text or ids, "id": any}, '
    'or "messages" in place of "prompt". Options in a line ("temperature", "stop_strings", ...) '
    "win over those given here."
)
Key = tuple[int, int]  # of the random numbers of a text


@command
def generate(
    sampling: SamplingOptions,
    messages: Messages,
    loading: option.PairLoading,
    cluster: Cluster,
    words: Annotated[
        list[str] | None,
        Argument(
            metavar="[TARGET] PROMPT",
            help="Continue this prompt. A word before it is the target, as with --target. Default: "
            "standard input.",
        ),
    ] = None,
    prompt_file: Annotated[Path | None, Option(help=PROMPTS)] = None,
    target: option.Target = None,
    draft: option.Draft = None,
    gamma: option.Guesses = None,
    seed: option.TextSeed = 0,
    rule: option.Rule = "block",
    lenience: option.Lenience = 1.0,
    output: Annotated[
        Path | None,
        Option(
            help="Write a line of JSON for each prompt of the file as it is done, or a .parquet at "
            "the end. The same command resumes a run that was stopped."
        ),
    ] = None,
    show_tokens: Annotated[
        bool, Option("--show-tokens", help="Print a line per step, its draft tokens coloured.")
    ] = False,
    compare: Annotated[
        bool, Option("--compare", help="Also decode plainly, and print the speed-up.")
    ] = False,
    as_json: option.Json = False,
) -> None:
    """Continue a prompt, or many, in the target's own distribution.

    Temperature, top-k, top-p and min-p are as given here. Stop conditions, penalties and bans that
    are not given follow the model's generation config.
    """
    from foretoken.options import keys_of, require  # late: NumPy, which `--help` does without

    # Mistakes are told before torch is imported, which takes seconds, and before models load
    target, prompt = _sides(words or [], target)
    options, template = sampling.given, messages.template
    require(gamma, rule, lenience)
    keys_of(seed, [1])
    speculation = {"gamma": gamma, "rule": rule, "lenience": lenience}
    cluster.require()
    if output is not None:
        file = _file_alone(prompt, prompt_file, compare, show_tokens, as_json)
        tasks, bad = prompts.tasks_of_file(file, messages, options)
        lines = batch.Lines(tasks, (target, draft), loading, template, seed, speculation)
        failed = _write(output, lines, cluster)
        if bad or failed:
            raise typer.Exit(1)
        return
    if cluster.used:
        raise InputError("--ray and --replicas are for files; give --prompt-file and --output")
    tasks = prompts.tasks(messages.wrap(prompts.read(prompt, prompt_file, sampling=True)), options)
    if compare:
        prompts.require_one(tasks)
    loading.require(target)
    quiet()
    run = _Answering(loading.load(target, draft), tasks, template, seed, speculation)
    run.answer(compare=compare, show_tokens=show_tokens, as_json=as_json)


def _sides(words: list[str], target: str | None) -> tuple[str | None, str | None]:
    """Return the target and the prompt; a word alone is the prompt."""
    if len(words) > 2:
        raise InputError(f"{len(words)} texts are given; put the prompt in quotes")
    named = words[0] if len(words) == 2 else None
    return option.target(named, target), words[-1] if words else None


@dataclass(frozen=True, slots=True)
class _Answering:
    """A pair, and the tasks to print answers of."""

    spec: Speculator
    tasks: list[ModelTask]
    template: Template
    seed: int
    speculation: dict[str, Any]

    def answer(self, *, compare: bool, show_tokens: bool, as_json: bool) -> None:
        """Generate and print all texts. Exit code 1 if one failed, 130 after Ctrl-C."""
        spec, tasks = self.spec, self.tasks
        texts = [self.template.prompt(each.line, spec) for each in tasks]
        prompts.require(tasks, spec)
        keys = prompts.keys(tasks, self.seed)
        params = [each.params for each in tasks]
        requests = spec.requests(texts, params, keys)  # a bad one fails now
        streamed = len(requests) == 1 and not (as_json or show_tokens)
        completions = iter([self._stream(texts[0], keys)]) if streamed else self._all(requests)
        answers = answer.answers(tasks, requests, completions)
        if as_json:
            answers = answer.begin(spec, answers, self.speculation)
        answers = list(answers)
        if not as_json:
            answer.show(spec, answers, steps=show_tokens, printed=streamed)
        reasons = {each.completion.finish_reason for each in answers}
        broken = reasons & {"interrupted", "error"}
        self._end(answers, texts[0] if compare and not broken else None, as_json=as_json)
        if broken:
            raise typer.Exit(130 if "interrupted" in reasons else 1)

    def _end(self, answers: list[TaskAnswer], compared: Any, *, as_json: bool) -> None:
        """Print the speed-up for the prompt `compared`, if any, and remarks."""
        comparison = None
        if compared is not None:
            from foretoken.lab.bench import compare  # late: torch

            options = {"seed": self.seed, **self.tasks[0].given, **self.speculation}
            comparison = compare(self.spec, compared, **options)
        if as_json:
            answer.end(comparison)
        elif comparison:
            answer.speedup(comparison)
        for remark in answer.remarks(answers, self.speculation["lenience"], as_json=as_json):
            print(remark, file=sys.stderr)

    def _stream(self, prompt: Any, keys: list[Key]) -> Completion:
        """Print the text as it comes; ids if there is no tokenizer."""
        params = self.tasks[0].params
        pieces = self.spec.stream([prompt], params, seed=keys, **self.speculation)
        tokens = 0
        try:
            while True:
                piece = next(pieces)
                print(answer.piece(piece.text, piece.tokens, tokens), end="", flush=True)
                tokens += len(piece.tokens)
        except StopIteration as end:
            print()
            return end.value
        except ControlError as error:
            print("\n" * (tokens > 0), end="", flush=True)
            print("error:", error, file=sys.stderr)
            raise typer.Exit(1) from None
        except KeyboardInterrupt:
            print(f"\ninterrupted after {tokens} tokens", file=sys.stderr)
            raise typer.Exit(130) from None

    def _all(self, requests: list[Request]) -> Iterator[Completion]:
        """Yield completions in order, each as it is done; after Ctrl-C those that have begun.

        Progress of many is shown on standard error.
        """
        from foretoken.options import check
        from foretoken.speculator import BATCH

        rows = self.spec.inputs.rows(requests)  # all at once: a bad grammar fails now
        completions = self.spec.completions(
            rows, check(**self.speculation), self.speculation["gamma"]
        )
        several = bar(completions, "generating", len(rows)) if len(rows) > BATCH else completions
        for row, completion in zip(rows, several, strict=True):
            if row.began or row.finish_reason is not None:
                yield completion


def _file_alone(prompt: str | None, file: Path | None, *others: bool) -> Path:
    """Return the file of prompts. InputError for options that --output has no use for."""
    if file is None or prompt is not None:
        raise InputError("--output is for a file of prompts; give --prompt-file")
    for present, flag in zip(others, ("--compare", "--show-tokens", "--json"), strict=True):
        if present:
            raise InputError(f"{flag} and --output are both given; give the one or the other")
    return file


def _write(output: Path, lines: batch.Lines, cluster: Cluster) -> int:
    """Write the texts of a file's prompts to a file of results; return how many failed."""
    lines.loading.require(lines.names[0])
    quiet()
    convert = _converting(output) if output.suffix == ".parquet" else None
    output = output / "results.jsonl" if output.is_dir() else output
    output = output.with_suffix(".jsonl") if convert else output
    with batch.Results(output) as written:
        ids = {(n, i): each.line.id for n, each in lines.tasks.items() for i in range(each.texts)}
        origins = {name: _origin(lines, name) for name in ids}
        try:
            with batch.completing(lines, cluster) as complete:
                tally = batch.fill(written, ids, origins, complete)
        except KeyboardInterrupt:
            print(f"{output} is whole; the same command goes on with it", file=sys.stderr)
            raise
    if convert:
        convert(output)
    return tally.failed


def _converting(table: Path) -> Callable[[Path], None]:
    """Return a function that makes a table of results; a missing package is told before the
    work."""
    with needing("ray"):
        from foretoken.cluster.table import convert
    return lambda results: convert(results, table)


def _origin(lines: batch.Lines, name: batch.Name) -> str:
    """Return a digest of all that a text depends on."""
    each, key = lines.tasks[name[0]], lines.key(name)
    arguments = lines.loading.arguments
    # The order and an option of version 0.1.0, whose files are resumed
    arguments |= {"tensor_parallel": 1, "generation_config": arguments.pop("generation_config")}
    common = lines.names, arguments, lines.template, lines.speculation
    settings = repr((common, each.line.prompt, each.line.messages, each.params, key))
    return hashlib.sha256(settings.encode(errors="surrogatepass")).hexdigest()[:16]
