"""What `foretoken trace` prints beside the text, and the page that it writes."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import date
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich import box
from rich.table import Table

from foretoken.cli.answer import Answer, caption
from foretoken.cli.render import milliseconds

if TYPE_CHECKING:
    from foretoken.request import StepRecord
    from foretoken.speculator import Speculator

HEADINGS = ("step", "drafted", "accepted", "tokens", "draft ms", "score ms", "verify ms")
TEMPLATE = Path(__file__).with_name("trace.html")


def table(steps: list[StepRecord]) -> Table:
    """A row for every step, and their sums."""
    grid = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False, show_edge=False)
    for heading in HEADINGS:
        grid.add_column(heading, justify="right", no_wrap=True)
    *all_but_last, last = _rows(steps)
    for row in all_but_last:
        grid.add_row(*row)
    grid.add_section()
    grid.add_row(*last)
    return grid


def page(spec: Speculator, traced: Answer, dials: dict[str, Any], command: str) -> str:
    """The page: text, timeline and table of one completion, and how it was made. It loads nothing,
    from the network or elsewhere."""
    from jinja2 import Environment  # late: `--help` does without; and torch
    from markupsafe import Markup

    from foretoken.lab import timeline, view
    from foretoken.lab.machine import describe

    completion, continues = (
        traced.completion,
        not traced.request.source and traced.completion.text is not None,
    )
    picture = timeline.svg({guesses(dials["gamma"]): completion})
    environment = Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True)
    return environment.from_string(
        TEMPLATE.read_text("utf-8")
    ).render(
        prompt=traced.asked,
        between="" if continues else "\n",  # a source, or ids
        text=" ".join(map(str, completion.tokens)) if completion.text is None else completion.text,
        lines=Markup(view.html(traced.before, completion.steps, spec.tokenizer)),
        legend=Markup(view.html_legend()),
        style=Markup(view.STYLE),
        picture=Markup(picture[picture.index("<svg") :]),
        headings=HEADINGS,
        rows=list(_rows(completion.steps)),
        caption=caption(completion),
        stats=completion.stats,
        spec=spec,
        asked=[*traced.task.given.items(), *dials.items(), ("seed", completion.seed[0])],
        command=command,
        date=date.today().isoformat(),
        machine=describe(spec.target.device),
    )


def guesses(gamma: int | None) -> str:
    """How the row of a timeline is called."""
    if gamma is None:
        return "automatic gamma"
    return f"gamma {gamma}" if gamma else "plain"


def _rows(steps: list[StepRecord]) -> Iterator[tuple[str, ...]]:
    """Those of the table; the last one sums up."""
    numbers = [
        (s.drafted, s.accepted, len(s.kept), s.draft_seconds, s.score_seconds, s.verify_seconds)
        for s in steps
    ]
    for name, row in [
        *((str(number), row) for number, row in enumerate(numbers, 1)),
        ("all", tuple(map(sum, zip(*numbers, strict=True)))),
    ]:
        yield name, *map(str, row[:3]), *map(milliseconds, row[3:])
