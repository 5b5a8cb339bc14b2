"""The command `python -m reproduction`: its commands, and their options and output."""

from __future__ import annotations

import typer

from foretoken.cli.script import run_app
from reproduction.cli import costs, report, simulate, theory, train, train_drafts

__all__ = ["app", "main"]

app = typer.Typer(
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
    help="The paper's experiments, figures and fleets, and small models to run them on.",
)
app.command()(report.report)
app.command()(theory.theory)
app.command()(costs.costs)
app.command()(simulate.simulate)
for each in (train_drafts.heads, train_drafts.ngram, train_drafts.samples):
    train.app.command()(each)
app.add_typer(train.app, name="train")


def main() -> None:
    """Run the command in sys.argv; errors and exit codes are `foretoken`'s."""
    run_app(app)
