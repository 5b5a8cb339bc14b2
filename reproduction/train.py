"""Train small models: a Llama on text (`train lm`), or an encoder-decoder on pairs of texts
(`train seq2seq`), T5 with the gated GELU of version 1.1 (Raffel et al., arXiv 1910.10683; Shazeer,
arXiv 2002.05202), whose output layer is the embedding: transformers ties T5's; or an ImageGPT (Chen
et al. 2020) on images.

Batches depend on the seed and the step alone, so a run that was killed resumes with the same data.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional
from transformers import (
    ImageGPTConfig,
    ImageGPTForCausalImageModeling,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    T5Config,
    T5ForConditionalGeneration,
)

from foretoken.errors import InputError
from foretoken.loading import sources
from foretoken.models.row_slots import pad_blocks
from foretoken.train import corpus
from foretoken.train.corpus import Example, ExampleLine
from foretoken.train.loop import TrainingLoop, make_run_folder
from foretoken.train.recipe import TrainingRecipe, require_positive
from reproduction import new_tokenizer

WINDOWS = 24  # held-out windows that are measured while training; all are at the end
EXAM = 512  # held-out pairs, likewise
GRAIN = 8  # lengths count as if rounded up to this many tokens, so that pairs in a batch change
UNNAMED = 0.1  # of images that are trained on begin with the token of none
IGNORED = -100  # in the place of a label: padding
IN_FULL = torch.float32, torch.device("cpu")

# step, training loss, held-out loss where measured
Report = Callable[[int, float, float | None], None]


def train_lm(
    data: Path,
    out: Path,
    config: LlamaConfig,
    recipe: TrainingRecipe,
    tokenizer_folder: Path | None,
    init: Path | None,
    report: Report,
) -> dict[str, Any]:
    """Train until `recipe.steps`, or until the held-out loss stops falling (`recipe.patience`);
    then write the model with the lowest one in transformers' layout to `out/model`, and return
    the summary.

    `config`: the model's size; its context is that of training windows, and its vocabulary that of
    a new tokenizer. `tokenizer_folder`: its tokenizer is used instead of a new one. `init`: a
    folder whose weights (and tokenizer, if no other is given) are the start. A checkpoint in `out`
    is resumed.
    """
    texts, context = corpus.read_texts(data), config.max_position_embeddings
    make_run_folder(out)
    tokenizer = new_tokenizer.tokenizer_of_run(
        out,
        tokenizer_folder or init,
        lambda: new_tokenizer.train_tokenizer(
            corpus.split_texts(texts)[0], config.vocab_size, context
        ),
    )
    books = new_tokenizer.build(texts, tokenizer)
    if len(books.train) <= context or len(books.held_out) <= context:
        raise InputError(
            f"{data} gives {len(books.train)} tokens to train on and {len(books.held_out)} held "
            f"out; give more text, or a context below {min(len(books.train), len(books.held_out))}"
        )
    torch.manual_seed(recipe.seed)
    if init is None:
        ends = {"bos_token_id": tokenizer.bos_token_id, "eos_token_id": tokenizer.eos_token_id}
        config.update({"vocab_size": len(tokenizer), **ends})
        model = LlamaForCausalLM(config)
    else:
        model = cast(LlamaForCausalLM, _loaded(init, "llama", tokenizer, {}))
        model.config.max_position_embeddings = context
    loop = TrainingLoop(out, model, recipe)

    def loss_at(step: int) -> Tensor:
        model.train()
        random = np.random.default_rng((recipe.seed, step))
        starts = random.integers(0, len(books.train) - context, recipe.batch)
        batch = _windows(books.train, starts, context)
        logits = model(input_ids=batch[:, :-1], use_cache=False).logits
        return functional.cross_entropy(logits.flatten(0, 1).float(), batch[:, 1:].flatten())

    def exam() -> float:
        return held_out_loss(model, books.held_out, context, WINDOWS)

    rounded = _trained(loop, model, tokenizer, loss_at, exam, report)
    nats = held_out_loss(rounded, books.held_out, context)  # of the weights as written
    return loop.summarize(
        best_step=loop.best["step"],
        tokens_seen=loop.step * recipe.batch * context,
        train_tokens=len(books.train),
        held_out_tokens=len(books.held_out),
        held_out_nats_per_token=nats,
        held_out_bits_per_byte=nats * len(books.held_out) / books.held_out_bytes / math.log(2),
    )


def _trained(
    loop: TrainingLoop,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerFast | None,
    loss_at: Callable[[int], Tensor],
    exam: Callable[[], float],
    report: Report,
) -> Any:
    """Make all steps, and write the weights with the lowest held-out loss in bfloat16, with the
    tokenizer, where there is one; returns them as written, in float32."""
    for loss in loop.run_steps(loss_at):
        measured = None
        if loop.is_due:
            measured = exam()
            loop.record_score(-measured)
            loop.save(loss=loss, held_out=measured)
        report(loop.step, loss, measured)
    model.load_state_dict(loop.best["weights"])
    rounded = copy.deepcopy(model).bfloat16()
    loop.export(rounded, tokenizer)
    return rounded.float()


def _loaded(
    folder: Path, kind: str, tokenizer: PreTrainedTokenizerFast, options: dict[str, Any]
) -> PreTrainedModel:
    """The weights of a folder. InputError where they are of another kind, or too few rows for the
    tokenizer."""
    start = sources.find_source(folder, None, False)
    if start.config.model_type != kind:
        raise InputError(f"{folder} is a {start.config.model_type} model; give one of kind {kind}")
    model = replace(start, options=start.options | options).load_network(*IN_FULL)
    rows, ids = model.config.vocab_size, max(tokenizer.get_vocab().values()) + 1
    if rows < ids:
        raise InputError(f"{folder} has {rows} rows for {ids} tokens; leave --tokenizer out")
    return model


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


def _windows(ids: np.ndarray, starts: Iterable[int], context: int) -> torch.Tensor:
    """`[B, context + 1]`: each predicts its last `context` tokens."""
    return torch.from_numpy(np.stack([ids[s : s + context + 1] for s in starts]).astype(np.int64))


def train_seq2seq(
    data: Path,
    out: Path,
    config: T5Config,
    recipe: TrainingRecipe,
    length: int,
    tokenizer_folder: Path | None,
    init: Path | None,
    report: Report,
) -> dict[str, Any]:
    """Train as `train_lm` does. Raises InputError for what cannot be read or learnt.

    `data`: a .tsv or .jsonl file of pairs, one in sixteen held out. `recipe.batch`: tokens of a
    step, sources, targets and padding. `length`: tokens of a target at most; the rest is cut.
    """
    require_positive("length", length)
    lines = _pairs(data)
    make_run_folder(out)
    tokenizer = _pair_tokenizer(out, tokenizer_folder or init, lines, config.vocab_size)
    lessons = corpus.read_examples(data, tokenizer, length, encoder_decoder=True)
    torch.manual_seed(recipe.seed)
    dropout = config.dropout_rate
    if init is None:
        ids, pad = max(tokenizer.get_vocab().values()) + 1, tokenizer.pad_token_id
        ends = {"pad_token_id": pad, "eos_token_id": tokenizer.eos_token_id}
        config.update({"vocab_size": ids, "decoder_start_token_id": pad, **ends})
        model = T5ForConditionalGeneration(config)
    else:
        options = {"dropout_rate": dropout}
        model = cast(T5ForConditionalGeneration, _loaded(init, "t5", tokenizer, options))
    settings = {"length": length, "dropout": dropout, "data": lessons.digest}
    loop = TrainingLoop(out, model, recipe, settings)
    batches = Batches(lessons.train, recipe.batch, recipe.seed)
    few = lessons.held_out[:: max(1, len(lessons.held_out) // EXAM)][:EXAM]

    def loss_at(step: int) -> Tensor:
        model.train()
        torch.manual_seed(hash((recipe.seed, step)))  # what drops out depends on these alone
        return cross_entropy(model, batches.at(step), "mean")

    def exam() -> float:
        return pairs_loss(model, few, recipe.batch)

    rounded = _trained(loop, model, tokenizer, loss_at, exam, report)
    nats = pairs_loss(rounded, lessons.held_out, recipe.batch)
    return loop.summarize(
        best_step=loop.best["step"],
        epochs=loop.step / (len(batches.edges) - 1),
        held_out_pairs=len(lessons.held_out),
        held_out_nats_per_token=nats,
    )


def _pair_tokenizer(
    out: Path, folder: Path | None, lines: list[ExampleLine], size: int
) -> PreTrainedTokenizerFast:
    """InputError for one that ends no text, or pads none."""
    train, _ = corpus.hold_out(lines)
    texts = [text for line in train for text in (line.source, line.target or "")]
    fresh = partial(new_tokenizer.train_pair_tokenizer, texts, size)
    tokenizer = new_tokenizer.tokenizer_of_run(out, folder, fresh)
    if tokenizer.pad_token_id is None or tokenizer("a").input_ids[-1] != tokenizer.eos_token_id:
        raise InputError(
            f"the tokenizer in {folder or out} has no padding or puts no end behind a text; give "
            "that of an encoder-decoder, or none"
        )
    return tokenizer


class Batches:
    """Pairs of like lengths together; every epoch deals them anew, in another order."""

    def __init__(self, pairs: list[Example], tokens: int, seed: int) -> None:
        """`tokens`: of a batch at most, padding included; a longer pair is alone."""
        self.pairs, self.seed = pairs, seed
        lengths = np.array([(len(p.prompt), len(p.reference)) for p in pairs])
        self.lengths = -(-lengths // GRAIN) * GRAIN
        self.edges = _edges(self.lengths[self._sorted(np.arange(len(pairs)))], tokens)
        self._epoch, self._dealt = -1, np.empty(0, dtype=int)

    def at(self, step: int) -> list[Example]:
        """The batch of a step, from 0 on."""
        epoch, place = divmod(step, len(self.edges) - 1)
        random = np.random.default_rng((self.seed, epoch))
        if epoch != self._epoch:
            self._epoch, self._dealt = epoch, self._sorted(random.permutation(len(self.pairs)))
        random = np.random.default_rng((self.seed, epoch, 1))
        k = int(random.permutation(len(self.edges) - 1)[place])
        return [self.pairs[i] for i in self._dealt[self.edges[k] : self.edges[k + 1]]]

    def _sorted(self, order: np.ndarray) -> np.ndarray:
        """By target's, then source's rounded length; of equal ones in the order given."""
        return order[np.lexsort(self.lengths[order].T)]


def _edges(lengths: np.ndarray, tokens: int) -> list[int]:
    """Where batches of up to so many tokens begin, and the end: lengths `[N, 2]`, sorted."""
    edges, widest = [0], np.zeros(2, dtype=int)
    for i, pair in enumerate(lengths):
        widest = np.maximum(widest, pair)
        if i > edges[-1] and (i + 1 - edges[-1]) * int(widest.sum()) > tokens:
            edges.append(i)
            widest = pair
    return [*edges, len(lengths)]


def cross_entropy(
    model: T5ForConditionalGeneration, pairs: list[Example], reduction: str
) -> Tensor:
    """Return the cross-entropy of the targets given their sources, in nats: "mean", or "sum" over
    all tokens."""
    sources = [list(p.prompt) for p in pairs]
    targets = [list(p.reference) for p in pairs]
    start = cast(int, model.config.decoder_start_token_id)
    device = model.device
    ids = pad_blocks(sources, device)
    logits = model(
        input_ids=ids,
        attention_mask=_within(sources, ids).long(),
        decoder_input_ids=pad_blocks([[start, *target[:-1]] for target in targets], device),
        use_cache=False,
    ).logits
    labels = pad_blocks(targets, device)
    labels = labels.masked_fill(~_within(targets, labels), IGNORED)
    return functional.cross_entropy(
        logits.flatten(0, 1).float(), labels.flatten(), ignore_index=IGNORED, reduction=reduction
    )


def _within(rows: list[list[int]], ids: Tensor) -> Tensor:
    """Which of the padded ids are a row's own, `[B, T]`."""
    lengths = torch.tensor([len(row) for row in rows], device=ids.device)
    return torch.arange(ids.shape[1], device=ids.device) < lengths[:, None]


