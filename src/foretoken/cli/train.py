"""`foretoken train`: drafts that learn their target's distribution (`distill`), and drafts over its
states (`eagle`, `dspark`).
"""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from dataclasses import fields as fields_of
from functools import partial
from pathlib import Path
from typing import Annotated, Any, ClassVar, TypeVar, cast

import typer
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeRemainingColumn,
)

from foretoken.cli import option
from foretoken.cli.command import command, set_up_logging
from foretoken.errors import InputError
from foretoken.storage import files
from foretoken.train.recipe import TrainingRecipe

ReportProgress = Callable[[int, str, str | None], None]  # step, the bar's text, a line to keep
DataclassType = TypeVar("DataclassType")
app = typer.Typer(no_args_is_help=True, help="Train drafts.")


@dataclass(frozen=True)
class TrainingOptions:
    """Options of any training run."""

    panel: ClassVar[str] = "Training"
    steps: Annotated[int, "Training steps."] = 1000
    batch: Annotated[int, "Texts per step."] = 8
    learning_rate: Annotated[float, "Highest learning rate."] = 1e-3
    warmup: Annotated[int, "Steps over which the learning rate rises."] = 20
    save_every: Annotated[int, "Steps between checkpoints, each with a measurement of alpha."] = 50
    seed: Annotated[int, "Seed of batches, texts and new weights."] = 0

    @property
    def recipe(self) -> TrainingRecipe:
        return make_from_options(TrainingRecipe, self)


def make_from_options(
    kind: Callable[..., DataclassType], options: TrainingOptions
) -> DataclassType:
    """Make a dataclass of the options that its fields name."""
    names = [field.name for field in fields_of(cast(Any, kind))]
    return kind(**{name: getattr(options, name) for name in names if hasattr(options, name)})


@dataclass(frozen=True)
class DistillationOptions(TrainingOptions):
    """Options of a training run on texts of the data or of the target."""

    target_generated: Annotated[
        float, "Share of texts written by the target; the others come from --data."
    ] = 0.0
    length: Annotated[int, "New tokens per text."] = 128


@app.command()
@command
def distill(
    reading: option.TargetFileOptions,
    data: option.TrainingData,
    out: Annotated[Path, "Folder for the checkpoint, the log and the draft. Resumes a run there."],
    training: DistillationOptions,
    target: option.Target = None,
    draft: Annotated[str | None, "Train this draft further: a folder or hub id."] = None,
    draft_revision: option.DraftRevision = None,
    shape: Annotated[
        str | None,
        "Train a new draft: the target's config with these changes, such as "
        "num_hidden_layers=1,hidden_size=96.",
    ] = None,
    loss: Annotated[
        str,
        "kl, rkl (reverse), jsd, tv (1 - alpha), nla (-log alpha), or lk: kl while the "
        "distributions are far apart, then tv.",
    ] = "lk",
    temperature: Annotated[
        float,
        "Temperature you will serve with. At 0, texts are greedy and the loss is computed "
        "at temperature 1.",
    ] = 1.0,
    on_policy: Annotated[float, "Share of texts written by the draft."] = 0.0,
    held_out: Annotated[int, "Held-out prompts to measure alpha on."] = 32,
    as_json: option.Json = False,
) -> None:
    """Train a draft to match its target's distribution, so that more draft tokens are accepted.

    The loss compares the two distributions at every position of texts by the data, the target or
    the draft. OUT/model gets the weights with the best alpha on held-out prompts, continued by the
    target: use it as --draft. The same command resumes a run that was killed.
    """
    target, recipe = option.resolve_target(target), training.recipe
    set_up_logging()
    from foretoken.train import corpus, distill, pair  # late: after mistakes are told

    shares = on_policy, training.target_generated
    lesson = distill.Distillation(loss, temperature, *shares, training.length, held_out)
    origin = {**reading.arguments, "draft_revision": draft_revision}
    models = pair.load_pair(target, draft, parse_shape(shape), training.seed, **origin)
    spec = models.target_spec
    if spec.tokenizer is None:
        raise InputError("the target has no tokenizer, so text has no ids; give a folder with one")
    encoder_decoder = spec.target.encoder_decoder
    examples = corpus.read_examples(
        data, spec.tokenizer, training.length, encoder_decoder=encoder_decoder
    )
    with exit_on_interrupt(f"interrupted; the same command goes on from {out}"):
        with show_progress_bar("distilling", training.steps) as bar:
            report = partial(_report_lesson, bar)
            summary = distill.distill(models, examples, out, lesson, recipe, report)
    lines = [
        describe_result(out / "model", summary),
        f"alpha {summary['alpha']:.4f} on held-out prompts at step {summary['best_step']}, "
        f"{summary['alpha_before']:.4f} before, at temperature {temperature:g}",
    ]
    print_summary(
        summary, lines, make_generate_command(target, out / "model", reading), as_json=as_json
    )


