"""`foretoken train lm`, `samples` and `ngram`: small language models and n-gram tables, from text
or from a target's samples."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.progress import Progress

from foretoken.cli import distill, heads, option, seq2seq, trained
from foretoken.cli.command import command
from foretoken.cli.command import quiet
from foretoken.errors import InputError
from foretoken.storage import files

if TYPE_CHECKING:
    from foretoken.drafters.ngram import NGram
    from foretoken.speculator import Speculator

app = typer.Typer(no_args_is_help=True, help="Train drafts and small targets.")
app.command()(distill.distill)
app.command()(heads.heads)
app.command()(seq2seq.seq2seq)
Data = Annotated[Path, typer.Option(help="Text file, .txt or .txt.gz, or a folder of such.")]


@app.command()
def lm(
    data: Data,
    out: Annotated[
        Path, typer.Option(help="Folder for checkpoint, log and model; resumed if there.")
    ],
    layers: Annotated[int, typer.Option()] = 16,
    hidden: Annotated[int, typer.Option(help="Width of the residual stream.")] = 192,
    feed_forward: Annotated[int, typer.Option()] = 512,
    heads: Annotated[int, typer.Option()] = 6,
    kv_heads: Annotated[int, typer.Option()] = 2,
    vocab_size: Annotated[int, typer.Option(help="Of a new tokenizer.")] = 4096,
    steps: Annotated[int, typer.Option()] = 2000,
    batch: Annotated[int, typer.Option(help="Windows a step.")] = 8,
    context: Annotated[int, typer.Option(help="Tokens a window.")] = 512,
    learning_rate: Annotated[float, typer.Option()] = 3e-3,
    patience: trained.Patience = 0,
    bfloat16: trained.Bfloat16 = False,
    seed: option.Seed = 0,
    tokenizer: Annotated[
        Path | None, typer.Option(help="Folder whose tokenizer to use; left out: train one.")
    ] = None,
    init: Annotated[Path | None, typer.Option(help="Folder of weights to start from.")] = None,
    as_json: option.Json = False,
) -> None:
    """Train a Llama-architecture model; logs the held-out loss, resumes after a kill."""
    from foretoken.train.lm import Shape, train_lm
    from foretoken.train.loop import Recipe

    quiet()
    shape = Shape(layers, hidden, feed_forward, heads, kv_heads, vocab_size, context)
    recipe = Recipe(steps, batch, learning_rate, seed=seed, patience=patience, bfloat16=bfloat16)
    trained.require_folders((tokenizer, "a tokenizer"), (init, "a model"))
    with trained.bar("training", steps) as bar:
        report = partial(trained.report_loss, bar)
        summary = train_lm(data, out, shape, recipe, tokenizer, init, report)
    model = out / "model"
    lines = [
        f"{trained.size(model, summary)} over {summary['tokens_seen'] / 1e6:.3g}M tokens",
        f"held-out text: {summary['held_out_nats_per_token']:.4f} nats a token, "
        f"{summary['held_out_bits_per_byte']:.4f} bits a byte",
    ]
    trained.show_model(summary, lines, model, tokenizer, as_json=as_json)


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
    """Write a target's own text to a file, to train a draft on with `foretoken train lm`."""
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
        print(f"use it: foretoken train lm --data {out} --tokenizer {target} --out FOLDER")


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
        law = 1.0 if temperature is None else temperature
        texts = _sample(spec, 100_000 if tokens is None else tokens, data, law, seed)
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
    """A target by itself, without a law suggested by its config: the command's own is used."""
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
    from foretoken.train import corpus, samples

    prompts = None
    if text is not None:
        if spec.tokenizer is None:
            raise InputError("the target has no tokenizer, so no prompts can be cut from text")
        prompts = corpus.encode(corpus.read_texts(text), spec.tokenizer)
    options = {"prompts": prompts, "temperature": temperature, "seed": seed}
    sequences = samples.samples(spec, tokens, **options)  # a mistake is told before the bar
    texts: list[list[int]] = []
    with Progress(console=Console(stderr=True)) as progress:
        bar = progress.add_task("sampling", total=tokens)
        for sequence in sequences:
            texts.append(sequence)
            progress.advance(bar, len(sequence))
    return texts