@torch.inference_mode()
def pairs_loss(model: T5ForConditionalGeneration, pairs: list[Example], tokens: int) -> float:
    """Nats per token of the targets, in float32, in batches of up to so many tokens."""
    model.eval()
    batches = Batches(pairs, tokens, 0)
    parts = [cross_entropy(model, batches.at(k), "sum") for k in range(len(batches.edges) - 1)]
    return float(torch.stack(parts).double().sum()) / sum(len(p.reference) for p in pairs)


def train_images(
    images: np.ndarray,
    unnamed: int,
    out: Path,
    config: ImageGPTConfig,
    recipe: TrainingRecipe,
    report: Report,
) -> dict[str, Any]:
    """Train as `train_lm` does, on `images [N, 1 + pixels]`, tokens: what each begins with, and its
    pixels. One in sixteen is held out. `unnamed`: what one in ten begins with instead, so that
    images can be guided."""
    make_run_folder(out)
    parts = corpus.hold_out(list(images.astype(np.int64)))
    train, held_out = (torch.from_numpy(np.stack(part)) for part in parts)
    torch.manual_seed(recipe.seed)
    model = ImageGPTForCausalImageModeling(config)
    loop = TrainingLoop(out, model, recipe)

    def loss_at(step: int) -> Tensor:
        model.train()
        torch.manual_seed(hash((recipe.seed, step)))  # images and what drops out
        batch = train[torch.randint(len(train), (recipe.batch,))]
        batch[:, 0] = torch.where(torch.rand(len(batch)) < UNNAMED, unnamed, batch[:, 0])
        return pixel_loss(model, batch)

    def exam() -> float:
        model.eval()
        with torch.inference_mode():
            return float(pixel_loss(model, held_out))

    rounded = _trained(loop, model, None, loss_at, exam, report)
    with torch.inference_mode():
        nats = float(pixel_loss(rounded.eval(), held_out))
    return loop.summarize(
        best_step=loop.best["step"],
        images=len(train),
        held_out_images=len(held_out),
        held_out_nats_per_token=nats,
    )


def pixel_loss(model: ImageGPTForCausalImageModeling, images: Tensor) -> Tensor:
    """Return the mean cross-entropy of pixels, in nats; images `[N, 1 + pixels]`."""
    logits = model(input_ids=images[:, :-1], use_cache=False).logits
    return functional.cross_entropy(logits.flatten(0, 1).float(), images[:, 1:].flatten())


def _pairs(data: Path) -> list[ExampleLine]:
    lines = corpus.read_lines(data)
    for number, line in lines.items():
        if not line.target:
            raise InputError(f"{data}, line {number}: there is no target; give source and target")
    return list(lines.values())
