"""`costs`: what serving a pair costs on this machine, and its betas, for `simulate`."""

from __future__ import annotations

from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Annotated

from typer import Option

from foretoken.cli import option, prompts
from foretoken.cli.command import command, quiet
from foretoken.cli.render import bar
from foretoken.costing import contention


@command
def costs(
    loading: option.PairLoading,
    prompt_file: Annotated[
        Path, Option("--prompts", help=f"Prompts like those to serve. {option.PROMPTS}")
    ],
    out: Annotated[Path, Option(help="The file of costs to write.")],
    target: option.Target = None,
    draft: option.Draft = None,
    rows: Annotated[int, Option(help="Requests that an engine runs at a time.", min=1)] = 16,
    temperature: option.Temperature = 0.0,
    max_new_tokens: Annotated[int, Option(help="New tokens per prompt, at most.")] = 64,
    limit: Annotated[int | None, Option(help="Use only the first prompts of the file.")] = None,
    seed: option.Seed = 0,
) -> None:
    """Measure what serving a pair costs on this machine, for `simulate`: it must be idle."""
    lines, target = prompts.first(prompt_file, limit), option.chosen(target)
    option.require_folder(out)
    loading.require(target)
    from foretoken.measurement.machine import describe  # late: torch takes seconds
    from foretoken.sampling.params import SamplingParams
    from reproduction.costs import FleetCosts
    from reproduction.serving import betas, require, serving_costs

    quiet()
    params = SamplingParams(temperature, max_new_tokens=max_new_tokens)
    spec = loading.load(target, draft).prepared()
    require(spec)
    texts = [prompts.for_model(line, spec) for line in lines]
    reading = contention.read()
    measured = FleetCosts(
        date=datetime.now(UTC).isoformat(timespec="seconds"),
        target=spec.target_name,
        draft=spec.draft_name,
        cpu=describe(spec.target.device).cpu,
        prompts=str(prompt_file),
        temperature=temperature,
        texts=betas(spec, texts, params, seed, partial(bar, text="measuring")),
        serving=serving_costs(spec, texts, params, rows),
    )
    measured.save(out)
    print(f"{out}: simulate with `python -m reproduction simulate --measurement {out} --rate RATE`")
    if warning := contention.remark(contention.share([contention.taken(reading)])):
        print(warning)
