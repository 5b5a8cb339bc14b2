"""`foretoken plan`: the best draft and gamma from measurements, or that none pays."""

from __future__ import annotations

import json
import shlex
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from foretoken.cli import measure as cli
from foretoken.cli import option
from foretoken.cli.command import command
from foretoken.cli.render import labelled, page, prose
from foretoken.costing.contention import remark
from foretoken.errors import InputError

if TYPE_CHECKING:
    from foretoken.lab.measurement.plan import Candidate, Plan
    from foretoken.lab.measurement.result import Measurement

LEGEND = [
    ("c", "time of a guess over that of a target pass"),
    ("v", "time of a target pass over gamma + 1 tokens over that of one over 1"),
    ("tokens", "a target call"),
]


@command
def plan(
    context: typer.Context,
    loading: option.PairLoading,
    files: Annotated[
        list[Path] | None,
        typer.Argument(help="Files of foretoken measure --out, all of one target."),
    ] = None,
    target: option.Target = None,
    draft: Annotated[
        list[str] | None,
        typer.Option(help="A draft to measure first; may be repeated.", show_default=False),
    ] = None,
    own: Annotated[
        bool,
        typer.Option(
            "--self",
            help="Measure what needs no second model too: the target's own copies and look-up.",
        ),
    ] = False,
    prompts: Annotated[
        Path | None, typer.Option(help="Prompts to measure on, where no files are given.")
    ] = None,
    gamma: option.Gamma = 4,
    temperature: option.Temperature = 0.0,
    top_k: option.TopK = 0,
    top_p: option.TopP = 1.0,
    min_p: option.MinP = 0.0,
    max_new_tokens: option.MaxNewTokens = 64,
    limit: option.Limit = None,
    seed: option.Seed = 0,
    as_json: option.Json = False,
) -> None:
    """Pick the draft and gamma that are predicted to be fastest, or say: do not speculate."""
    if files and (target or draft or own or prompts or loading != option.PairLoading()):
        raise InputError(
            "give files of measurements, or --target, --draft, --self and --prompts with options "
            "of loading; not both"
        )
    if not files and prompts is None:
        raise InputError("give files of foretoken measure --out, or --prompts to measure on")
    if files:
        measurements = saved(files)
    else:
        drafts = [*(draft or []), *(_own_drafts(target, loading) if own else [])]
        measurements = _measured(prompts, limit, drafts or [None], context.params, loading)
    from foretoken.lab.measurement.plan import plan as make  # late: torch takes seconds to import

    planned = make(measurements)
    if as_json:
        print(json.dumps(_document(planned), allow_nan=False))
    else:
        _show(planned, page())


def saved(files: list[Path]) -> list[tuple[str, Measurement]]:
    """Measurements under their names; InputError for a file that is not there or none."""
    for file in files:
        if not file.is_file():
            raise InputError(f"there is no {file}; make it with foretoken measure --out")
    from foretoken.lab.measurement.result import load  # late: torch takes seconds to import

    return [(str(file), load(file)) for file in files]


def _own_drafts(target: str | None, loading: option.PairLoading) -> list[str]:
    """Drafts that a target has without a second model."""
    from foretoken.loading.load import asset  # late: torch takes seconds to import
    from foretoken.loading.pending import kinds
    from foretoken.loading.runtimes import Placement
    from foretoken.loading.sources import source
    from foretoken.loading.target import ModelFacts

    read = source(target or asset("target"), loading.revision, loading.trust_remote_code)
    facts = ModelFacts(read, Placement(loading.dtype, runtime=loading.runtime))
    return [*kinds(loading.dtype, facts.layers), "lookup"]


def _measured(
    prompts: Path | None,
    limit: int | None,
    drafts: list[Any],
    parameters: dict[str, Any],
    loading: option.PairLoading,
) -> list[tuple[str, Measurement]]:
    """One after the other, each draft against plain runs of its own."""
    assert prompts is not None
    lines = cli.read(prompts, limit)
    return [
        (draft or "", cli.run(lines, {**parameters, "draft": draft}, loading, None))
        for draft in drafts
    ]


