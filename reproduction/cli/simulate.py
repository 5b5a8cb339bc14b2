"""`simulate`: what a fleet would do with requests at a rate, from measured costs."""

from __future__ import annotations

import json
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from rich.console import Console
from typer import Option

from foretoken.cli import option
from foretoken.cli.command import command
from foretoken.cli.render import make_table, open_console, print_paragraph, track_progress

if TYPE_CHECKING:
    from reproduction.costs import FleetCosts
    from reproduction.fleet import PaperFleet, Simulated

HEADINGS = ("TTFT p50", "p99", "latency p50", "p99", "requests/s", "tokens/s", "batch", "busy")


@command
def simulate(
    measurement: Annotated[
        Path, Option(help="A file of python -m reproduction costs --out.", show_default=False)
    ],
    rate: Annotated[
        list[float],
        Option(
            help="Requests a second, at random times (Poisson); may be repeated.",
            min=1e-6,
            max=1e9,
            show_default=False,
        ),
    ],
    # more than these would not be simulated in an hour
    replicas: Annotated[
        int, Option(help="Engines, each as the one that was measured.", min=1, max=10_000)
    ] = 1,
    requests: Annotated[
        int, Option(help="Requests that come, at each rate.", min=1, max=1_000_000)
    ] = 1000,
    prompt_tokens: Annotated[
        int | None,
        Option(help="Of a request; left out: as the measured prompts.", min=1, max=100_000),
    ] = None,
    output_tokens: Annotated[
        int | None,
        Option(help="New tokens of a request; left out: as the measured texts.", min=1, max=20_000),
    ] = None,
    gamma: Annotated[
        int | None,
        Option(help="Draft tokens per step; left out: chosen before every step.", min=0),
    ] = None,
    seed: Annotated[int, Option(help="Of times, texts and acceptance.")] = 0,
    as_json: option.Json = False,
) -> None:
    """Simulate a fleet of engines: latencies, throughput and utilisation at rates of requests."""
    from reproduction import fleet as on_paper  # late: torch takes seconds to import
    from reproduction.costs import load

    fleet = on_paper.PaperFleet(replicas, requests, prompt_tokens, output_tokens, gamma, seed)
    measured = load(measurement)
    capacity = on_paper.capacity(measured, fleet)
    simulated = [
        on_paper.simulate(
            measured,
            fleet,
            each,
            capacity=capacity,
            track=partial(track_progress, text=f"{each:g} requests a second"),
        )
        for each in rate
    ]
    if as_json:
        document = {
            "measurement": str(measurement),
            "target": measured.target,
            "draft": measured.draft,
            "rows": measured.serving.rows,
            "fleet": asdict(fleet),
            "capacity": capacity,
            "rates": [asdict(one) | {"overloaded": one.overloaded} for one in simulated],
        }
        print(json.dumps(document, allow_nan=False))
    else:
        _show(measured, fleet, simulated, open_console())


def _show(
    measured: FleetCosts,
    fleet: PaperFleet,
    simulated: list[Simulated],
    console: Console,
) -> None:
    print_paragraph(
        console,
        f"{fleet.replicas} x {measured.target} with draft {measured.draft}, up to "
        f"{measured.serving.rows} rows each, as measured on {measured.cpu}: "
        f"{fleet.requests} requests",
    )
    rates = make_table("rate", *HEADINGS, left=0)
    for one in simulated:
        rates.add_row(f"{one.rate:g}", *_row(one), style="bold" if one.overloaded else None)
    console.print()
    console.print(rates)
    console.print()
    capacity = simulated[0].capacity
    print_paragraph(
        console,
        f"times in ms; at most {capacity:.3g} requests a second can be answered; batch: rows of a "
        "step, by time; busy: share of the time",
    )
    for one in simulated:
        if one.overloaded:
            replicas = int(one.rate / (capacity / fleet.replicas)) + 1
            print_paragraph(
                console,
                f"{one.rate:g} requests a second are too many: the queue grows as long as they "
                f"come; give {replicas} replicas or more, or fewer requests",
            )


def _row(one: Simulated) -> tuple[str, ...]:
    times = ["grows"] * 4
    if one.first_token is not None and one.whole is not None:
        percentiles = (*one.first_token.values(), *one.whole.values())
        times = [f"{1e3 * seconds:.0f}" for seconds in percentiles]
    return (
        *times,
        f"{one.requests_per_second:.3g}",
        f"{one.tokens_per_second:.0f}",
        f"{one.mean_batch:.1f}",
        f"{one.utilisation:.0%}",
    )
