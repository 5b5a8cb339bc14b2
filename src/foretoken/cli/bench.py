"""`foretoken bench`: measure whether speculative decoding is faster than plain decoding on this
machine, and which draft and gamma are the fastest."""

from __future__ import annotations

import hashlib
import json
import shlex
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from typer import Option

from foretoken.cli import option
from foretoken.cli import prompts as prompt_files
from foretoken.cli.command import command, format_flag, set_up_logging
from foretoken.cli.prompts import ChatTemplate, PromptLine
from foretoken.cli.render import (
    format_milliseconds,
    make_table,
    open_console,
    print_labelled,
    print_paragraph,
)
from foretoken.costing import contention
from foretoken.errors import InputError, get_base_name
from foretoken.measurement.options import MIN_QUARTILE_ROUNDS, BenchOptions, format_gamma

DEFAULT_PROMPTS = (
    "The old house stood at the end of the lane, and",
    "She opened the letter with trembling hands, for",
    "The three most important things to know about the weather are",
    "def average(numbers):\n    ",
)
DEFAULT_SAMPLING = {
    "rule": "block",
    "temperature": 0.0,
    "top_k": 0,
    "top_p": 1.0,
}  # these values are left out of the printed command
COLUMN_LEGEND = {
    "first ms": "milliseconds until the first tokens",
    "tokens/s": "after the first tokens (for batches: prefill included); median and quartiles over "
    "rounds",
    "a call": "new tokens of a sequence per forward pass of the target",
    "alpha": "mean of sum min(p, q) over verified draft tokens",
    "c": "time of a draft token / time of a target forward",
    "v": "time of a target forward over the longest block / over one token",
    "theory": "speed-up by Theorem 3.8 from alpha, c and v",
    "speed-up": "over plain decoding in the same round, median",
}

CATEGORY_LEGEND = {
    "sequences": "per round; for batches: the batch size, as each category is a batch of its own",
    "plain": "tokens/s of plain decoding",
}


@dataclass(frozen=True)
class TimingOptions:
    """Options for the completions and rounds that are timed."""

    max_new_tokens: Annotated[int, "Exact number of new tokens of every completion."] = 96
    repeats: Annotated[int, "Rounds to time, after a warm-up round."] = 5
    temperature: option.Temperature = 0.0
    top_k: option.TopK = 0
    top_p: option.TopP = 1.0
    seed: option.Seed = 0
    rule: option.Rule = "block"


@command
def bench(
    loading: option.PairLoadOptions,
    texts: TimingOptions,
    messages: prompt_files.TemplateOptions,
    place: option.TargetArgument = None,
    target: option.Target = None,
    draft: Annotated[
        list[str] | None,
        Option(help=option.DRAFT_HELP + " Repeat it to compare drafts.", show_default=False),
    ] = None,
    gamma: Annotated[
        str, "Draft tokens per step, as a list. 0 (plain) and automatic gamma always run."
    ] = "2,4,8",
    prompts: Annotated[
        Path | None,
        f'File of prompts like yours. {option.PROMPTS_HELP} "messages" may replace "prompt", and '
        '"category" adds results by category. Files of SPEED-Bench, Spec-Bench and MT-Bench also '
        "work: the first turn of each question is the prompt. Default: four short prompts.",
    ] = None,
    limit: Annotated[
        int | None,
        "Number of prompts of each category to use, or of a file without categories. Default: all.",
    ] = None,
    batch: Annotated[
        str, "Batch sizes, as a list such as 1,8; 1 generates one sequence after another."
    ] = "1",
    out: Annotated[
        Path | None,
        "Save the results as JSON, for serve --speculative-config. The same command resumes "
        "a benchmark.",
    ] = None,
    as_json: option.Json = False,
) -> None:
    """Measure whether speculative decoding is faster here, and with which draft and gamma.

    For each draft, plain decoding, every gamma and automatic gamma take turns on the same prompts.
    After Ctrl-C the results of the finished rounds are printed.
    """
    target = option.resolve_target(option.merge_target(place, target))
    lines = _read_prompts(prompts, limit)
    messages.require_used(lines)
    template = messages.template
    options = BenchOptions(
        **asdict(texts),
        target=target,
        drafts=list(draft or [None]),
        gammas=sorted({0, *option.parse_numbers("gamma", gamma, int)}),
        batch=sorted({*option.parse_numbers("batch", batch, int)}),
        prompts=len(lines),
        prompts_sha256=_compute_digest(lines, template),
        loading=option.get_changed_options(loading),
    )
    loading.require(target)
    if out is not None:
        option.require_file(out)
    set_up_logging()
    from foretoken.measurement import benchmark  # late: imports torch

    benchmark_run = benchmark.Benchmark(
        options,
        loading.load,
        lambda target_info: template.make_prompts(lines, target_info),
        out,
        _show_progress,
        categories=[line.category for line in lines if line.category],
    )
    if benchmark_run.num_resumed is not None:
        print(f"{out}: {benchmark_run.num_resumed} results are already there", file=sys.stderr)
    benchmark_run.run()
    document = benchmark_run.document
    if document["best"] is None:
        Console(stderr=True).print("interrupted before the end of the first round")
        raise typer.Exit(130)
    if as_json:
        print(json.dumps(document, allow_nan=False))
    else:
        _print_document(document, open_console())
    if benchmark_run.save_error:
        raise benchmark_run.save_error
    if document["interrupted"]:
        raise typer.Exit(130)


