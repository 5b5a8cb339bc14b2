"""`train lm` and `train seq2seq`: small models from text, or from pairs of texts."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer
from typer import Option

from foretoken.cli import option, train
from foretoken.cli.command import command, set_up_logging
from foretoken.errors import InputError

Patience = Annotated[
    int,
    Option(help="End after so many measurements without a lower held-out loss; 0: at --steps."),
]
Bfloat16 = Annotated[
    bool, Option("--bfloat16", help="Multiply in bfloat16: faster on processors that can.")
]
Out = Annotated[Path, Option(help="Folder for checkpoint, log and model; resumed if there.")]
Layers = Annotated[int, Option(help="Layers.", min=1)]
Heads = Annotated[int, Option(help="Attention heads of a layer.", min=1)]
FeedForward = Annotated[int, Option(help="Width within a layer's feed-forward network.", min=1)]
Steps = Annotated[int, Option(help="Steps of the optimizer, at most.")]
Rate = Annotated[
    float, Option(help="Highest learning rate; it rises at first, and falls at the end.")
]
Hidden = Annotated[int, Option(help="Width of the residual stream.", min=1)]
Vocabulary = Annotated[int, Option(help="Entries of a new tokenizer.", min=1)]
Tokenizer = Annotated[
    Path | None, Option(help="Folder whose tokenizer to use; left out: train one.")
]
Init = Annotated[Path | None, Option(help="Folder of weights to start from.")]
app = typer.Typer(no_args_is_help=True, help="Train small targets, and drafts for them.")


@app.command()
@command
def lm(
    data: Annotated[Path, Option(help="Text file, .txt or .txt.gz, or a folder of such.")],
    out: Out,
    layers: Layers = 16,
    hidden: Hidden = 192,
    feed_forward: FeedForward = 512,
    heads: Heads = 6,
    kv_heads: Annotated[
        int, Option(help="Heads of keys and values, which attention heads share.", min=1)
    ] = 2,
    vocab_size: Vocabulary = 4096,
    steps: Steps = 2000,
    batch: Annotated[int, Option(help="Windows a step.")] = 8,
    context: Annotated[int, Option(help="Tokens a window.", min=1)] = 512,
    learning_rate: Rate = 3e-3,
    patience: Patience = 0,
    bfloat16: Bfloat16 = False,
    seed: option.Seed = 0,
    tokenizer: Tokenizer = None,
    init: Init = None,
    as_json: option.Json = False,
) -> None:
    """Train a Llama-architecture model; logs the held-out loss, resumes after a kill."""
    from transformers import LlamaConfig

    from foretoken.train.recipe import TrainingRecipe
    from reproduction.train import train_lm

    set_up_logging()
    _require_multiple("hidden", hidden, "heads", heads)
    _require_multiple("heads", heads, "kv_heads", kv_heads)
    config = LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=hidden,
        intermediate_size=feed_forward,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        max_position_embeddings=context,
        tie_word_embeddings=True,
    )
    recipe = TrainingRecipe(
        steps, batch, learning_rate, seed=seed, patience=patience, bfloat16=bfloat16
    )
    _run(partial(train_lm, data, out, config, recipe), steps, out, tokenizer, init, as_json=as_json)


@app.command()
@command
def seq2seq(
    data: Annotated[
        Path,
        Option(help='Pairs: .tsv, source, tab, target; or .jsonl {"source": ..., "target": ...}.'),
    ],
    out: Out,
    encoder_layers: Annotated[int, Option(help="Layers of the encoder.", min=1)] = 3,
    decoder_layers: Annotated[int, Option(help="Layers of the decoder.", min=1)] = 4,
    hidden: Hidden = 192,
    feed_forward: FeedForward = 480,
    heads: Heads = 4,
    vocab_size: Vocabulary = 4096,
    length: Annotated[int, Option(help="Tokens of a target at most; the rest is cut.")] = 128,
    dropout: Annotated[
        float, Option(help="Share of activations that training drops.", min=0, max=1)
    ] = 0.0,
    bfloat16: Bfloat16 = False,
    steps: Steps = 2000,
    batch: Annotated[int, Option(help="Tokens a step, of sources, targets and padding.")] = 4096,
    learning_rate: Rate = 3e-3,
    warmup: Annotated[int, Option(help="Steps in which the rate rises.")] = 100,
    patience: Patience = 0,
    save_every: Annotated[int, Option(help="Steps between checkpoints and their loss.")] = 100,
    seed: option.Seed = 0,
    tokenizer: Tokenizer = None,
    init: Init = None,
    as_json: option.Json = False,
) -> None:
    """Train an encoder-decoder, T5 with the gated GELU of v1.1, on pairs of texts.

    One pair in sixteen is held out; the weights with the lowest loss on these are kept. The same
    command resumes a run that was killed. With --tokenizer TARGET the model is a draft for that
    target.
    """
    from transformers import T5Config

    from foretoken.train.recipe import TrainingRecipe
    from reproduction.train import train_seq2seq

    set_up_logging()
    _require_multiple("hidden", hidden, "heads", heads)
    config = T5Config(
        vocab_size=vocab_size,
        d_model=hidden,
        d_kv=hidden // heads,
        d_ff=feed_forward,
        num_layers=encoder_layers,
        num_decoder_layers=decoder_layers,
        num_heads=heads,
        feed_forward_proj="gated-gelu",
        dropout_rate=dropout,
    )
    rate = {"learning_rate": learning_rate, "warmup": warmup}
    ends = {"save_every": save_every, "patience": patience}
    recipe = TrainingRecipe(steps, batch, **rate, seed=seed, **ends, bfloat16=bfloat16)
    trained = partial(train_seq2seq, data, out, config, recipe, length)
    _run(trained, steps, out, tokenizer, init, as_json=as_json)


def _run(
    trained: Callable[..., dict[str, Any]],
    steps: int,
    out: Path,
    tokenizer: Path | None,
    init: Path | None,
    *,
    as_json: bool,
) -> None:
    """Train, and show how to use the model: as a target if its tokenizer is its own, else as a
    draft for the model that the tokenizer came with."""
    for folder, content in ((tokenizer, "a tokenizer"), (init, "a model")):
        if folder is not None and not folder.is_dir():
            raise InputError(f"{folder} is no folder; give a folder of {content}")
    try:
        with train.show_progress_bar("training", steps) as bar:
            summary = trained(tokenizer, init, partial(_report_loss, bar))
    except KeyboardInterrupt:
        print(f"interrupted; the same command goes on from {out}", file=sys.stderr)
        raise typer.Exit(130) from None
    model = out / "model"
    words: list[object] = ["foretoken", "generate", "--target", model, "PROMPT"]
    if tokenizer is not None:
        words = train.make_generate_command(
            train.name_target(tokenizer), model, option.TargetFileOptions()
        )
    lines = [
        train.describe_result(model, summary),
        f"held out: {summary['held_out_nats_per_token']:.4f} nats a token at step "
        f"{summary['best_step']}",
    ]
    train.print_summary(summary, lines, words, as_json=as_json)


def _require_multiple(name: str, value: int, parts: str, divisor: int) -> None:
    if value % divisor:
        raise InputError(f"{name} is {value}; give a multiple of {parts}, {divisor}")


def _report_loss(bar: train.ReportProgress, step: int, loss: float, held_out: float | None) -> None:
    """Report the loss, with a line where the held-out loss was measured."""
    line = None
    if held_out is not None:
        line = f"step {step}: loss {loss:.4f}, held out {held_out:.4f} nats a token"
    bar(step, f"loss {loss:.3f}", line)
