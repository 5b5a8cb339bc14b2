"""`foretoken train`: drafts taught their target's distribution (`distill`), blockwise heads
(`heads`), n-gram tables (`ngram`), and a target's own text (`samples`).
"""

from __future__ import annotations

import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.progress import Progress
from typer import Option

from foretoken.cli import option, trained
from foretoken.cli.command import command, quiet
from foretoken.errors import InputError
from foretoken.storage import files

if TYPE_CHECKING:
    from foretoken.drafters.ngram import NGram
    from foretoken.speculator import Speculator
    from foretoken.train.heads import Measured


app = typer.Typer(no_args_is_help=True, help="Train drafts.")


@app.command()
@command
def distill(
    reading: option.TargetReading,
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
    """Teach a draft its target's distribution, so that more draft tokens are kept.

    Both distributions are compared at every position of texts by the data, the target or the draft.
    The weights with the best alpha on held-out prompts, over the target's own text, become
    OUT/model: use it as --draft. The same command resumes a run that was killed.
    """
    from foretoken.train.distill import Distillation
    from foretoken.train.distill import distill as teach
    from foretoken.train.examples import read
    from foretoken.train.loop import TrainingRecipe
    from foretoken.train.pair import pair

    quiet()
    lesson = Distillation(loss, temperature, on_policy, target_generated, length, held_out)
    recipe = TrainingRecipe(steps, batch, learning_rate, warmup, seed=seed, save_every=save_every)
    origin = {**reading.arguments, "draft_revision": draft_revision}
    models = pair(target, draft, fields(shape), seed, **origin)
    spec = models.together
    if spec.tokenizer is None:
        raise InputError("the target has no tokenizer, so text has no ids; give a folder with one")
    encoder_decoder = spec.target.encoder_decoder
    examples = read(data, spec.tokenizer, length, encoder_decoder=encoder_decoder)
    try:
        with trained.bar("distilling", steps) as bar:
            summary = teach(models, examples, out, lesson, recipe, partial(_report_lesson, bar))
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


def _report_lesson(
    bar: trained.Report, step: int, loss: float, alpha: float | None, best: float
) -> None:
    """The loss and the best alpha; a line where alpha was measured."""
    line = None
    if alpha is not None:
        rank = ", the best so far" if alpha == best else f", the best is {best:.4f}"
        line = f"step {step}: held-out alpha {alpha:.4f}{rank}"
    bar(step, f"loss {loss:.3f}, best alpha {best:.3f}" if step else f"alpha {best:.3f}", line)


@app.command()
@command
def heads(
    reading: option.TargetReading,
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
    """Train blockwise heads on a target's hidden states: one call makes all draft tokens.

    The target is frozen, and each head learns its distribution one place further ahead. Use the
    file as --draft heads:FILE, with this target. Each head's alpha is measured on held-out prompts,
    over the target's own text at temperature 1. The same command resumes a run that was killed.
    """
    from foretoken.train.heads import Teacher, train_heads
    from foretoken.train.loop import TrainingRecipe
    from foretoken.train.pair import read_target

    quiet()
    recipe = TrainingRecipe(steps, batch, learning_rate, warmup, seed=seed, save_every=save_every)
    option.require_folder(out)
    options = reading.arguments
    generation_config = options.pop("generation_config")
    target_model = read_target(target, **options)
    teacher = Teacher.of(*target_model, data, length, target_generated, generation_config)
    try:
        with trained.bar("training", steps) as bar:
            summary = train_heads(teacher, out, heads, recipe, partial(_report_heads, bar))
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


def _report_heads(bar: trained.Report, step: int, loss: float, measured: Measured | None) -> None:
    """The loss; a line where the heads were measured."""
    line = None
    if measured is not None:
        alpha = " ".join(f"{x:.3f}" for x in measured.alpha)
        agreement = " ".join(f"{x:.3f}" for x in measured.agreement)
        line = f"step {step}: alpha by head {alpha}; its argmax the target's {agreement}"
    bar(step, f"loss {loss:.3f}", line)


@app.command()
@command
def samples(
    loading: option.Loading,
    out: Annotated[Path, typer.Option(help="Text file to write.")],
    data: Annotated[Path, typer.Option(help="Text to cut prompts from.")],
    target: option.Target = None,
    tokens: Annotated[int, typer.Option(help="How many to sample.")] = 500_000,
    temperature: Annotated[float, typer.Option()] = 1.0,
    seed: option.Seed = 0,
) -> None:
    """Write a target's own text to a file, to train a draft on with `foretoken-lab train lm`."""
    from foretoken.text.decoding import decode

    option.require_file(out)
    quiet()
    spec = _load(loading, target)
    if spec.tokenizer is None:
        raise InputError("the target has no tokenizer, so its samples have no text")
    texts = _sample(spec, tokens, data, temperature, seed)
    files.write(out, "\n\n".join(decode(spec.tokenizer, text) for text in texts).encode())
    print(f"{out}: {sum(map(len, texts))} tokens")
    if target is not None:
        print(f"use it: foretoken-lab train lm --data {out} --tokenizer {target} --out FOLDER")


@app.command()
@command
def ngram(
    loading: option.Loading,
    out: Annotated[Path, typer.Option(help="File to write, a .safetensors.")],
    order: Annotated[int, typer.Option(help="1: unigram, 2: bigram, ...")] = 3,
    data: Annotated[
        Path | None,
        typer.Option(
            "--data",
            "--from-text",
            help="Text file or folder to count, or pairs (.jsonl, .tsv): their targets.",
        ),
    ] = None,
    target: Annotated[
        str | None,
        typer.Option(
            "--target",
            "--from-samples",
            help="Target whose samples to count; --data then gives their prompts.",
        ),
    ] = None,
    tokens: Annotated[
        int | None, typer.Option(help="How many to sample; left out: 100,000.")
    ] = None,
    temperature: Annotated[float | None, typer.Option(help="Of the samples; left out: 1.")] = None,
    seed: option.Seed = 0,
    as_json: option.Json = False,
) -> None:
    """Fit an n-gram draft to text or to a target's own samples; use it as `--draft ngram:FILE`.

    Text needs --tokenizer, the target's. The table is fitted to all text; bits a token on held-out
    text are measured with a table of the rest.
    """
    if order < 1:  # before anything is sampled
        raise InputError(f"order is {order}; give 1 (unigram) or more")
    if target is None and (tokens is not None or temperature is not None):
        raise InputError("--tokens and --temperature are of samples; give --target too")
    option.require_file(out)
    quiet()
    if target is not None:
        spec = _load(loading, target)
        distribution = 1.0 if temperature is None else temperature
        texts = _sample(spec, 100_000 if tokens is None else tokens, data, distribution, seed)
        table, bits = _fit_samples(spec, texts, order)
    elif data is not None and loading.tokenizer is not None:
        table, bits = _fit_text(data, loading, order)
    else:
        raise InputError("give --target TARGET, or --data with --tokenizer FOLDER")
    table.save(out)
    size = out.stat().st_size
    lines = [f"{out}: order {table.order}, vocabulary {table.vocab_size}, {size / 1e6:.1f} MB"]
    if bits is not None:
        lines.append(f"held-out text: {bits:.2f} bits a token")
    summary = {
        "order": table.order,
        "vocab_size": table.vocab_size,
        "bytes": size,
        "held_out_bits_per_token": bits,
    }
    options = replace(loading, tokenizer=None) if target is None else loading
    use = trained.use(target or trained.target_of(loading.tokenizer), f"ngram:{out}", options)
    trained.show(summary, lines, use, as_json=as_json)


def _load(loading: option.Loading, target: str | None) -> Speculator:
    """A target by itself, without a distribution suggested by its config: the command's own is
    used."""
    return replace(loading.load(target, "none"), suggested={})


def _fit_text(path: Path, loading: option.Loading, order: int) -> tuple[NGram, float | None]:
    from foretoken.loading import sources
    from foretoken.train.ngram import fit_from_text, held_out_bits_of_text

    assert loading.tokenizer is not None
    origin = loading.revision, loading.trust_remote_code
    tokenizer = sources.tokenizer(loading.tokenizer, *origin, required=True)
    assert tokenizer is not None  # wanted
    return fit_from_text(path, tokenizer, order), held_out_bits_of_text(path, tokenizer, order)


def _fit_samples(
    spec: Speculator, texts: list[list[int]], order: int
) -> tuple[NGram, float | None]:
    from foretoken.drafters.ngram import fingerprint
    from foretoken.train.ngram import fit, held_out_bits

    mark = fingerprint(spec.tokenizer.get_vocab()) if spec.tokenizer else None
    V = spec.target.vocab_size
    return fit(texts, V, order, fingerprint=mark), held_out_bits(texts, V, order)


def _sample(
    spec: Speculator, tokens: int, text: Path | None, temperature: float, seed: int
) -> list[list[int]]:
    from foretoken.train import corpus, examples

    prompts = None
    if text is not None:
        if spec.tokenizer is None:
            raise InputError("the target has no tokenizer, so no prompts can be cut from text")
        prompts = corpus.encode(corpus.read_texts(text), spec.tokenizer)
    options = {"prompts": prompts, "temperature": temperature, "seed": seed}
    sequences = examples.samples(spec, tokens, **options)  # a mistake is told before the bar
    texts: list[list[int]] = []
    with Progress(console=Console(stderr=True)) as progress:
        bar = progress.add_task("sampling", total=tokens)
        for sequence in sequences:
            texts.append(sequence)
            progress.advance(bar, len(sequence))
    return texts
