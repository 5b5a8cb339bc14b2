"""Train blockwise heads on a frozen target: `python -m reproduction train heads`.

Self-distillation: head k learns the target's own distribution k places ahead (soft labels, forward
KL), along texts of the data or of the target. The head has not read the tokens in between, so it
learns the mean of that distribution over them.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from foretoken.errors import InputError
from foretoken.loading.load import load
from foretoken.models.row_slots import pad_blocks
from foretoken.train import corpus
from foretoken.train.corpus import Example, Examples
from foretoken.train.loop import TrainingLoop, make_run_folder
from foretoken.train.pair import BatchSource, Pair, TrainingSequence, compute_logits
from foretoken.train.recipe import TrainingRecipe, require_positive, require_share
from reproduction.blockwise import Heads, ends_of

HELD_OUT = 32  # prompts that heads are measured on


# step, loss, and each head's alpha where it is measured
Report = Callable[[int, float, list[float] | None], None]


@dataclass(frozen=True, slots=True)
class Teacher:
    """A frozen target, and the texts on which heads learn its distributions."""

    network: PreTrainedModel
    texts: Examples
    authors: BatchSource

    @classmethod
    def of(
        cls,
        network: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase | None,
        data: Path,
        length: int,
        target_generated: float,
        generation_config: str | None = None,
    ) -> Teacher:
        """A target in memory, and texts in `data`. `target_generated`: the share of texts that it
        writes itself. `generation_config` is that of `foretoken.load`."""
        require_positive("length", length)
        require_share("target_generated", target_generated)
        if tokenizer is None:
            raise InputError("the target has no tokenizer, so text has no ids; give one with it")
        network.eval().requires_grad_(False)
        spec = load(network, "none", tokenizer=tokenizer, generation_config=generation_config)
        # its texts follow its own distribution, at temperature 1
        spec = replace(spec, suggested={})
        encoder_decoder = spec.target.encoder_decoder
        texts = corpus.read_examples(data, tokenizer, length, encoder_decoder=encoder_decoder)
        pair = Pair(network, network, spec, spec)  # without a draft that could write
        return cls(
            network, texts, BatchSource(pair, 1.0, length, target_generated=target_generated)
        )


def train_heads(
    teacher: Teacher, out: Path, count: int, recipe: TrainingRecipe, report: Report
) -> dict[str, Any]:
    """Train `count` heads until `recipe.steps` and write them to `out`; returns the summary.

    They are trained in the target's dtype. The folder `out`.run holds checkpoint and log, and is
    resumed with the result of an unbroken run. Raises InputError where it is another run's, and
    where no text is long enough for the last head.
    """
    require_positive("heads", count)
    if out.is_dir():
        raise InputError(f"{out} is a folder; give another --out, for a file")
    _require_texts(teacher, count)
    folder = make_run_folder(out.with_name(f"{out.name}.run"))
    target, authors, texts = teacher.network, teacher.authors, teacher.texts
    heads = Heads.fresh(target, count, recipe.seed).to(target.device, target.dtype)
    exam = authors.generate_held_out(texts.held_out, HELD_OUT, recipe.seed)
    loop = TrainingLoop(folder, heads, recipe, _settings(heads, teacher))

    def loss_at(step: int) -> Tensor:
        return distance(
            heads, target, authors.make_batch(texts.train, recipe.batch, recipe.seed, step)
        )

    measured = None
    for loss in loop.run_steps(loss_at):
        measured = measure(heads, target, exam, recipe.batch) if loop.is_due else None
        if measured:
            loop.save(loss=loss, **{f"alpha_{k}": x for k, x in enumerate(measured, 1)})
        report(loop.step, loss, measured)
    measured = measured or measure(heads, target, exam, recipe.batch)
    heads.float().save(out)
    return {
        "heads": count,
        "parameters": sum(weight.numel() for weight in heads.parameters()),
        "steps": loop.step,
        "alpha": measured,
        "seconds": loop.seconds,
    }


def _require_texts(teacher: Teacher, count: int) -> None:
    """InputError, before the work, for heads that reach beyond the end of every text."""
    reach = _longest(teacher.authors, teacher.texts.train) - 1  # no head guesses the first token
    if reach < count:
        raise InputError(
            f"heads is {count}, but with length {teacher.authors.length} the texts teach "
            f"{reach} at most; give no more, a larger length or longer texts"
        )


def _longest(authors: BatchSource, examples: Sequence[Example]) -> int:
    """The most tokens that a text may have, the decoder's prompt included."""
    sampled = authors.target_generated > 0  # such texts may reach the limit
    return max(
        len(r.prompt) + (r.limit if sampled else min(r.limit, len(e.reference) or r.limit))
        for e, r in zip(examples, authors.make_requests(examples), strict=True)
    )