def _read_prompts(file: Path | None, limit: int | None) -> list[PromptLine]:
    """Return the prompts to complete: those of the file, or the default ones."""
    if file is not None:
        return prompt_files.read_benchmark_prompts(file, limit)
    if limit is not None:
        raise InputError("--limit needs a file of prompts; add --prompts")
    return list(map(PromptLine, DEFAULT_PROMPTS))


def _compute_digest(lines: list[PromptLine], template: ChatTemplate) -> str:
    """Return a digest of the prompts, their categories and a chat template of the caller."""
    content: list[Any] = [line.messages or line.prompt for line in lines]
    if any(line.category for line in lines):
        content.append([line.category for line in lines])
    if template != ChatTemplate():
        content.append(template)
    return hashlib.sha256(json.dumps(content).encode()).hexdigest()


@contextmanager
def _show_progress(title: str, turns: int) -> Iterator[Callable[[str], None]]:
    """Show a progress bar; yield a function that advances the bar and displays a text."""
    with Progress(console=Console(stderr=True), transient=True) as progress:
        bar = progress.add_task(title, total=turns)
        yield lambda text: progress.update(bar, advance=1, description=text)


def _print_document(document: dict[str, Any], console: Console) -> None:
    """Print the results of a benchmark: the table, the lower bound by memory bandwidth, and the
    advice."""
    options = document["asked"]
    sampling = f"temperature {options['temperature']:g}" if options["temperature"] else "greedy"
    print_paragraph(
        console,
        f"{options['target']} on {document['runtime']}: {options['prompts']} prompts, "
        f"{options['max_new_tokens']} tokens each, {sampling}, rounds: {options['repeats']}; "
        f"{document['machine']['cpu']}, cores: {document['machine']['cores']}",
    )
    console.print()
    console.print(_make_table(document["figures"]))
    console.print()
    if any("categories" in row for row in document["figures"]):
        console.print(_make_category_table(document["figures"]))
        console.print()
        print_labelled(console, CATEGORY_LEGEND.items(), 10)
    print_labelled(console, COLUMN_LEGEND.items(), 10)
    console.print()
    if line := _describe_memory_floor(document):
        print_paragraph(console, line)
    if warning := contention.describe_contention(document["others"]):
        print_paragraph(console, warning, bold=warning)
    if options["repeats"] < MIN_QUARTILE_ROUNDS:
        print_paragraph(console, f"fewer than {MIN_QUARTILE_ROUNDS} rounds give no quartiles")
    _advise(document["best"], console)


def _make_table(figures: list[dict[str, Any]]) -> Table:
    heads = ("first ms", "tokens/s", "quartiles", "a call", "alpha", "c", "v", "theory", "speed-up")
    view, last = make_table("", *heads, gap=0), None
    for row in figures:
        if last != (last := (row["draft"], row["batch"])):
            view.add_row(_name_draft(*last), style="bold")
        rate, predicted = row["tokens_per_second"], row["predicted"] or {}
        view.add_row(
            format_gamma(row["gamma"]),
            format_milliseconds(row["first_seconds"]["median"]),
            _format_rate(rate["median"]),
            f"{_format_rate(rate['q1'])}-{_format_rate(rate['q3'])}",
            _format_number(row["tokens_per_call"]),
            *(_format_number(predicted.get(name)) for name in ("alpha", "c", "v", "predicted")),
            f"{row['speedup']['median']:.2f}x",
        )
    return view