def parse_shape(shape: str | None) -> dict[str, Any]:
    """Read --shape: name=value, separated by commas; a value is JSON or a string."""
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


def _report_lesson(
    bar: ReportProgress, step: int, loss: float, alpha: float | None, best: float
) -> None:
    """Report the loss and the best alpha, with a line where alpha was measured."""
    line = None
    if alpha is not None:
        rank = ", the best so far" if alpha == best else f", the best is {best:.4f}"
        line = f"step {step}: held-out alpha {alpha:.4f}{rank}"
    bar(step, f"loss {loss:.3f}, best alpha {best:.3f}" if step else f"alpha {best:.3f}", line)


RunFolder = Annotated[Path, "Folder to write. Resumes a run in the .run folder beside it."]


@dataclass(frozen=True)
class HiddenStateTraining(TrainingOptions):
    """Options of a training run of a draft over its target's states."""

    steps: Annotated[int, "Training steps."] = 4000
    learning_rate: Annotated[float, "Highest learning rate."] = 2e-3
    warmup: Annotated[int, "Steps over which the learning rate rises."] = 50
    save_every: Annotated[int, "Steps between checkpoints, each with a measurement of alpha."] = 200
    length: Annotated[int, "New tokens of a text that the target writes."] = 384
    temperatures: Annotated[str, "Temperatures at which it writes them, in turn, such as 0,1."] = (
        "1"
    )
    states: Annotated[float, "Gigabytes of the target's states to keep beside the run."] = 4.0
    draft_vocab: Annotated[int, "Tokens that the draft can guess."] = 8192
    intermediate: Annotated[int | None, "Width of the draft's MLP. Default: the target's."] = None
    loss: Annotated[str, "kl, rkl, jsd, tv, nla or lk, as distill has them."] = "lk"
    bfloat16: Annotated[bool, "Multiply in bfloat16, which is faster on a CPU that can."] = False


@dataclass(frozen=True)
class EagleTraining(HiddenStateTraining):
    """Options of a training run of an EAGLE-3 draft."""

    depths: Annotated[int, "Draft tokens over which it is unrolled."] = 4


@dataclass(frozen=True)
class DSparkTraining(HiddenStateTraining):
    """Options of a training run of a DSpark draft."""

    layers: Annotated[int, "Layers of the draft."] = 2
    block: Annotated[int, "Draft tokens of a block, the most in use."] = 7
    rank: Annotated[int, "Rank of the bias on a draft token by the one before it."] = 64
    anchors: Annotated[int, "Blocks in a text, per step."] = 32


@app.command()
@command
def eagle(
    loading: option.TargetLoadOptions,
    data: option.TrainingData,
    out: RunFolder,
    training: EagleTraining,
    target: option.Target = None,
    as_json: option.Json = False,
) -> None:
    """Train an EAGLE-3 draft on a target's own text, which it writes first behind the prompts.

    The draft reads the target's states, so it needs this very target: use the folder as --draft.
    Sources without a target in --data are the prompts. The file is in the format of speculators,
    which vLLM reads too. The same command resumes a run that was killed.
    """
    _train_on_hidden_states(loading, data, out, training, target, as_json=as_json)


@app.command()
@command
def dspark(
    loading: option.TargetLoadOptions,
    data: option.TrainingData,
    out: RunFolder,
    training: DSparkTraining,
    target: option.Target = None,
    as_json: option.Json = False,
) -> None:
    """Train a DSpark draft on a target's own text, which it writes first behind the prompts.

    One pass of the draft guesses a whole block; each guess then follows the one before it, and the
    block ends where the draft expects no more to be accepted. The rest is as in train eagle.
    """
    _train_on_hidden_states(loading, data, out, training, target, as_json=as_json)


