"""Functions as Typer takes them: groups of options taken apart, docstrings without line breaks."""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import Annotated

import typer
from typer.testing import CliRunner

from foretoken.cli.command import command


@dataclass(frozen=True)
class First:
    a: Annotated[int, typer.Option(help="The a.")] = 1


@dataclass(frozen=True)
class Second(First):
    b: Annotated[str | None, typer.Option("--bee")] = None


@dataclass(frozen=True)
class Third:
    c: bool = False


@command
def called(context: typer.Context, two: Second, three: Third, own: str = "x") -> None:
    """One
    line.

    Another
    paragraph.
    """
    print(two, three, own, sorted(context.params))


def test_groups_are_single_options_and_groups_again():
    app = typer.Typer()
    app.command()(called)
    runner = CliRunner()
    shown = runner.invoke(app, ["--a", "3", "--bee", "y", "--own", "z", "--c"]).stdout
    assert shown == "Second(a=3, b='y') Third(c=True) z ['a', 'b', 'c', 'own']\n"
    shown = runner.invoke(app, []).stdout
    assert shown == "Second(a=1, b=None) Third(c=False) x ['a', 'b', 'c', 'own']\n"
    assert "The a." in runner.invoke(app, ["--help"]).stdout


def test_what_typer_reads():
    assert list(inspect.signature(called).parameters) == ["context", "own", "a", "b", "c"]
    assert called.__doc__ == "One line.\n\nAnother paragraph."
