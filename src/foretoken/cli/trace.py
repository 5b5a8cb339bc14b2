"""`foretoken trace`: what became of every draft token of one text, and when which model ran;
printed, and as a page.
"""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from datetime import date
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from rich import box
from rich.console import Console
from rich.table import Table
from typer import Argument, Option

from foretoken.cli import answer, option, prompts, task
from foretoken.cli.answer import Answer, caption
from foretoken.cli.command import command, quiet
from foretoken.cli.render import milliseconds
from foretoken.cli.sampling_options import OneText
from foretoken.errors import InputError
from foretoken.storage import files

if TYPE_CHECKING:
    from foretoken.cli.task import ModelTask
    from foretoken.records import StepRecord
    from foretoken.speculator import Speculator


HEADINGS = ("step", "drafted", "accepted", "tokens", "draft ms", "score ms", "verify ms")
TEMPLATE = Path(__file__).with_name("trace.html")


def steps_table(steps: list[StepRecord]) -> Table:
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


def html_page(spec: Speculator, traced: Answer, speculation: dict[str, Any], command: str) -> str:
    """The page: text, timeline and table of one completion, and how it was made. It loads nothing,
    from the network or elsewhere."""
    from jinja2 import Environment  # late: `--help` does without; and torch
    from markupsafe import Markup

    from foretoken.lab import view
    from foretoken.lab.machine import describe

    completion, continues = (
        traced.completion,
        not traced.request.source and traced.completion.text is not None,
    )
    picture = view.svg({draft_tokens(speculation["gamma"]): completion})
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
        asked=[*traced.task.given.items(), *speculation.items(), ("seed", completion.seed[0])],
        command=command,
        date=date.today().isoformat(),
        machine=describe(spec.target.device),
    )


def draft_tokens(gamma: int | None) -> str:
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


FEW = 4  # tokens of the text that warms up


def _file(text: str) -> Any:
    return Option(help=text, rich_help_panel="Files")


@dataclass(frozen=True)
class Files:
    """Where the trace is written to."""

    html: Annotated[
        Path | None, _file("One page with all of it, which loads nothing else; light and dark.")
    ] = None
    svg: Annotated[Path | None, _file("The timeline: a block for every call of a model.")] = None
    chrome: Annotated[Path | None, _file("The timeline as Chrome's trace JSON, for Perfetto.")] = (
        None
    )

    def require(self) -> None:
        """InputError for files that cannot be written, or not drawn: before models load."""
        paths = {name: path for name, path in vars(self).items() if path is not None}
        for name, path in paths.items():
            option.require_file(path, f"--{name}")
        if len({path.resolve() for path in paths.values()}) < len(paths):
            flags = " and ".join(f"--{name}" for name in paths)
            raise InputError(f"two of {flags} name one file; give each its own")
        if (self.html or self.svg) and not find_spec("matplotlib"):
            flag = "--html" if self.html else "--svg"
            raise InputError(f"{flag} draws; give it matplotlib: pip install 'foretoken[plot]'")


@command
def trace(
    sampling: OneText,
    loading: option.PairLoading,
    written: Files,
    prompt: Annotated[
        str | None, Argument(help="Text to continue; left out: standard input.")
    ] = None,
    target: option.Target = None,
    draft: option.Draft = None,
    gamma: option.Guesses = None,
    seed: Annotated[int, Option(help="The same seed, pair and gamma give the same text.")] = 0,
    rule: option.Rule = "block",
    lenience: option.Lenience = 1.0,
    table: Annotated[bool, Option("--table", help="Also a row for every step, timed.")] = False,
    as_json: option.Json = False,
) -> None:
    """Show what became of every draft token of one text, and when which model ran.

    The pair warms up before, on the same prompt. Times of a step that shares the machine with
    other work are that much longer.
    """
    from foretoken.options import keys_of, require  # late: NumPy, which `--help` does without

    require(gamma, rule, lenience)
    keys_of(seed, [1])
    if table and as_json:
        raise InputError("--table and --json are both given; --json has the steps, leave --table")
    (one,) = task.tasks(prompts.read(prompt, None), sampling.given)
    written.require()
    loading.require(target)
    quiet()
    spec = loading.load(target, draft)
    speculation = {"gamma": gamma, "rule": rule, "lenience": lenience}
    traced = _traced(spec, one, seed, speculation)
    if as_json:
        print(json.dumps(_document(spec, traced, speculation), allow_nan=False))
    else:
        answer.show(spec, [traced], steps=True)
        if table:
            Console(highlight=False).print(steps_table(traced.completion.steps))
    for path in _write(written, spec, traced, speculation):
        print(path, file=sys.stderr)
    for remark in answer.remarks([traced], lenience, as_json=as_json):
        print(remark, file=sys.stderr)


def _traced(spec: Speculator, one: ModelTask, seed: int, speculation: dict[str, Any]) -> Answer:
    """The text, after a few tokens of it that do not count. KeyboardInterrupt where it was
    interrupted: half a trace would pass for a whole one."""
    from foretoken.lab.uninterrupted import uninterrupted

    text = prompts.for_model(one.line, spec)
    (request,) = spec.requests([text], [one.params], seed)
    few = replace(one.params, max_new_tokens=max(FEW, one.params.min_new_tokens or 0))
    for params in (few, one.params):
        (completion,) = uninterrupted(spec.generate([text], params, seed=seed, **speculation))
    return Answer(one, 0, request, completion)


def _write(
    written: Files, spec: Speculator, traced: Answer, speculation: dict[str, Any]
) -> Iterator[Path]:
    """The files that were asked for, each whole or not at all."""
    from foretoken.lab import view

    completion = traced.completion
    if written.html:
        command = shlex.join(["foretoken", *sys.argv[1:]])
        page = html_page(spec, traced, speculation, command)
        files.write(written.html, page.encode())
        yield written.html
    if written.svg:
        view.draw({draft_tokens(speculation["gamma"]): completion}, written.svg)
        yield written.svg
    if written.chrome:
        files.write(written.chrome, json.dumps(view.chrome(completion)).encode())
        yield written.chrome


def _document(spec: Speculator, traced: Answer, speculation: dict[str, Any]) -> dict[str, Any]:
    """What `--json` prints; seconds."""
    from foretoken.lab.view import timeline

    completion = traced.completion
    return {
        "target": spec.target_name,
        "draft": spec.draft_name,
        "prompt": traced.asked,
        **answer.result(completion),
        "params": traced.task.given,
        **speculation,
        "steps": [asdict(step) for step in completion.steps],
        "calls": [call._asdict() for call in timeline(completion)],
    }