def _document(plan: Plan) -> dict[str, Any]:
    return {
        "speculate": plan.gamma > 0,
        "draft": plan.first.draft if plan.gamma else None,
        "gamma": plan.gamma,
        "command": plan.command,
        "vllm_speculative_config": plan.vllm,
        "candidates": [
            {
                "draft": candidate.draft,
                "alpha": asdict(candidate.measurement.alpha),
                "c": candidate.measurement.c,
                "others": candidate.measurement.others,
                **asdict(candidate.best),
            }
            for candidate in plan.candidates
        ],
    }


def _show(plan: Plan, console: Console) -> None:
    first = plan.first.measurement
    console.print(_table(plan))
    console.print()
    labelled(console, LEGEND, 10)
    prose(
        console,
        f"speed-up over plain decoding of {first.target.name} for texts of {first.tokens:.0f} new "
        "tokens, as measured with one gamma; for others in proportion to what follows from the "
        "guesses kept and the costs. Guesses beyond the gamma that was measured are taken as kept "
        "with alpha; ± is 95 %",
    )
    console.print()
    _verdict(plan, console)
    for candidate in plan.candidates:
        if warning := remark(candidate.measurement.others):
            prose(console, f"{candidate.draft}: {warning}", bold=warning)
    console.print()
    for line in _broken(shlex.split(plan.command), console.width):
        console.print(line, soft_wrap=True, markup=False)
    console.print()
    config = "none" if plan.vllm is None else json.dumps(plan.vllm)
    if not plan.gamma:
        config += ", decode plainly"
    elif not plan.vllm:
        config += ", vLLM has no such draft"
    prose(console, f"vLLM --speculative-config: {config}")


def _broken(arguments: list[str], width: int) -> list[str]:
    """A shell command, continued over lines of at most that width."""
    lines = [""]
    for argument in map(shlex.quote, arguments):
        if lines[-1] and len(lines[-1]) + len(argument) + 3 > width:
            lines[-1] += " \\"
            lines.append(f"    {argument}")
        else:
            lines[-1] += f" {argument}" if lines[-1] else argument
    return lines


def _table(plan: Plan) -> Table:
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False, show_edge=False)
    table.add_column("draft", overflow="fold")
    for heading in ("alpha", "c", "gamma", "v", "tokens", "speed-up"):
        table.add_column(heading, justify="right", no_wrap=True)
    names = _short([candidate.draft for candidate in plan.candidates])
    for candidate, name in zip(plan.candidates, names, strict=True):
        style = "bold" if candidate is plan.first and plan.gamma else None
        table.add_row(escape(name), *_row(candidate), style=style)
    return table


def _short(names: list[str]) -> list[str]:
    """The shortest ends of paths that tell them apart."""
    parts = [name.split("/") for name in names]
    for count in range(1, max(map(len, parts))):
        ends = ["/".join(part[-count:]) for part in parts]
        if len(set(ends)) == len(set(names)):
            return ends
    return names


def _row(candidate: Candidate) -> tuple[str, ...]:
    m, best = candidate.measurement, candidate.best
    return (
        f"{m.alpha.value:.3f} ± {m.alpha.error:.3f}",
        "" if m.c is None else f"{m.c:.4f}",
        str(best.gamma),
        f"{m.v[best.gamma]:.2f}",
        f"{best.tokens_per_call:.2f}",
        f"{best.speedup.value:.2f}x ± {best.speedup.error:.2f}",
    )


def _verdict(plan: Plan, console: Console) -> None:
    best = plan.first.best
    gain = f"{best.speedup.value:.2f}x ± {best.speedup.error:.2f}"
    if not plan.gamma:
        advice = "do not speculate"
        reason = f"the best draft is predicted to give {gain}, at gamma {best.gamma}"
        return prose(console, f"{advice}: {reason}", bold=advice)
    sure = "" if best.speedup.low > 1 else "; the interval holds 1, so measure on more prompts"
    advice = f"speculate with {plan.first.draft}, gamma {best.gamma}: {gain}{sure}"
    prose(console, advice, bold="speculate")
