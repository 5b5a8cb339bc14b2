"""`foretoken generate`: continue prompts, show how, and compare with plain decoding."""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer import Argument, Option

from foretoken.cli import answer, option, prompts, results, task
from foretoken.cli.cluster import Cluster, needing
from foretoken.cli.command import command, quiet
from foretoken.cli.lines import Lines, completing
from foretoken.cli.messages import Messages
from foretoken.cli.render import bar
from foretoken.cli.sampling_options import SamplingOptions
from foretoken.cli.task import ModelTask
from foretoken.errors import ControlError, InputError

if TYPE_CHECKING:
    from foretoken.request import Completion, Request
    from foretoken.speculator import Speculator

PROMPTS = (
    'One prompt a line, or .jsonl or .parquet: {"prompt": text or ids, "id": any}, or "messages" '
    'for it; wishes of its own ("temperature", "stop_strings", ...) win over those given here.'
)


@command
def generate(
    sampling: SamplingOptions,
    messages: Messages,
    loading: option.PairLoading,
    cluster: Cluster,
    words: Annotated[
        list[str] | None,
        Argument(metavar="[TARGET] PROMPT", help="Text to continue; before it, as --target."),
    ] = None,
    prompt_file: Annotated[Path | None, Option(help=PROMPTS)] = None,
    target: option.Target = None,
    draft: option.Draft = None,
    gamma: option.Guesses = None,
    seed: Annotated[int, Option(help="The same seed, pair and gamma give the same text.")] = 0,
    rule: option.Rule = "block",
    lenience: option.Lenience = 1.0,
    output: Annotated[
        Path | None,
        Option(
            help="Write a line of JSON for each prompt of the file, as it is done; the same "
            "command goes on where it was broken off. A .parquet is made of them at the end."
        ),
    ] = None,
    show_tokens: Annotated[bool, Option("--show-tokens", help="One line per target call.")] = False,
    compare: Annotated[bool, Option("--compare", help="Also decode plainly; speed-up.")] = False,
    as_json: option.Json = False,
) -> None:
    """Continue a prompt, or many, in the target's own distribution.

    Sampling is as given here; ends, penalties and bans that are left out are as the model's
    generation config sets them, or off.
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
        file = _alone(prompt, prompt_file, compare, show_tokens, as_json)
        _write(
            output, file, sampling, messages, loading, (target, draft), seed, speculation, cluster
        )
        return
    if cluster.used:
        raise InputError("--ray and --replicas are for files; give --prompt-file and --output")
    lines = prompts.read(prompt, prompt_file, sampling=True)
    tasks = task.tasks(messages.wrap(lines), options)
    if compare:
        task.require_one(tasks)
    loading.require(target)
    quiet()
    spec = loading.load(target, draft)
    texts = [template.prompt(each.line, spec) for each in tasks]
    task.require(tasks, spec)
    keys = task.keys(tasks, seed)
    requests = spec.requests(texts, [each.params for each in tasks], keys)  # a bad one fails now
    if streamed := len(requests) == 1 and not (as_json or show_tokens):
        completions = iter([_stream(spec, texts[0], tasks[0], keys, speculation)])
    else:
        completions = _all(spec, requests, speculation)
    answers = answer.answers(tasks, requests, completions)
    if as_json:
        answers = answer.begin(spec, answers, speculation)
    answers = list(answers)
    if not as_json:
        answer.show(spec, answers, steps=show_tokens, printed=streamed)
    reasons = {each.completion.finish_reason for each in answers}
    comparison = None
    if compare and not reasons & {"interrupted", "error"}:
        from foretoken.lab.bench.race import compare as against_plain

        comparison = against_plain(spec, texts[0], seed=seed, **tasks[0].given, **speculation)
    if as_json:
        answer.end(comparison)
    elif comparison:
        answer.speedup(comparison)
    for remark in answer.remarks(answers, lenience, as_json=as_json):
        print(remark, file=sys.stderr)
    if reasons & {"interrupted", "error"}:
        raise typer.Exit(130 if "interrupted" in reasons else 1)


def _sides(words: list[str], target: str | None) -> tuple[str | None, str | None]:
    """The target and the prompt; a word alone is the prompt."""
    if len(words) > 2:
        raise InputError(f"{len(words)} texts are given; put the prompt in quotes")
    named = words[0] if len(words) == 2 else None
    return option.target(named, target), words[-1] if words else None


def _stream(
    spec: Speculator,
    prompt: Any,
    task: ModelTask,
    keys: list[tuple[int, int]],
    speculation: dict[str, Any],
) -> Completion:
    """Print text as it comes, as ids where there is no tokenizer."""
    pieces = spec.stream([prompt], task.params, seed=keys, **speculation)
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


def _all(
    spec: Speculator, requests: list[Request], speculation: dict[str, Any]
) -> Iterator[Completion]:
    """All completions, in order, each as soon as it is done; where they are interrupted, those that
    have begun. Of several, progress on standard error."""
    from foretoken.options import check
    from foretoken.speculator import BATCH

    rows = spec.inputs.rows(
        requests
    )  # all of them first: a grammar that does not compile fails now
    completions = spec.completions(rows, check(**speculation), speculation["gamma"])
    several = bar(completions, "generating", len(rows)) if len(rows) > BATCH else completions
    for row, completion in zip(rows, several, strict=True):
        if row.began or row.finish_reason is not None:
            yield completion


def _alone(prompt: str | None, file: Path | None, *others: bool) -> Path:
    """The file of prompts; InputError for what --output leaves no use for."""
    if file is None or prompt is not None:
        raise InputError("--output is for a file of prompts; give --prompt-file")
    for present, flag in zip(others, ("--compare", "--show-tokens", "--json"), strict=True):
        if present:
            raise InputError(f"{flag} and --output are both given; give the one or the other")
    return file


def _write(
    output: Path,
    file: Path,
    sampling: SamplingOptions,
    messages: Messages,
    loading: option.PairLoading,
    names: tuple[str | None, str | None],
    seed: int,
    speculation: dict[str, Any],
    cluster: Cluster,
) -> None:
    """The prompts of a file to a file of results; bad lines are told and passed over."""
    options, template = sampling.given, messages.template
    tasks, bad = task.numbered(file, messages, options)
    loading.require(names[0])
    quiet()
    convert = _converting(output) if output.suffix == ".parquet" else None
    output = output / "results.jsonl" if output.is_dir() else output
    output = output.with_suffix(".jsonl") if convert else output
    with results.Results(output) as written:
        lines = Lines(tasks, names, loading, template, seed, speculation)
        ids = {(n, i): each.line.id for n, each in tasks.items() for i in range(each.texts)}
        common = names, loading.arguments, template, speculation
        origins = {name: _origin(common, tasks[name[0]], lines.key(name)) for name in ids}
        try:
            with completing(lines, cluster) as complete:
                tally = results.fill(written, ids, origins, complete)
        except KeyboardInterrupt:
            print(f"{output} is whole; the same command goes on with it", file=sys.stderr)
            raise
    if convert:
        convert(output)
    if bad or tally.failed:
        raise typer.Exit(1)


def _converting(table: Path) -> Callable[[Path], None]:
    """What makes a table of results; what it needs is told before the work."""
    with needing("ray"):
        from foretoken.cluster.table import convert
    return lambda results: convert(results, table)


def _origin(common: object, each: ModelTask, key: tuple[int, int]) -> str:
    """What a text follows from, as a digest."""
    line = each.line
    settings = repr((common, line.prompt, line.messages, each.params, key))
    return hashlib.sha256(settings.encode(errors="surrogatepass")).hexdigest()[:16]
