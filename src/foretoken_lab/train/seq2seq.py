"""Train an encoder-decoder on pairs of texts: `foretoken-lab train seq2seq`.

T5 with the gated GELU of version 1.1 (Raffel et al., arXiv 1910.10683; Shazeer, arXiv 2002.05202).
Its output layer is the embedding: transformers ties T5's. A batch holds pairs of like lengths and
depends on the seed and the step alone, so a run that was killed resumes with the same data.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional
from transformers import PreTrainedTokenizerFast, T5Config, T5ForConditionalGeneration

from foretoken.errors import InputError
from foretoken.loading import sources
from foretoken.models.rows import padded
from foretoken.train import corpus
from foretoken.train.corpus import Example, ExampleLine
from foretoken.train.loop import Loop, TrainingRecipe, folder_of_run, require_positive

GRAIN = 8  # lengths count as if rounded up to this many tokens, so that pairs in a batch change
EXAM = 512  # held-out pairs that are measured while training; all are at the end
IGNORED = -100  # in the place of a label: padding
IN_FULL = torch.float32, torch.device("cpu")

# step, training loss, held-out loss where measured
Report = Callable[[int, float, float | None], None]


@dataclass(frozen=True, slots=True)
class Seq2SeqShape:
    """The model's size."""

    encoder_layers: int = 3
    decoder_layers: int = 4
    hidden: int = 192
    feed_forward: int = 480
    heads: int = 4
    vocab_size: int = 4096  # of a new tokenizer

    def __post_init__(self) -> None:
        for name in self.__slots__:
            require_positive(name, getattr(self, name))
        if self.hidden % self.heads:
            raise InputError(f"hidden is {self.hidden}; give a multiple of heads, {self.heads}")


@dataclass(frozen=True, slots=True)
class PairLesson:
    """The lesson of a pair."""

    length: int = 128  # tokens of a target at most: the rest is cut
    dropout: float = 0.0

    def __post_init__(self) -> None:
        require_positive("length", self.length)
        if not 0 <= self.dropout < 1:
            raise InputError(f"dropout is {self.dropout}; give a share in [0, 1)")


