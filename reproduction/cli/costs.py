"""`costs`: what serving a pair costs on this machine, and its betas, for `simulate`."""

from __future__ import annotations

from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Annotated

from typer import Option

from foretoken.cli import option, prompts
from foretoken.cli.command import command, set_up_logging
from foretoken.cli.render import track_progress
from foretoken.costing import contention


@command
def costs(
    loading: option.PairLoadOptions,
    prompt_file: Annotated[
        Path, Option("--prompts", help=f"Prompts like those to serve. {option.PROMPTS_HELP}")
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
    lines, target = prompts.read_first_prompts(prompt_file, limit), option.resolve_target(target)
    option.require_folder(out)
    loading.require(target)
    from foretoken.measurement.machine import get_machine  # late: torch takes seconds
    from foretoken.sampling.params import SamplingParams
    from reproduction.costs import FleetCosts
    from reproduction.serving import betas, require, serving_costs

    set_up_logging()
    params = SamplingParams(temperature, max_new_tokens=max_new_tokens)
    spec = loading.load(target, draft).prepared()
    require(spec)
    texts = [prompts.to_model_prompt(line, spec) for line in lines]
    reading = contention.take_reading()
    measured = FleetCosts(
        date=datetime.now(UTC).isoformat(timespec="seconds"),
        target=spec.target_name,
        draft=spec.draft_name,
        cpu=get_machine(spec.target.device).cpu,
        prompts=str(prompt_file),
        temperature=temperature,
        texts=betas(spec, texts, params, seed, partial(track_progress, text="measuring")),
        serving=serving_costs(spec, texts, params, rows),
    )
    measured.save(out)
    print(f"{out}: simulate with `python -m reproduction simulate --measurement {out} --rate RATE`")
    if warning := contention.describe_contention(
        contention.compute_others_share([contention.measure_since(reading)])
    ):
        print(warning)
