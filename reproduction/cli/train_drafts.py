"""`python -m reproduction train heads`, `ngram` and `samples`: drafts that modules of this folder
make, and texts sampled from a target.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from rich.console import Console
from rich.progress import Progress
from typer import Option

from foretoken.cli import option
from foretoken.cli.command import command, set_up_logging
from foretoken.cli.train import (
    DistillationOptions,
    ReportProgress,
    describe_result,
    exit_on_interrupt,
    make_generate_command,
    name_target,
    print_summary,
    show_progress_bar,
)
from foretoken.errors import InputError
from foretoken.storage import files

if TYPE_CHECKING:
    from foretoken.speculator import Speculator
    from reproduction.ngram import NGram


@dataclass(frozen=True)
class HeadTraining(DistillationOptions):
    """Options of a training run of heads."""

    learning_rate: Annotated[
        float, Option(help="Highest learning rate.", rich_help_panel="Training")
    ] = 2e-3


@command
def heads(
    reading: option.TargetFileOptions,
    data: option.TrainingData,
    out: Annotated[
        Path,
        Option(help="File to write, a .safetensors. Resumes a run in the .run folder beside it."),
    ],
    training: HeadTraining,
    target: option.Target = None,
    heads: Annotated[int, Option(help="Number of heads, which is the largest gamma.")] = 4,
    as_json: option.Json = False,
) -> None:
    """Train blockwise heads on a target's hidden states; one forward makes all draft tokens.

    The target is frozen, and each head predicts one position further ahead. Use the file as
    --draft reproduction.heads:FILE, with this target. The alpha of each head is measured on
    held-out prompts, continued by the target at temperature 1. The same command resumes a run that
    was killed.
    """
    from foretoken.train.pair import load_target
    from reproduction.train_heads import Teacher, train_heads

    target = option.resolve_target(target)
    set_up_logging()
    recipe = training.recipe
    option.require_folder(out)
    options = reading.arguments
    generation_config = options.pop("generation_config")
    target_model = load_target(target, **options)
    texts = training.length, training.target_generated
    teacher = Teacher.of(*target_model, data, *texts, generation_config)
    with exit_on_interrupt("interrupted; the same command goes on"):
        with show_progress_bar("training", training.steps) as bar:
            summary = train_heads(teacher, out, heads, recipe, partial(_report_heads, bar))
    lines = [
        describe_result(out, summary),
        *(
            f"head {k}: alpha {alpha:.3f} on held-out prompts"
            for k, alpha in enumerate(summary["alpha"], 1)
        ),
    ]
    print_summary(
        summary,
        lines,
        make_generate_command(target, f"reproduction.heads:{out}", reading),
        as_json=as_json,
    )


def _report_heads(bar: ReportProgress, step: int, loss: float, alpha: list[float] | None) -> None:
    """Report the loss, with a line where the heads were measured."""
    told = None
    if alpha is not None:
        told = f"step {step}: alpha by head {' '.join(f'{x:.3f}' for x in alpha)}"
    bar(step, f"loss {loss:.3f}", told)


@command
def samples(
    loading: option.TargetLoadOptions,
    out: Annotated[Path, Option(help="Text file to write.")],
    data: Annotated[Path, Option(help="Text to cut prompts from.")],
    target: option.Target = None,
    tokens: Annotated[int, Option(help="Tokens to sample.")] = 500_000,
    temperature: Annotated[float, Option(help="Sampling temperature; 0 is greedy.")] = 1.0,
    seed: option.Seed = 0,
) -> None:
    """Write texts sampled from a target, to train a draft on with `train lm`."""
    from foretoken.text.decoding import decode

    option.require_file(out)
    target = option.resolve_target(target)
    set_up_logging()
    spec = _sampler(loading, target)
    if spec.tokenizer is None:
        raise InputError("the target has no tokenizer, so its samples have no text")
    texts = _sampled(spec, data, tokens, temperature, seed)
    files.write_atomically(
        out, "\n\n".join(decode(spec.tokenizer, text) for text in texts).encode()
    )
    print(f"{out}: {sum(map(len, texts))} tokens")
    print(f"use it: python -m reproduction train lm --data {out} --tokenizer {target} --out FOLDER")


def _sampler(loading: option.TargetLoadOptions, target: str | None) -> Speculator:
    """Load a target alone, without the sampling params that its config suggests."""
    return replace(loading.load(target, "none"), suggested={})


def _sampled(
    spec: Speculator, data: Path | None, tokens: int, temperature: float, seed: int
) -> list[list[int]]:
    """Sample texts with prompts from a file or, where there is none, with none."""
    from foretoken.train import corpus
    from reproduction.samples import samples as sampled

    prompts = None
    if data is not None:
        if spec.tokenizer is None:
            raise InputError("the target has no tokenizer, so no prompts can be cut from --data")
        prompts = corpus.encode(corpus.read_texts(data), spec.tokenizer)
    options = {"prompts": prompts, "temperature": temperature, "seed": seed}
    sequences = sampled(spec, tokens, **options)  # a mistake is told before the bar
    texts: list[list[int]] = []
    with Progress(console=Console(stderr=True)) as progress:
        bar = progress.add_task("sampling", total=tokens)
        for sequence in sequences:
            texts.append(sequence)
            progress.advance(bar, len(sequence))
    return texts


@command
def ngram(
    loading: option.TargetLoadOptions,
    out: Annotated[Path, Option(help="File to write, a .safetensors.")],
    data: Annotated[
        Path | None,
        Option(
            "--data",
            "--from-text",
            help="Text to count: a file, a folder, or the targets of pairs (.jsonl, .tsv). With "
            "--target, the text that prompts are cut from.",
        ),
    ] = None,
    target: Annotated[
        str | None,
        Option(
            "--target",
            "--from-samples",
            help="Count texts sampled from this target: a folder or hub id.",
        ),
    ] = None,
    order: Annotated[int, Option(help="Length of the n-grams; 1: unigrams, 2: bigrams, ...")] = 3,
    tokens: Annotated[
        int | None, Option(help="Tokens to sample from the target. Default: 100,000.")
    ] = None,
    temperature: Annotated[
        float | None, Option(help="Temperature of the samples. Default: 1.")
    ] = None,
    seed: option.Seed = 0,
    as_json: option.Json = False,
) -> None:
    """Fit an n-gram table to text, or to a target's own.

    Use it as --draft reproduction.ngram:FILE.

    Text needs --tokenizer: the target, or the folder or hub id of its tokenizer. Bits a token are
    of held-out text, under a table of the rest; the table that is written is of all text.
    """
    if order < 1:  # before anything is sampled
        raise InputError(f"order is {order}; give 1 (unigram) or more")
    if target is None and (tokens is not None or temperature is not None):
        raise InputError("--tokens and --temperature are of samples; give --target too")
    option.require_file(out)
    set_up_logging()
    if target is not None:
        spec = _sampler(loading, target)
        warmth = 1.0 if temperature is None else temperature
        count = 100_000 if tokens is None else tokens
        texts = _sampled(spec, data, count, warmth, seed)
        table, bits = _fitted_to_samples(spec, texts, order)
    elif data is not None and loading.tokenizer is not None:
        table, bits = _fitted_to_text(data, loading, order)
    else:
        raise InputError("give --data with --tokenizer, or --target")
    table.save(out)
    count = out.stat().st_size
    lines = [f"{out}: order {table.order}, vocabulary {table.vocab_size}, {count / 1e6:.1f} MB"]
    lines += [] if bits is None else [f"held-out text: {bits:.2f} bits a token"]
    sizes = {"order": table.order, "vocab_size": table.vocab_size, "bytes": count}
    summary = {**sizes, "held_out_bits_per_token": bits}
    reading = loading if target is not None else replace(loading, tokenizer=None)
    used = make_generate_command(
        target or name_target(loading.tokenizer), f"reproduction.ngram:{out}", reading
    )
    print_summary(summary, lines, used, as_json=as_json)


def _fitted_to_text(
    data: Path, loading: option.TargetLoadOptions, order: int
) -> tuple[NGram, float | None]:
    from foretoken.loading import sources
    from reproduction.train_ngram import fit_from_text, held_out_bits_of_text

    origin = loading.revision, loading.trust_remote_code
    tokenizer = sources.load_tokenizer(loading.tokenizer, *origin, required=True)
    assert tokenizer is not None  # required
    return fit_from_text(data, tokenizer, order), held_out_bits_of_text(data, tokenizer, order)


def _fitted_to_samples(
    spec: Speculator, texts: list[list[int]], order: int
) -> tuple[NGram, float | None]:
    from reproduction.ngram import fingerprint
    from reproduction.train_ngram import fit, held_out_bits

    V = spec.target.vocab_size
    mark = fingerprint(spec.tokenizer.get_vocab()) if spec.tokenizer else None
    return fit(texts, V, order, fingerprint=mark), held_out_bits(texts, V, order)