def train_seq2seq(
    data: Path,
    out: Path,
    shape: Seq2SeqShape,
    lesson: PairLesson,
    recipe: TrainingRecipe,
    tokenizer_folder: Path | None,
    init: Path | None,
    report: Report,
) -> dict[str, Any]:
    """Train until `recipe.steps`, or until the held-out loss stops falling (`recipe.patience`);
    then write the model with the lowest one in transformers' layout to `out/model`, and return
    the summary.

    `data`: a .tsv or .jsonl file of pairs, one in sixteen held out. `recipe.batch`: tokens of a
    step, sources, targets and padding. `tokenizer_folder`: its tokenizer is used instead of a new
    one. `init`: a folder whose weights (and tokenizer, if no other is given) are the start. A
    checkpoint in `out` is resumed. Raises InputError for what cannot be read or learnt.
    """
    lines = _pairs(data)
    folder_of_run(out)
    folder = tokenizer_folder or init
    tokenizer = corpus.tokenizer_of_run(out, folder, lambda: _fresh_tokenizer(lines, shape))
    _require_ends(tokenizer, folder or out)
    lessons = corpus.read(data, tokenizer, lesson.length, encoder_decoder=True)
    model = _model(init, shape, lesson, recipe, tokenizer)
    loop = Loop(out, model, recipe, asdict(lesson) | {"data": lessons.digest})
    batches = Batches(lessons.train, recipe.batch, recipe.seed)
    exam = lessons.held_out[:: max(1, len(lessons.held_out) // EXAM)][:EXAM]

    def loss_at(step: int) -> Tensor:
        model.train()
        torch.manual_seed(hash((recipe.seed, step)))  # what drops out depends on these alone
        return cross_entropy(model, batches.at(step), "mean")

    for loss in loop.losses(loss_at):
        measured = None
        if loop.due:
            measured = held_out_loss(model, exam, recipe.batch)
            loop.rank(-measured)
            loop.save(loss=loss, held_out=measured)
        report(loop.step, loss, measured)
    return _export(loop, model, tokenizer, lessons.held_out, len(batches.edges) - 1)


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
    ids = padded(sources, device)
    logits = model(
        input_ids=ids,
        attention_mask=_within(sources, ids).long(),
        decoder_input_ids=padded([[start, *target[:-1]] for target in targets], device),
        use_cache=False,
    ).logits
    labels = padded(targets, device)
    labels = labels.masked_fill(~_within(targets, labels), IGNORED)
    return functional.cross_entropy(
        logits.flatten(0, 1).float(), labels.flatten(), ignore_index=IGNORED, reduction=reduction
    )


def _within(rows: list[list[int]], ids: Tensor) -> Tensor:
    """Which of the padded ids are a row's own, `[B, T]`."""
    lengths = torch.tensor([len(row) for row in rows], device=ids.device)
    return torch.arange(ids.shape[1], device=ids.device) < lengths[:, None]


@torch.inference_mode()
def held_out_loss(model: T5ForConditionalGeneration, pairs: list[Example], tokens: int) -> float:
    """Nats per token of the targets, in float32, in batches of up to so many tokens."""
    model.eval()
    batches = Batches(pairs, tokens, 0)
    parts = [cross_entropy(model, batches.at(k), "sum") for k in range(len(batches.edges) - 1)]
    return float(torch.stack(parts).double().sum()) / sum(len(p.reference) for p in pairs)


def _pairs(data: Path) -> list[ExampleLine]:
    lines = corpus.lines(data)
    for number, line in lines.items():
        if not line.target:
            raise InputError(f"{data}, line {number}: there is no target; give source and target")
    return list(lines.values())


def _fresh_tokenizer(lines: list[ExampleLine], shape: Seq2SeqShape) -> PreTrainedTokenizerFast:
    train, _ = corpus.hold_out(lines)
    texts = [text for line in train for text in (line.source, line.target or "")]
    return corpus.train_pair_tokenizer(texts, shape.vocab_size)


def _require_ends(tokenizer: PreTrainedTokenizerFast, folder: Path) -> None:
    """InputError for a tokenizer that ends no text, or pads none."""
    if tokenizer.pad_token_id is None or tokenizer("a").input_ids[-1] != tokenizer.eos_token_id:
        raise InputError(
            f"the tokenizer in {folder} has no padding or puts no end behind a text; give that of "
            "an encoder-decoder, or none"
        )


def _model(
    init: Path | None,
    shape: Seq2SeqShape,
    lesson: PairLesson,
    recipe: TrainingRecipe,
    tokenizer: PreTrainedTokenizerFast,
) -> T5ForConditionalGeneration:
    torch.manual_seed(recipe.seed)
    ids = max(tokenizer.get_vocab().values()) + 1
    if init is None:
        return T5ForConditionalGeneration(_config(shape, lesson, ids, tokenizer))
    start = sources.source(init, None, False)
    if start.config.model_type != "t5":
        raise InputError(f"{init} is a {start.config.model_type} model; give one of T5's kind")
    options = start.options | {"dropout_rate": lesson.dropout}
    model = cast(T5ForConditionalGeneration, replace(start, options=options).network(*IN_FULL))
    rows = model.config.vocab_size
    if rows < ids:
        raise InputError(f"{init} has {rows} rows for {ids} tokens; leave --tokenizer out")
    return model


def _config(
    shape: Seq2SeqShape, lesson: PairLesson, vocab_size: int, tokenizer: PreTrainedTokenizerFast
) -> T5Config:
    start: dict[str, Any] = {"decoder_start_token_id": tokenizer.pad_token_id}
    return T5Config(
        vocab_size=vocab_size,
        d_model=shape.hidden,
        d_kv=shape.hidden // shape.heads,
        d_ff=shape.feed_forward,
        num_layers=shape.encoder_layers,
        num_decoder_layers=shape.decoder_layers,
        num_heads=shape.heads,
        feed_forward_proj="gated-gelu",
        dropout_rate=lesson.dropout,
        pad_token_id=cast(int, tokenizer.pad_token_id),
        eos_token_id=cast(int, tokenizer.eos_token_id),
        **start,
    )


def _export(
    loop: Loop,
    model: T5ForConditionalGeneration,
    tokenizer: PreTrainedTokenizerFast,
    held_out: list[Example],
    per_epoch: int,
) -> dict[str, Any]:
    """The best model in bfloat16 with its tokenizer, and what was measured."""
    model.load_state_dict(loop.best["weights"])
    rounded = copy.deepcopy(model).bfloat16()
    loop.export(rounded, tokenizer)
    nats = held_out_loss(rounded.float(), held_out, loop.recipe.batch)  # of the weights as written
    return loop.summarize(
        best_step=loop.best["step"],
        epochs=loop.step / per_epoch,
        held_out_pairs=len(held_out),
        held_out_nats_per_token=nats,
    )