def _make_category_table(figures: list[dict[str, Any]]) -> Table:
    """Return a table with a line for each category, below each draft and batch size with its
    fastest gamma."""
    view = make_table("", "sequences", "plain", "tokens/s", "a call", "alpha", "speed-up")
    contestants: dict[tuple[str, int], list[dict[str, Any]]] = {}
    for row in figures:
        contestants.setdefault((row["draft"], row["batch"]), []).append(row)
    for (draft, batch), rows in contestants.items():
        plain = next(row["categories"] for row in rows if row["gamma"] == 0)
        drafted = [row for row in rows if row["gamma"] != 0]
        best = max(drafted or rows, key=lambda row: row["speedup"]["median"])
        view.add_row(f"{_name_draft(draft, batch)}, {format_gamma(best['gamma'])}", style="bold")
        for name, row in best["categories"].items():
            view.add_row(
                name,
                str(row["sequences"]),
                _format_rate(plain[name]["tokens_per_second"]["median"]),
                _format_rate(row["tokens_per_second"]["median"]),
                _format_number(row["tokens_per_call"]),
                _format_number(row["alpha"]),
                f"{row['speedup']['median']:.2f}x",
            )
    return view


def _name_draft(draft: str, batch: int) -> str:
    return get_base_name(draft) + (f", batch size {batch}" if batch > 1 else "")


def _format_number(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}"


def _format_rate(value: float) -> str:
    return f"{value:.1f}" if value < 100 else f"{value:.0f}"


def _describe_memory_floor(document: dict[str, Any]) -> str:
    """Return a line about memory: the least time in which a forward pass of the target can load its
    weights, and the peak memory of the process."""
    memory = document["memory"]
    peak = f"process peak {memory['peak_bytes'] / 1e9:.2f} GB"
    if not memory["pass_bytes"]:
        return peak
    floor = memory["pass_bytes"] / memory["bytes_per_second"]
    plain = [row for row in document["figures"] if row["batch"] == 1 and row["gamma"] == 0]
    times_floor = plain[0]["seconds_per_token"]["median"] / floor if plain else None
    return (
        f"memory: a forward pass of the target loads {memory['pass_bytes'] / 1e6:.0f} MB, at least "
        f"{floor * 1e3:.2f} ms at {memory['bytes_per_second'] / 1e9:.1f} GB/s"
        + (f"; a plain token takes {times_floor:.2f} times as long" if times_floor else "")
        + f"; {peak}"
    )


def _advise(best: dict[str, Any], console: Console) -> None:
    """Print the draft and gamma to use, and the command that uses them."""
    tried, sampling, load = best["tried"], dict(best["generate"]), dict(best["load"])
    speculate, gamma = best["draft"] != "none", sampling.pop("gamma")
    advice, reason = "do not speculate", "there is no draft"
    if speculate:
        name = "automatic gamma" if gamma is None else f"gamma {gamma}"
        advice, reason = f"speculate with {tried}, {name}", f"{best['speedup']:.2f}x plain decoding"
    elif tried != "none":
        reason = f"{tried} gives {best['speedup']:.2f}x plain decoding at best"
        if not best["certain"]:
            advice = "undecided"
            reason += (
                ", but the times vary too much to be sure; measure again with more prompts or "
                "--repeats, on an idle machine. Until then, decode without drafts"
            )
    print_paragraph(console, f"{advice}: {reason}", bold=advice)
    words = ["foretoken", "generate", "--target", load.pop("target"), "--draft", load.pop("draft")]
    words += ["--gamma", str(gamma)] if speculate and gamma is not None else []
    words += option.format_flags(load)
    for name, value in sampling.items():
        if value != DEFAULT_SAMPLING[name]:
            words += [format_flag(name), f"{value:g}" if isinstance(value, float) else str(value)]
    console.print(shlex.join(words), "PROMPT", soft_wrap=True, markup=False)
