"""What the trainers share on the command line: a bar, and at the end figures with the command that
uses the result, or a summary as JSON."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Annotated, Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from typer import Option

from foretoken.cli.option import TargetReading
from foretoken.errors import InputError

Report = Callable[[int, str, str | None], None]  # step, the bar's text, a line to keep
Patience = Annotated[
    int,
    Option(help="End after so many measurements without a lower held-out loss; 0: at --steps."),
]

Bfloat16 = Annotated[
    bool, Option("--bfloat16", help="Multiply in bfloat16: faster on processors that can.")
]


@contextmanager
def bar(text: str, steps: int) -> Iterator[Report]:
    """A bar on standard error. It appears with the first report, so that a mistake before it is a
    line of its own."""
    columns = (BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    progress = Progress(TextColumn("{task.description}"), *columns, console=Console(stderr=True))
    task = progress.add_task(text, total=steps)
    with ExitStack() as stack:

        def report(step: int, text: str, line: str | None) -> None:
            if not progress.live.is_started:
                stack.enter_context(progress)
            progress.update(task, completed=step, description=text)
            if line is not None:
                progress.print(line)

        yield report


def require_folders(*folders: tuple[Path | None, str]) -> None:
    """InputError for what is given and no folder; with each, what it should hold."""
    for folder, content in folders:
        if folder is not None and not folder.is_dir():
            raise InputError(f"{folder} is no folder; give a folder of {content}")


def report_loss(bar: Report, step: int, loss: float, held_out: float | None) -> None:
    """The loss; a line where the held-out loss was measured."""
    line = None
    if held_out is not None:
        line = f"step {step}: loss {loss:.4f}, held out {held_out:.4f} nats a token"
    bar(step, f"loss {loss:.3f}", line)


def show(
    summary: dict[str, Any], lines: list[str], command: list[object], *, as_json: bool
) -> None:
    """`lines` and the command, or the summary alone."""
    if as_json:
        print(json.dumps(summary, indent=2, allow_nan=False))
        return
    for line in lines:
        print(line)
    print(f"use it: {shlex.join(map(str, command))}")


def show_model(
    summary: dict[str, Any], lines: list[str], model: Path, tokenizer: Path | None, *, as_json: bool
) -> None:
    """The same of a model: a target where its tokenizer is its own, else a draft for the model that
    the tokenizer came with."""
    command: list[object] = ["foretoken", "generate", "--target", model, "PROMPT"]
    if tokenizer is not None:
        command = use(target_of(tokenizer), model, TargetReading())
    show(summary, lines, command, as_json=as_json)


def target_of(tokenizer: str | Path | None) -> str | Path | None:
    """The model that a tokenizer came with, for a command to show; a placeholder where a folder
    holds a tokenizer alone."""
    if tokenizer is None:
        return None
    folder = Path(tokenizer)
    bare = folder.is_dir() and not (folder / "config.json").is_file()
    return "TARGET" if bare else tokenizer


def use(target: object, draft: object, options: Any) -> list[object]:
    """`foretoken generate` with a draft; `options`: a dataclass of how the target was loaded."""
    from foretoken.lab.measurement.plan import flags  # late: torch takes seconds to import

    of_target = [] if target is None else ["--target", target]
    return ["foretoken", "generate", *of_target, "--draft", draft, *flags(options), "PROMPT"]


def size(out: Path, summary: dict[str, Any]) -> str:
    """The result's parameters, and the steps and seconds that it took."""
    count = summary["parameters"]
    parameters = f"{count / 1e6:.3g}M" if count >= 1e5 else f"{count}"
    return f"{out}: {parameters} parameters, {summary['steps']} steps in {summary['seconds']:.0f} s"
