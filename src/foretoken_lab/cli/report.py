"""`foretoken-lab report`: the paper's experiments of recipes: measured, resumed and shown."""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from datetime import date
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from typer import Argument, Option

from foretoken.cli import option
from foretoken.cli.command import command
from foretoken.cli.command import quiet as quietly
from foretoken.errors import InputError
from foretoken.loading import hub
from foretoken.loading.options import LoadOptions
from foretoken.storage import files

if TYPE_CHECKING:
    from foretoken_lab.recipes.recipe import Recipe
    from foretoken_lab.report.chapter import PaperReport
    from foretoken_lab.report.run import Job, ResultFile, Standing

NEEDED = ("matplotlib", "jinja2")  # of the extra `report`


@command
def report(
    recipes: Annotated[
        list[Path],
        Argument(help="Recipe files, a chapter each; the repository has some."),
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
    """Measure the paper's experiments; write a page, Markdown and JSON with its figures beside.

    Each measurement is kept as soon as it is done, so that a report that was interrupted goes on.
    What fails is marked with its reason, and the others go on; the exit status is then 1.
    """
    if quick and as_measured:
        raise InputError("--quick measures and --as-measured does not; give one of them")
    recipes_read = _recipes(recipes)
    _require(recipes_read, out, measuring=not as_measured)
    chosen_recipes = [recipe.quick() for recipe in recipes_read] if quick else recipes_read
    from foretoken_lab.report.chapter import report as made_of  # late: torch takes seconds
    from foretoken_lab.report.files import RESULTS, document, write
    from foretoken_lab.report.run import ResultFile
    from foretoken_lab.report.run import as_measured as latest

    quietly()
    held = nullcontext() if as_measured else _alone(out / RESULTS)
    flags = {"--quick": quick, "--as-measured": as_measured}
    typed = _command(recipes, out, [flag for flag, present in flags.items() if present])
    with held:
        results = ResultFile(out / RESULTS)
        _tell_unreadable(results)
        if as_measured:
            cases, interrupted = latest(chosen_recipes, results), False
            quick = any("--quick" in results.origins(of)[-1].command for _, of, *_ in cases)
            _tell_changed(chosen_recipes, cases)
        else:
            cases, interrupted = _measured(chosen_recipes, results, typed)
    header = {"date": date.today().isoformat(), "command": typed}
    whole = made_of(cases, results, quick=quick, **header)
    paths = write(whole, out)
    if as_json:
        print(json.dumps(document(whole), allow_nan=False))
    else:
        print(*paths, sep="\n")
    failed = _tell_failed(whole)
    if interrupted:
        print(f"interrupted; the same command picks up {results.path}", file=sys.stderr)
        raise typer.Exit(130)
    if failed:
        raise typer.Exit(1)


def _measured(recipes: list[Recipe], results: ResultFile, command: str) -> tuple[list[Job], bool]:
    """All cases, measured; whether Ctrl-C ended it."""
    import torch  # late: it takes seconds

    from foretoken.lab.machine import describe
    from foretoken_lab.report.run import jobs, run

    machine = describe(torch.device("cpu"))
    cases = jobs(recipes, machine)
    _tell_anew(cases, results)
    return cases, _follow(run(cases, results, machine, command))


@contextmanager
def _alone(path: Path) -> Iterator[None]:
    """A results file that no other process adds to meanwhile."""
    with files.naming(path.parent):
        path.parent.mkdir(parents=True, exist_ok=True)
    with files.naming(path):
        file = open(path, "ab")
    with file:
        files.lock(file, path)
        yield


def _recipes(paths: list[Path]) -> list[Recipe]:
    """The recipes, in order. InputError for what is wrong in one, and for two of one name."""
    from foretoken_lab.recipes.recipe import read  # late: pydantic, which `--help` does without

    recipes = [read(path) for path in paths]
    names = [recipe.name for recipe in recipes]
    for name in names:
        if names.count(name) > 1:
            raise InputError(f"two recipes have the name {name}; give each its own")
    return recipes


def _require(recipes: list[Recipe], out: Path, *, measuring: bool) -> None:
    """InputError for what would fail at once: before torch is imported."""
    from foretoken_lab.recipes import prompts  # late, as above

    for name in NEEDED:
        if not find_spec(name):
            raise InputError(f"a report needs {name}; pip install 'foretoken[lab]'")
    if out.exists() and not out.is_dir():
        raise InputError(f"{out} is a file; give another --out, a folder")
    for recipe in recipes if measuring else []:
        prompts.read(recipe.prompts)
        LoadOptions(dtype=recipe.dtype)
        if recipe.target is not None:
            hub.way(hub.path(recipe.target), None)


def _tell_unreadable(results: ResultFile) -> None:
    """On standard error: which lines are passed over."""
    if results.unreadable:
        lines = ", ".join(map(str, results.unreadable[:5]))
        more = len(results.unreadable) - 5
        numbers = f"{lines} and {more} more" if more > 0 else lines
        print(f"{results.path}: cannot read line {numbers}; left as it is", file=sys.stderr)


def _tell_changed(recipes: list[Recipe], cases: list[Job]) -> None:
    """On standard error: which recipes say something else now than what is shown."""
    from foretoken_lab.recipes.recipe import shown_from  # late: pydantic

    then = {job.recipe.name: job.recipe for job in cases}
    for recipe in recipes:
        now = shown_from(recipe, Path.cwd()).model_dump(exclude={"experiments"})
        was = then[recipe.name].model_dump()
        changed = [name for name in now if now[name] != was[name]]
        if changed:
            print(
                f"{recipe.name}: shown as it was measured; the recipe says otherwise now: "
                f"{', '.join(changed)}",
                file=sys.stderr,
            )


def _tell_anew(cases: list[Job], results: ResultFile) -> None:
    """On standard error: which recipes' measurements are there but are not used, and why."""
    for origin, recipe in {job.of: job.recipe for job in cases}.items():
        last = results.last(recipe.name)
        if last is not None and not results.seconds(origin):
            print(
                f"{recipe.name}: measured anew; {results.path} has it of another recipe, other "
                "weights or another machine: --as-measured shows that",
                file=sys.stderr,
            )


def _command(recipes: list[Path], out: Path, flags: list[str]) -> str:
    """Return the command as one would type it."""
    return shlex.join(["foretoken-lab", "report", *map(str, recipes), "--out", str(out), *flags])


def _follow(standings: Iterator[Standing]) -> bool:
    """Measure, with a bar on standard error; whether Ctrl-C ended it."""
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[left]}"),
    )
    with Progress(*columns, console=Console(stderr=True)) as bar:
        task = bar.add_task("", total=None, left="")
        try:
            for at in standings:
                bar.update(
                    task,
                    description=at.next or "done",
                    completed=at.done,
                    total=at.all,
                    left=left(at.seconds_left),
                )
        except KeyboardInterrupt:
            return True
    return False


def left(seconds: float | None) -> str:
    """The time left, as one would say it."""
    if seconds is None:
        return "time left unknown"
    if seconds < 90:
        return f"about {seconds:.0f} s left"
    if seconds < 90 * 60:
        return f"about {seconds / 60:.0f} min left"
    return f"about {seconds / 3600:.1f} h left"


def _tell_failed(whole: PaperReport) -> bool:
    """Every measurement that failed, on standard error; whether one did."""
    failed = [f"{chapter.name}: {line}" for chapter in whole.chapters for line in chapter.failed]
    for line in failed:
        print(f"failed: {line}", file=sys.stderr)
    return bool(failed)