def _train_on_hidden_states(
    loading: option.TargetLoadOptions,
    data: Path,
    out: Path,
    training: EagleTraining | DSparkTraining,
    target: str | None,
    *,
    as_json: bool,
) -> None:
    """Train a draft over the target's states."""
    target, recipe = option.resolve_target(target), training.recipe
    set_up_logging()
    # late: after mistakes are told
    from foretoken.train import corpus, dspark, eagle, generated_data, loop, pair, student

    kind = eagle.EagleLesson if isinstance(training, EagleTraining) else dspark.DSparkLesson
    lesson = make_from_options(kind, training)
    if not 0 < training.states < 1e9:
        raise InputError(f"states is {training.states}; give gigabytes, more than 0")
    option.require_folder(out)
    run = out.with_name(f"{out.name}.run")
    if out.is_file():
        raise InputError(f"{out} is a file; give another --out, for a folder")
    if out.exists() and any(out.iterdir()) and not run.exists():
        raise InputError(f"{out} holds files of another origin; give another --out")
    spec = replace(loading.load(target, "none"), suggested={})  # no sampling params of its config
    if spec.tokenizer is None:
        raise InputError("the target has no tokenizer, so text has no ids; give it with one")
    prompts = corpus.read_examples(data, spec.tokenizer, training.length, encoder_decoder=False)
    folder = loop.make_run_folder(run)
    origin = loading.revision, loading.trust_remote_code, loading.tokenizer, loading.adapter
    with exit_on_interrupt("interrupted; the same command goes on"):
        count = len(prompts.train) + len(prompts.held_out)
        with show_progress_bar("writing texts", count) as bar:
            examples = generated_data.generate_references(
                spec,
                prompts,
                folder / "texts",
                length=training.length,
                temperatures=option.parse_numbers("temperatures", training.temperatures, float),
                seed=training.seed,
                report=lambda n: bar(n, "writing texts", None),
            )
        network, _ = pair.load_target(target, *origin)
        network.requires_grad_(False)
        with show_progress_bar("training", training.steps) as bar:
            summary = student.teach(
                network,
                examples,
                out,
                lesson,
                recipe,
                partial(_report_depths, bar),
                max_bytes=int(training.states * 1e9),
                report_states=lambda n: bar(0, f"reading states, text {n}", None),
            )
    depths = " ".join(f"{alpha:.3f}" for alpha in summary["alpha"])
    lines = [describe_result(out, summary), f"alpha by depth {depths} on held-out texts"]
    print_summary(summary, lines, make_generate_command(target, out, loading), as_json=as_json)


def _report_depths(bar: ReportProgress, step: int, loss: float, alpha: list[float] | None) -> None:
    """Report the loss, with a line where alpha was measured."""
    line = None
    if alpha is not None:
        line = f"step {step}: alpha by depth {' '.join(f'{x:.3f}' for x in alpha)}"
    bar(step, f"loss {loss:.3f}", line)


@contextmanager
def exit_on_interrupt(message: str) -> Iterator[None]:
    """Exit with 130 and this message after Ctrl-C."""
    try:
        yield
    except KeyboardInterrupt:
        print(message, file=sys.stderr)
        raise typer.Exit(130) from None


@contextmanager
def show_progress_bar(text: str, steps: int) -> Iterator[ReportProgress]:
    """Show a bar on standard error from the first report on, so that a mistake before it is a line
    of its own."""
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


def print_summary(
    summary: dict[str, Any], lines: list[str], command: list[object], *, as_json: bool
) -> None:
    """Print `lines` and the command that uses the result, or the summary as JSON."""
    if as_json:
        print(json.dumps(summary, indent=2, allow_nan=False))
        return
    for line in lines:
        print(line)
    print(f"use it: {shlex.join(map(str, command))}")


def name_target(tokenizer: str | Path | None) -> str | Path | None:
    """Name the model that a tokenizer came with; a placeholder for a folder with no model."""
    if tokenizer is None:
        return None
    folder = Path(tokenizer)
    bare = folder.is_dir() and not (folder / "config.json").is_file()
    return "TARGET" if bare else tokenizer


def make_generate_command(target: object, draft: object, options: Any) -> list[object]:
    """Return `foretoken generate` with a draft; options: a dataclass of how the target is read."""
    target_words = [] if target is None else ["--target", target]
    return [
        "foretoken",
        "generate",
        *target_words,
        "--draft",
        draft,
        *option.format_flags(option.get_changed_options(options)),
        "PROMPT",
    ]


def describe_result(out: Path, summary: dict[str, Any]) -> str:
    """Describe a result: its parameters, and the steps and seconds that it took."""
    count = summary["parameters"]
    parameters = f"{count / 1e6:.3g}M" if count >= 1e5 else f"{count}"
    return f"{out}: {parameters} parameters, {summary['steps']} steps in {summary['seconds']:.0f} s"
