"""`foretoken plan`: the best draft and gamma from measurements, or that none pays."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from foretoken.cli import measure as cli
from foretoken.cli import option
from foretoken.errors import InputError

if TYPE_CHECKING:
    from foretoken.lab.measurement import Measurement
    from foretoken.lab.plan import Candidate, Plan


def plan(
    context: typer.Context,
    files: Annotated[
        list[Path] | None,
        typer.Argument(help="Files of foretoken measure --out, all of one target."),
    ] = None,
    target: option.Target = None,
    draft: Annotated[
        list[str] | None,
        typer.Option(help="A draft to measure first; may be repeated.", show_default=False),
    ] = None,
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
    dtype: option.Dtype = "float32",
    draft_dtype: option.DraftDtype = None,
    device: option.Device = "cpu",
    runtime: option.Runtime = "auto",
    as_json: option.Json = False,
) -> None:
    """Pick the draft and gamma that are predicted to be fastest, or say: do not speculate."""
    if files and (target or draft or prompts):
        raise InputError("give files of measurements, or --target, --draft and --prompts; not both")
    if not files and prompts is None:
        raise InputError("give files of foretoken measure --out, or --prompts to measure on")
    named = _saved(files) if files else _measured(prompts, limit, draft or [None], context.params)
    from foretoken.lab.plan import plan as make  # late: torch takes seconds to import

    found = make(named)
    if as_json:
        print(json.dumps(_document(found), allow_nan=False))
    else:
        _show(found, Console(highlight=False))


def _saved(files: list[Path]) -> list[tuple[str, Measurement]]:
    for file in files:
        if not file.is_file():
            raise InputError(f"there is no {file}; make it with foretoken measure --out")
    from foretoken.lab.measurement import load  # late: torch takes seconds to import

    return [(str(file), load(file)) for file in files]


def _measured(
    prompts: Path | None, limit: int | None, drafts: list[Any], asked: dict[str, Any]
) -> list[tuple[str, Measurement]]:
    """One after the other; each draft has plain runs of its own to be compared with."""
    assert prompts is not None
    lines = cli.read(prompts, limit)
    return [(draft or "", cli.run(lines, {**asked, "draft": draft}, None)) for draft in drafts]


def _document(found: Plan) -> dict[str, Any]:
    return {
        "speculate": found.gamma > 0,
        "draft": found.first.draft if found.gamma else None,
        "gamma": found.gamma,
        "command": found.command,
        "vllm_speculative_config": found.vllm,
        "candidates": [
            {
                "draft": one.draft,
                "alpha": asdict(one.measurement.alpha),
                "c": one.measurement.c,
                **asdict(one.best),
            }
            for one in found.candidates
        ],
    }


def _show(found: Plan, console: Console) -> None:
    first = found.first.measurement
    console.print(_table(found))
    console.print(
        "v: cost of a target pass over gamma + 1 tokens; tokens: a target call; "
        f"speed-up over plain decoding of {escape(first.target.name)} for texts of "
        f"{first.tokens:.0f} new tokens; ± is 95 %, from the intervals of alpha, c and v; guesses "
        "beyond the gamma that was measured are taken as kept with alpha",
        soft_wrap=True,
    )
    console.print(_verdict(found), soft_wrap=True)
    config = "none" if found.vllm is None else json.dumps(found.vllm)
    console.print(f"foretoken: {found.command}", soft_wrap=True, markup=False)
    console.print(f"vLLM --speculative-config: {config}{_why(found)}", soft_wrap=True, markup=False)


def _table(found: Plan) -> Table:
    view = Table()
    for heading in ("draft", "alpha", "c", "gamma", "v", "tokens", "speed-up"):
        if heading == "draft":
            view.add_column(heading, overflow="fold")
        else:
            view.add_column(heading, justify="right", no_wrap=True)
    for one in found.candidates:
        view.add_row(*_row(one), style="bold" if one is found.first and found.gamma else None)
    return view


def _row(one: Candidate) -> tuple[str, ...]:
    m, best = one.measurement, one.best
    return (
        escape(one.draft),
        f"{m.alpha.value:.3f} ± {m.alpha.error:.3f}",
        "" if m.c is None else f"{m.c:.4f}",
        str(best.gamma),
        f"{m.v[best.gamma]:.2f}",
        f"{best.tokens_per_call:.2f}",
        f"{best.speedup.value:.2f}x ± {best.speedup.error:.2f}",
    )


def _verdict(found: Plan) -> str:
    best = found.first.best
    gain = f"{best.speedup.value:.2f}x ± {best.speedup.error:.2f}"
    if not found.gamma:
        return (
            f"[bold]do not speculate[/bold]: the best draft is predicted to give {gain}, at gamma "
            f"{best.gamma}"
        )
    sure = "" if best.speedup.low > 1 else "; the interval holds 1, so measure on more prompts"
    return (
        f"[bold]speculate[/bold] with {escape(found.first.draft)}, gamma {best.gamma}: {gain}{sure}"
    )


def _why(found: Plan) -> str:
    if not found.gamma:
        return ", decode plainly"
    return "" if found.vllm else ", vLLM has no such draft"
