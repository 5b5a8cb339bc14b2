"""`foretoken train heads`: blockwise heads for a target, which stays as it is."""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from typer import Option

from foretoken.cli import option, trained
from foretoken.cli.command import command
from foretoken.cli.command import quiet

if TYPE_CHECKING:
    from foretoken.train.heads import Measured


@command
def heads(
    reading: option.Reading,
    data: option.Examples,
    out: Annotated[
        Path, Option(help="File to write, a .safetensors; a .run folder beside it is resumed.")
    ],
    target: option.Target = None,
    heads: Annotated[int, Option(help="Guesses that one call makes: the largest gamma.")] = 4,
    target_generated: Annotated[
        float, Option(help="Share of texts that the target writes. The rest are the data's own.")
    ] = 0.0,
    length: Annotated[int, Option(help="New tokens of a text.")] = 128,
    steps: Annotated[int, Option()] = 1000,
    batch: Annotated[int, Option(help="Texts a step.")] = 8,
    learning_rate: Annotated[float, Option()] = 2e-3,
    warmup: Annotated[int, Option(help="Steps in which the rate rises.")] = 20,
    save_every: Annotated[int, Option(help="Steps between checkpoints and their alpha.")] = 50,
    seed: option.Seed = 0,
    as_json: option.Json = False,
) -> None:
    """Train blockwise heads on a target's hidden states: one call makes all guesses.

    The target is frozen, and each head learns its law one place further ahead. Use the file as
    --draft heads:FILE, with this target. Each head's alpha is measured on held-out prompts, over
    the target's own text at temperature 1. The same command resumes a run that was killed.
    """
    from foretoken.train.heads import Teacher, train_heads
    from foretoken.train.loop import Recipe
    from foretoken.train.pair import read_target

    quiet()
    recipe = Recipe(steps, batch, learning_rate, warmup, seed=seed, save_every=save_every)
    option.require_folder(out)
    options = reading.arguments
    generation_config = options.pop("generation_config")
    target_model = read_target(target, **options)
    teacher = Teacher.of(*target_model, data, length, target_generated, generation_config)
    try:
        with trained.bar("training", steps) as bar:
            summary = train_heads(teacher, out, heads, recipe, partial(_report, bar))
    except KeyboardInterrupt:
        print("interrupted; the same command goes on", file=sys.stderr)
        raise typer.Exit(130) from None
    measured = zip(summary["alpha"], summary["agreement"], strict=True)
    lines = [
        trained.size(out, summary),
        *(
            f"head {k}: alpha {alpha:.3f} on held-out prompts; its likeliest token is the target's "
            f"at {agreement:.0%} of places"
            for k, (alpha, agreement) in enumerate(measured, 1)
        ),
    ]
    trained.show(summary, lines, trained.use(target, f"heads:{out}", reading), as_json=as_json)


def _report(bar: trained.Report, step: int, loss: float, measured: Measured | None) -> None:
    """The loss; a line where the heads were measured."""
    line = None
    if measured is not None:
        alpha = " ".join(f"{x:.3f}" for x in measured.alpha)
        agreement = " ".join(f"{x:.3f}" for x in measured.agreement)
        line = f"step {step}: alpha by head {alpha}; its argmax the target's {agreement}"
    bar(step, f"loss {loss:.3f}", line)
