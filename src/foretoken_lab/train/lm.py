"""Train a small Llama-architecture model on a folder of text: `foretoken-lab train lm`.

Batches depend on the seed and the step alone, so a run that was killed resumes with the same data.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from torch.nn import functional
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from foretoken.errors import InputError, one_line
from foretoken.train import corpus
from foretoken.train.loop import Loop, TrainingRecipe, folder_of_run, require_positive

# step, training loss, held-out loss where measured
Report = Callable[[int, float, float | None], None]


@dataclass(frozen=True, slots=True)
class DecoderShape:
    """The model's size, with a tied embedding of `vocab_size` rows; training windows have
    `context` tokens."""

    layers: int = 16
    hidden: int = 192
    feed_forward: int = 512
    heads: int = 6
    kv_heads: int = 2
    vocab_size: int = 4096
    context: int = 512

    def __post_init__(self) -> None:
        for name in self.__slots__:
            require_positive(name, getattr(self, name))
        for name, parts in (("hidden", "heads"), ("heads", "kv_heads")):
            value, divisor = getattr(self, name), getattr(self, parts)
            if value % divisor:
                raise InputError(f"{name} is {value}; give a multiple of {parts}, {divisor}")


def train_lm(
    data: Path,
    out: Path,
    shape: DecoderShape,
    recipe: TrainingRecipe,
    tokenizer_folder: Path | None,
    init: Path | None,
    report: Report,
) -> dict[str, Any]:
    """Train until `recipe.steps`, or until the held-out loss stops falling (`recipe.patience`);
    then write the model with the lowest one in transformers' layout to `out/model`, and return
    the summary.

    `tokenizer_folder`: its tokenizer is used instead of a new one. `init`: a folder whose weights
    (and tokenizer, if no other is given) are the start. A checkpoint in `out` is resumed.
    """
    texts = corpus.read_texts(data)
    folder_of_run(out)
    tokenizer = corpus.tokenizer_of_run(
        out,
        tokenizer_folder or init,
        lambda: corpus.train_tokenizer(corpus.split(texts)[0], shape.vocab_size, shape.context),
    )
    books = corpus.build(texts, tokenizer)
    if len(books.train) <= shape.context or len(books.held_out) <= shape.context:
        raise InputError(
            f"{data} gives {len(books.train)} tokens to train on and {len(books.held_out)} held "
            f"out; give more text, or a context below {min(len(books.train), len(books.held_out))}"
        )
    model = _model(init, shape, recipe, tokenizer)
    loop = Loop(out, model, recipe)

    def loss_at(step: int) -> torch.Tensor:
        return _loss(model, _batch(books.train, shape.context, recipe, step))

    for loss in loop.losses(loss_at):
        measured = None
        if loop.due:
            measured = held_out_loss(model, books.held_out, shape.context, windows=24)
            loop.rank(-measured)
            loop.save(loss=loss, held_out=measured)
        report(loop.step, loss, measured)
    return _export(loop, model, tokenizer, books, shape.context)


def _model(
    init: Path | None,
    shape: DecoderShape,
    recipe: TrainingRecipe,
    tokenizer: PreTrainedTokenizerFast,
) -> LlamaForCausalLM:
    torch.manual_seed(recipe.seed)
    model = _weights(init) if init else LlamaForCausalLM(_config(shape, tokenizer))
    rows, ids = model.config.vocab_size, max(tokenizer.get_vocab().values()) + 1
    if rows < ids:
        raise InputError(f"{init} has {rows} rows for {ids} tokens; leave --tokenizer out")
    model.config.max_position_embeddings = shape.context
    return model


def _export(
    loop: Loop,
    model: LlamaForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    books: corpus.Corpus,
    context: int,
) -> dict[str, Any]:
    """The best model in bfloat16 with its tokenizer, and what was measured."""
    rounded = LlamaForCausalLM(model.config).bfloat16()
    rounded.load_state_dict(loop.best["weights"])
    loop.export(rounded, tokenizer)
    nats = held_out_loss(rounded.float(), books.held_out, context)  # of the weights as written
    return loop.summarize(
        best_step=loop.best["step"],
        tokens_seen=loop.step * loop.recipe.batch * context,
        train_tokens=len(books.train),
        held_out_tokens=len(books.held_out),
        held_out_nats_per_token=nats,
        held_out_bits_per_byte=nats * len(books.held_out) / books.held_out_bytes / math.log(2),
    )


@torch.inference_mode()
def held_out_loss(
    model: LlamaForCausalLM, ids: np.ndarray, context: int, windows: int | None = None
) -> float:
    """Nats per token; each window's second half is scored, its first half being context.
    `windows`: how many, evenly spread; None: all."""
    model.eval()
    stride = context // 2
    starts = list(range(0, len(ids) - context, stride))
    if windows is not None:
        starts = starts[:: max(1, len(starts) // windows)]
    losses = []
    for i in range(0, len(starts), 8):
        batch = _windows(ids, starts[i : i + 8], context)
        logits = model(input_ids=batch[:, :-1], use_cache=False).logits[:, -stride:]
        losses.append(
            functional.cross_entropy(
                logits.flatten(0, 1).float(), batch[:, -stride:].flatten(), reduction="sum"
            )
        )
    return float(torch.stack(losses).sum()) / (len(starts) * stride)


def _loss(model: LlamaForCausalLM, batch: torch.Tensor) -> torch.Tensor:
    model.train()
    logits = model(input_ids=batch[:, :-1], use_cache=False).logits
    return functional.cross_entropy(logits.flatten(0, 1).float(), batch[:, 1:].flatten())


def _batch(ids: np.ndarray, context: int, recipe: TrainingRecipe, step: int) -> torch.Tensor:
    random = np.random.default_rng((recipe.seed, step))
    return _windows(ids, random.integers(0, len(ids) - context, recipe.batch), context)


def _windows(ids: np.ndarray, starts: Iterable[int], context: int) -> torch.Tensor:
    """`[B, context + 1]`: each predicts its last `context` tokens."""
    return torch.from_numpy(np.stack([ids[s : s + context + 1] for s in starts]).astype(np.int64))


def _weights(folder: Path) -> LlamaForCausalLM:
    try:
        return LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32)
    except Exception as error:  # the library raises many kinds
        reason = one_line(error)
        raise InputError(f"{folder} holds no Llama model that can be read: {reason}") from None


def _config(shape: DecoderShape, tokenizer: PreTrainedTokenizerFast) -> LlamaConfig:
    return LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=shape.hidden,
        intermediate_size=shape.feed_forward,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        max_position_embeddings=shape.context,
        tie_word_embeddings=True,
        bos_token_id=cast(int, tokenizer.bos_token_id),
        eos_token_id=cast(int, tokenizer.eos_token_id),
    )
