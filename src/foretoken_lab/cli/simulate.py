"""`foretoken-lab simulate`: what a fleet would do with requests at a rate, from measured costs."""

from __future__ import annotations

import json
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from rich import box
from rich.console import Console
from rich.table import Table
from typer import Option

from foretoken.cli import option
from foretoken.cli.command import command
from foretoken.cli.render import bar, page, prose
from foretoken.errors import InputError

if TYPE_CHECKING:
    from foretoken.lab.measurement.result import Measurement
    from foretoken_lab.fleet.simulate import PaperFleet, Simulated

LEAST, MOST = 1e-6, 1e9  # requests a second
HEADINGS = ("TTFT p50", "p99", "latency p50", "p99", "requests/s", "tokens/s", "batch", "busy")


@command
def simulate(
    measurement: Annotated[
        Path, Option(help="A file of foretoken measure --rows --out.", show_default=False)
    ],
    rate: Annotated[
        list[float],
        Option(
            help="Requests a second, at random times (Poisson); may be repeated.",
            show_default=False,
        ),
    ],
    replicas: Annotated[int, Option(help="Engines, each as the one that was measured.")] = 1,
    requests: Annotated[int, Option(help="Requests that come, at each rate.")] = 1000,
    prompt_tokens: Annotated[
        int | None, Option(help="Of a request; left out: as the measured prompts.")
    ] = None,
    output_tokens: Annotated[
        int | None, Option(help="New tokens of a request; left out: as the measured texts.")
    ] = None,
    gamma: option.Guesses = None,
    seed: Annotated[int, Option(help="Of times, texts and acceptance.")] = 0,
    as_json: option.Json = False,
) -> None:
    """Simulate a fleet of engines: latencies, throughput and utilisation at rates of requests."""
    for each in rate:
        if not LEAST <= each <= MOST:
            raise InputError(f"rate is {each:g}; give {LEAST:g} to {MOST:g} requests a second")
    from foretoken_lab.fleet.simulate import PaperFleet  # late: torch takes seconds to import

    fleet = PaperFleet(replicas, requests, prompt_tokens, output_tokens, gamma, seed)
    fleet.require()
    measured, simulated = _simulated(measurement, fleet, rate)
    if as_json:
        print(json.dumps(_document(measurement, measured, fleet, simulated), allow_nan=False))
    else:
        _show(measured, fleet, simulated, page())


def _simulated(
    file: Path, fleet: PaperFleet, rates: list[float]
) -> tuple[Measurement, list[Simulated]]:
    from foretoken.lab.measurement.result import load
    from foretoken_lab.fleet.simulate import capacity, require, simulate

    measured = load(file)
    serving = require(measured, str(file))
    most = capacity(measured, serving, fleet)
    return measured, [
        simulate(
            measured,
            serving,
            fleet,
            rate,
            capacity=most,
            track=partial(bar, text=f"{rate:g} requests a second"),
        )
        for rate in rates
    ]


def _document(
    file: Path, measured: Measurement, fleet: PaperFleet, simulated: list[Simulated]
) -> dict[str, Any]:
    assert measured.serving is not None
    return {
        "measurement": str(file),
        "target": measured.target.name,
        "draft": measured.draft.name,
        "rows": measured.serving.rows,
        "fleet": asdict(fleet),
        "capacity": simulated[0].capacity,
        "rates": [asdict(one) | {"overloaded": one.overloaded} for one in simulated],
    }


def _show(
    measured: Measurement, fleet: PaperFleet, simulated: list[Simulated], console: Console
) -> None:
    assert measured.serving is not None
    prose(
        console,
        f"{fleet.replicas} x {measured.target.name} with draft {measured.draft.name}, up to "
        f"{measured.serving.rows} rows each, as measured on {measured.machine.cpu}: "
        f"{fleet.requests} requests",
    )
    console.print()
    console.print(_table(simulated))
    console.print()
    prose(
        console,
        f"times in ms; at most {simulated[0].capacity:.3g} requests a second can be answered; "
        "batch: rows of a step, by time; busy: share of the time",
    )
    for one in simulated:
        if one.overloaded:
            warning = f"{one.rate:g} requests a second are too many"
            prose(
                console,
                f"{warning}: the queue grows as long as they come, and so do the latencies; give "
                f"{_enough(one, fleet)} replicas or more, or fewer requests",
                bold=warning,
            )


def _enough(one: Simulated, fleet: PaperFleet) -> int:
    """The least number of replicas whose capacity exceeds the rate."""
    return int(one.rate / (one.capacity / fleet.replicas)) + 1


def _table(simulated: list[Simulated]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False, show_edge=False)
    for heading in ("rate", *HEADINGS):
        table.add_column(heading, justify="right", no_wrap=True)
    for one in simulated:
        table.add_row(f"{one.rate:g}", *_row(one), style="bold" if one.overloaded else None)
    return table


def _row(one: Simulated) -> tuple[str, ...]:
    times = ["grows"] * 4
    if one.first_token is not None and one.whole is not None:
        percentiles = (one.first_token.p50, one.first_token.p99, one.whole.p50, one.whole.p99)
        times = [f"{1e3 * seconds:.0f}" for seconds in percentiles]
    return (
        *times,
        f"{one.requests_per_second:.3g}",
        f"{one.tokens_per_second:.0f}",
        f"{one.mean_batch:.1f}",
        f"{one.utilisation:.0%}",
    )
