"""`foretoken trace`: the fate of every draft token of one text, and the timeline of both models;
printed, as a page, as a picture and as Chrome's trace.
"""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Iterator
from dataclasses import asdict, replace
from datetime import date
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from rich.console import Console
from typer import Option

from foretoken.cli import answer, option, prompts, render
from foretoken.cli.answer import TaskAnswer
from foretoken.cli.command import command, quiet
from foretoken.errors import InputError
from foretoken.storage import files

if TYPE_CHECKING:
    from foretoken.cli.prompts import ModelTask
    from foretoken.records import StepRecord
    from foretoken.speculator import Speculator


HEADINGS = ("step", "drafted", "accepted", "tokens", "draft ms", "score ms", "verify ms")
TEMPLATE = Path(__file__).with_name("trace.html")
FEW = 4  # tokens of the text that warms up


@command
def trace(
    sampling: option.OneText,
    loading: option.PairLoading,
    words: option.Words = None,
    target: option.Target = None,
    draft: option.Draft = None,
    gamma: option.Guesses = None,
    seed: option.TextSeed = 0,
    rule: option.Rule = "block",
    lenience: option.Lenience = 1.0,
    table: Annotated[
        bool, Option("--table", help="Also print a row for each step, with times.")
    ] = False,
    html: Annotated[
        Path | None,
        Option(help="Write a page with the text, the timeline and the steps; it loads nothing."),
    ] = None,
    svg: Annotated[
        Path | None, Option(help="Write the timeline: a block for every forward of a model.")
    ] = None,
    chrome: Annotated[
        Path | None, Option(help="Write the timeline as Chrome's trace JSON, for Perfetto.")
    ] = None,
    as_json: option.Json = False,
) -> None:
    """Show the fate of every draft token of one text, and when each model ran.

    The pair first warms up on the same prompt. Other work on the machine makes steps longer.
    """
    from foretoken.options import keys_of, require  # late: NumPy, which `--help` does without

    if table and as_json:
        raise InputError("--json has all that --table prints; leave one of them out")
    target, prompt = option.target_and_prompt(words, target)
    target = option.chosen(target)
    require(gamma, rule, lenience)
    keys_of(seed, [1])
    (one,) = prompts.tasks(prompts.read(prompt, None), sampling.given)
    named = {"--html": html, "--svg": svg, "--chrome": chrome}
    written = {flag: path for flag, path in named.items() if path is not None}
    _require(written)
    loading.require(target)
    quiet()
    spec = loading.load(
        target, draft, check=lambda known: prompts.for_model(one.line, known)
    ).prepared()
    speculation = {"gamma": gamma, "rule": rule, "lenience": lenience}
    traced = _traced(spec, one, seed, speculation)
    steps = traced.completion.steps
    if as_json:
        completion = answer.described(traced, speculation)
        completion["steps"] = [asdict(step) for step in steps]
        document = {**answer.names(spec), "completions": [completion]}
        print(json.dumps(document, allow_nan=False))
    else:
        answer.show(spec, [traced], steps=True)
        if table:
            _show_table(steps)
    for flag, path in written.items():
        files.write(path, _content(flag, spec, traced, speculation).encode())
        print(path, file=sys.stderr)
    for remark in answer.remarks([traced], lenience, as_json=as_json):
        print(remark, file=sys.stderr)


def _require(written: dict[str, Path]) -> None:
    """Raise InputError for files that cannot be written or drawn, before models load."""
    for flag, path in written.items():
        require = option.require_file if flag == "--chrome" else option.require_picture
        require(path, flag)
    if len({path.resolve() for path in written.values()}) < len(written):
        raise InputError(f"two of {' and '.join(written)} name one file; give each its own")


def _content(flag: str, spec: Speculator, traced: TaskAnswer, speculation: dict[str, Any]) -> str:
    """Return the text of a file."""
    from foretoken.lab import view

    if flag == "--html":
        return _page(spec, traced, speculation)
    if flag == "--chrome":
        return json.dumps(view.chrome(traced.completion))
    return _picture(traced, speculation["gamma"])


def _picture(traced: TaskAnswer, gamma: int | None) -> str:
    from foretoken.lab import view

    return view.svg({"automatic gamma" if gamma is None else f"gamma {gamma}": traced.completion})


def _traced(spec: Speculator, one: ModelTask, seed: int, speculation: dict[str, Any]) -> TaskAnswer:
    """Generate the text, after a few tokens of it that do not count.

    Raises KeyboardInterrupt after Ctrl-C: half a trace would pass for a whole one.
    """
    from foretoken.request import uninterrupted

    text = prompts.for_model(one.line, spec)
    (request,) = spec.inputs.requests([text], [one.params], seed)
    few = replace(one.params, max_new_tokens=max(FEW, one.params.min_new_tokens or 0))
    for params in (few, one.params):
        (completion,) = uninterrupted(spec.generate([text], params, seed=seed, **speculation))
    return TaskAnswer(one, 0, request, completion)


def _rows(steps: list[StepRecord]) -> Iterator[tuple[str, ...]]:
    """Yield the rows of the table; the last one sums up."""
    numbers = [
        (s.drafted, s.accepted, len(s.kept), s.draft_seconds, s.score_seconds, s.verify_seconds)
        for s in steps
    ]
    for name, row in [
        *((str(number), row) for number, row in enumerate(numbers, 1)),
        ("all", tuple(map(sum, zip(*numbers, strict=True)))),
    ]:
        yield name, *map(str, row[:3]), *map(render.milliseconds, row[3:])


def _show_table(steps: list[StepRecord]) -> None:
    grid = render.table(*HEADINGS, left=0)
    *all_but_last, last = _rows(steps)
    for row in all_but_last:
        grid.add_row(*row)
    grid.add_section()
    grid.add_row(*last)
    Console(highlight=False).print(grid)


def _page(spec: Speculator, traced: TaskAnswer, speculation: dict[str, Any]) -> str:
    """Write the page: text, timeline and table of one completion, and how it was made.

    The page loads nothing, from the network or elsewhere.
    """
    from jinja2 import Environment  # late: `--help` does without; and torch
    from markupsafe import Markup

    from foretoken.lab import view
    from foretoken.measurement.machine import describe

    completion = traced.completion
    continues = not traced.request.source and completion.text is not None
    picture = _picture(traced, speculation["gamma"])
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
        caption=answer.caption(completion),
        stats=completion.stats,
        spec=spec,
        asked=[*traced.task.given.items(), *speculation.items(), ("seed", completion.seed[0])],
        command=shlex.join(["foretoken", *sys.argv[1:]]),
        date=date.today().isoformat(),
        machine=describe(spec.target.device),
    )