def _settings(heads: Heads, teacher: Teacher) -> dict[str, Any]:
    """Return the settings that a resumed run must share with the one that was begun."""
    return {
        "heads": heads.count,
        "target": hashlib.sha256(heads.sketch.numpy().tobytes()).hexdigest()[:12],
        "data": teacher.texts.digest,
        "length": teacher.authors.length,
        "target_generated": teacher.authors.target_generated,
    }


def distance(heads: Heads, target: PreTrainedModel, texts: list[TrainingSequence]) -> Tensor:
    """Mean cross-entropy of the heads' distributions against the target's, in nats per draft
    token."""
    losses = [
        functional.cross_entropy(student, teacher.softmax(-1), reduction="sum")
        / max(1, len(teacher))  # texts may be too short for a head
        for teacher, student in distributions(heads, target, texts)
    ]
    return torch.stack(losses).mean()


@torch.no_grad()
def measure(
    heads: Heads, target: PreTrainedModel, texts: list[TrainingSequence], batch: int
) -> list[float]:
    """Return alpha of each head, the mean of sum min(p, q) (Corollary 3.6), on `texts`, `batch` of
    them at a time."""
    alpha, places = [0.0] * heads.count, [0] * heads.count
    for at in range(0, len(texts), batch):
        some = distributions(heads, target, texts[at : at + batch])
        for k, (teacher, student) in enumerate(some):
            alpha[k] += float(torch.minimum(teacher.softmax(-1), student.softmax(-1)).sum())
            places[k] += len(teacher)
    return [total / max(1, n) for total, n in zip(alpha, places, strict=True)]


def distributions(
    heads: Heads, target: PreTrainedModel, texts: list[TrainingSequence]
) -> Iterator[tuple[Tensor, Tensor]]:
    """For each head the target's logits and its own for the same tokens, `[N, V]` each.

    At place i the target has read token i, and token i + 1 was chosen: head k (from 1) learns the
    target's distribution at place i + k.
    """
    rows = [[*text.request.prompt, *text.new_tokens] for text in texts]
    ids = pad_blocks(rows, target.device)
    hidden, logits = along(target, ids, texts)
    output, embeddings = ends_of(target)
    lengths = torch.tensor([len(row) for row in rows], device=target.device)
    within = torch.arange(ids.shape[1], device=target.device) < lengths[:, None]
    for k in range(1, heads.count + 1):
        real = within[:, k:]  # places i + k inside the row's own text
        embedded = embeddings(ids[:, 1:][:, : real.shape[1]][real])
        states = heads(hidden[:, : real.shape[1]][real], embedded, k - 1, k).squeeze(1)
        yield logits[:, k:][real], output(states)


@torch.no_grad()
def along(
    target: PreTrainedModel, ids: Tensor, texts: list[TrainingSequence]
) -> tuple[Tensor, Tensor]:
    """The output layer's input `[B, T, H]` and the logits `[B, T, V]` along the texts."""
    read: list[Tensor] = []
    output, _ = ends_of(target)
    hook = output.register_forward_pre_hook(lambda _, args: read.append(args[0]))
    try:
        logits = compute_logits(target, texts, ids)
    finally:
        hook.remove()
    return read[-1], logits
