"""`report`: the paper's experiments of recipes: measured, resumed and shown."""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from datetime import date
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from typer import Argument, Option

from foretoken.cli import option
from foretoken.cli.command import command, set_up_logging
from foretoken.errors import InputError
from foretoken.loading import hub
from foretoken.loading.options import LoadOptions
from foretoken.storage import files

if TYPE_CHECKING:
    from reproduction.recipe import Recipe
    from reproduction.results import Job, ResultFile


@command
def report(
    recipes: Annotated[
        list[Path],
        Argument(help="Recipe files, a chapter each, such as reproduction/recipes/default.toml."),
    ],
    out: Annotated[
        Path, Option(help="Folder for results.jsonl, which is resumed, and for the report.")
    ],
    quick: Annotated[
        bool, Option("--quick", help="Minutes in place of hours: fewer tokens, texts and repeats.")
    ] = False,
    as_measured: Annotated[
        bool,
        Option(
            "--as-measured",
            help="Measure nothing: show what results.jsonl holds, of whatever machine and weights.",
        ),
    ] = False,
    as_json: option.Json = False,
) -> None:
    """Measure the paper's experiments; write a page, Markdown and JSON with its figures.

    Each measurement is kept as soon as it is done, so that a report that was interrupted goes on.
    A part that fails is marked with its reason, and the others go on; the exit status is then 1.
    """
    if quick and as_measured:
        raise InputError("--quick measures and --as-measured does not; give one of them")
    chosen = _recipes(recipes, out, measuring=not as_measured)
    if quick:
        chosen = [recipe.quick() for recipe in chosen]
    with option.require_extra("reproduction"):
        from reproduction.page import RESULTS, document, write  # late: torch takes seconds
    from reproduction.report import report as made_of
    from reproduction.results import ResultFile
    from reproduction.results import as_measured as latest

    set_up_logging()
    flags = {"--quick": quick, "--as-measured": as_measured}
    given = [*map(str, recipes), "--out", str(out), *(name for name in flags if flags[name])]
    typed = shlex.join(["python", "-m", "reproduction", "report", *given])
    interrupted = False
    with nullcontext() if as_measured else _alone(out / RESULTS):
        results = ResultFile(out / RESULTS)
        if results.unreadable:
            lines = ", ".join(map(str, results.unreadable))
            print(f"{results.path}: cannot read line {lines}; left as it is", file=sys.stderr)
        if as_measured:
            cases = latest(chosen, results)
            quick = any("--quick" in results.origins(of)[-1].command for _, of, *_ in cases)
            _tell_changed(chosen, cases)
        else:
            cases, interrupted = _measured(chosen, results, typed)
    header = {"date": date.today().isoformat(), "command": typed}
    whole = made_of(cases, results, quick=quick, **header)
    paths = write(whole, out)
    if as_json:
        print(json.dumps(document(whole), allow_nan=False))
    else:
        print(*paths, sep="\n")
    failed = [f"{chapter.name}: {line}" for chapter in whole.chapters for line in chapter.failed]
    for line in failed:
        print(f"failed: {line}", file=sys.stderr)
    if interrupted:
        print(f"interrupted; the same command picks up {results.path}", file=sys.stderr)
        raise typer.Exit(130)
    if failed:
        raise typer.Exit(1)


def _recipes(paths: list[Path], out: Path, *, measuring: bool) -> list[Recipe]:
    """The recipes, in order. InputError for what is wrong in one, for two of one name, and for
    what would fail at once: before torch is imported."""
    from reproduction.recipe import read, read_prompts  # late: pydantic, not for `--help`

    recipes = [read(path) for path in paths]
    names = [recipe.name for recipe in recipes]
    for name in names:
        if names.count(name) > 1:
            raise InputError(f"two recipes have the name {name}; give each its own")
    if out.exists() and not out.is_dir():
        raise InputError(f"{out} is a file; give another --out, a folder")
    for recipe in recipes if measuring else []:
        read_prompts(recipe.prompts)
        LoadOptions(dtype=recipe.dtype)
        if recipe.target is not None:
            hub.require_model(recipe.target, None)
    return recipes


def _tell_changed(recipes: list[Recipe], cases: list[Job]) -> None:
    """Print, on standard error, the keys that a recipe has changed since it was measured."""
    from reproduction.recipe import shown_from  # late: pydantic

    then = {job.recipe.name: job.recipe.model_dump() for job in cases}
    for recipe in recipes:
        now, was = shown_from(recipe, Path.cwd()).model_dump(), then[recipe.name]
        keys = [name for name in now if name != "experiments" and now[name] != was[name]]
        if keys:
            changed = f"the recipe has changed since: {', '.join(keys)}"
            print(f"{recipe.name}: shown as it was measured; {changed}", file=sys.stderr)


@contextmanager
def _alone(path: Path) -> Iterator[None]:
    """A results file that no other process adds to meanwhile."""
    with files.name_path_in_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        file = open(path, "ab")
    with file:
        files.lock_file(file, path)
        yield


def _measured(recipes: list[Recipe], results: ResultFile, typed: str) -> tuple[list[Job], bool]:
    """All cases, measured, with a bar on standard error; whether Ctrl-C ended it."""
    import torch  # late: it takes seconds

    from foretoken.measurement.machine import get_machine
    from reproduction.results import jobs, run

    machine = get_machine(torch.device("cpu"))
    cases = jobs(recipes, machine)
    for origin, recipe in {job.of: job.recipe for job in cases}.items():
        if results.last(recipe.name) is not None and not results.cases(origin):
            print(
                f"{recipe.name}: measured anew; {results.path} has it of another recipe, other "
                "weights or another machine: --as-measured shows that",
                file=sys.stderr,
            )
    text, left = TextColumn("{task.description}"), TextColumn("{task.fields[left]}")
    columns = (text, BarColumn(), MofNCompleteColumn(), left)
    with Progress(*columns, console=Console(stderr=True)) as bar:
        task = bar.add_task("", total=len(cases), left="")
        try:
            for done, label, seconds in run(cases, results, machine, typed):
                bar.update(task, description=label, completed=done, left=time_left(seconds))
        except KeyboardInterrupt:
            return cases, True
        bar.update(task, description="done", completed=len(cases), left="")
    return cases, False


def time_left(seconds: float | None) -> str:
    """Say how long it goes on."""
    if seconds is None:
        return "time left unknown"
    if seconds < 90:
        return f"about {seconds:.0f} s left"
    if seconds < 90 * 60:
        return f"about {seconds / 60:.0f} min left"
    return f"about {seconds / 3600:.1f} h left"
