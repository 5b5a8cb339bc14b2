"""`foretoken train distill`: a draft of one's own, taught its target's law."""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer
from typer import Option

from foretoken.cli import option, trained
from foretoken.cli.command import command
from foretoken.cli.command import quiet
from foretoken.errors import InputError
from foretoken.storage import files


@command
def distill(
    reading: option.Reading,
    data: option.Examples,
    out: Annotated[Path, Option(help="Folder for checkpoint, log and draft; resumed if there.")],
    target: option.Target = None,
    draft: Annotated[
        str | None, Option(help="Folder or hub id of the draft to go on from.")
    ] = None,
    draft_revision: option.DraftRevision = None,
    shape: Annotated[
        str | None,
        Option(
            help="A fresh draft: sizes in the target's config to change, such as "
            "num_hidden_layers=1,hidden_size=96."
        ),
    ] = None,
    loss: Annotated[
        str,
        Option(
            help="kl, rkl (reverse), jsd, tv (1 - alpha), nla (-log alpha), or lk: kl while the "
            "laws are apart, tv once they are near."
        ),
    ] = "lk",
    temperature: Annotated[
        float,
        Option(
            help="Of later use. At 0 texts and alpha are greedy and the loss compares the laws at "
            "1."
        ),
    ] = 1.0,
    on_policy: Annotated[
        float, Option(help="Share of texts that the draft itself writes (on-policy).")
    ] = 0.0,
    target_generated: Annotated[
        float,
        Option(help="Share that the target writes (off-policy). The rest are the data's own."),
    ] = 0.0,
    length: Annotated[int, Option(help="New tokens of a text.")] = 128,
    held_out: Annotated[int, Option(help="Held-out prompts that alpha is measured on.")] = 32,
    steps: Annotated[int, Option()] = 1000,
    batch: Annotated[int, Option(help="Texts a step.")] = 8,
    learning_rate: Annotated[float, Option()] = 1e-3,
    warmup: Annotated[int, Option(help="Steps in which the rate rises.")] = 20,
    save_every: Annotated[int, Option(help="Steps between checkpoints and their alpha.")] = 50,
    seed: option.Seed = 0,
    as_json: option.Json = False,
) -> None:
    """Teach a draft its target's law, so that more guesses are kept.

    Both laws are compared at every position of texts by the data, the target or the draft. The
    weights with the best alpha on held-out prompts, over the target's own text, become OUT/model:
    use it as --draft. The same command resumes a run that was killed.
    """
    from foretoken.train.distill import Lesson
    from foretoken.train.distill import distill as teach
    from foretoken.train.examples import read
    from foretoken.train.loop import Recipe
    from foretoken.train.pair import pair

    quiet()
    lesson = Lesson(loss, temperature, on_policy, target_generated, length, held_out)
    recipe = Recipe(steps, batch, learning_rate, warmup, seed=seed, save_every=save_every)
    origin = {**reading.arguments, "draft_revision": draft_revision}
    models = pair(target, draft, fields(shape), seed, **origin)
    spec = models.together
    if spec.tokenizer is None:
        raise InputError("the target has no tokenizer, so text has no ids; give a folder with one")
    encoder_decoder = spec.target.encoder_decoder
    examples = read(data, spec.tokenizer, length, encoder_decoder=encoder_decoder)
    try:
        with trained.bar("distilling", steps) as bar:
            summary = teach(models, examples, out, lesson, recipe, partial(_report, bar))
    except KeyboardInterrupt:
        print(f"interrupted; the same command goes on from {out}", file=sys.stderr)
        raise typer.Exit(130) from None
    lines = [
        trained.size(out / "model", summary),
        f"alpha {summary['alpha']:.4f} on held-out prompts at step {summary['best_step']}, "
        f"{summary['alpha_before']:.4f} before, at temperature {temperature:g}",
    ]
    trained.show(summary, lines, trained.use(target, out / "model", reading), as_json=as_json)


def fields(shape: str | None) -> dict[str, Any]:
    """The fields in `--shape`: name=value, separated by commas; a value is JSON or a string."""
    values: dict[str, Any] = {}
    for part in (shape or "").split(","):
        name, equals, value = part.strip().partition("=")
        if not part.strip():
            continue
        if not (name and equals and value):
            raise InputError(f"shape has {part.strip()!r}; give name=value, separated by commas")
        try:
            values[name] = files.parse_json(value)
        except ValueError:
            values[name] = value
    return values


def _report(bar: trained.Report, step: int, loss: float, alpha: float | None, best: float) -> None:
    """The loss and the best alpha; a line where alpha was measured."""
    line = None
    if alpha is not None:
        rank = ", the best so far" if alpha == best else f", the best is {best:.4f}"
        line = f"step {step}: held-out alpha {alpha:.4f}{rank}"
    bar(step, f"loss {loss:.3f}, best alpha {best:.3f}" if step else f"alpha {best:.3f}", line)
