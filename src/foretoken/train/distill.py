"""Distillation: train a draft on its target's distribution, so that more of its draft tokens are
accepted (`foretoken train distill`).

Both distributions are compared at every position of sequences from the data, the target or the
draft itself (see `pair`), at the temperature of later use, by one of six losses (paper, section
3.6: custom-made approximation models). The weights with the best alpha on held-out prompts and
outputs of the target are saved (DistillSpec, arXiv 2310.08461).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from math import log, nan
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from foretoken.errors import InputError, NumericsError
from foretoken.measurement.agreement import compute_overlaps
from foretoken.request import Request
from foretoken.sampling.distributions import SamplingParams
from foretoken.train.corpus import Examples
from foretoken.train.loop import TrainingLoop, make_run_folder
from foretoken.train.pair import (
    BatchSource,
    Pair,
    TrainingSequence,
    compute_fingerprint,
    compute_new_token_logits,
)
from foretoken.train.recipe import TrainingRecipe, require_positive, require_share

MIN_LOG_PROB = -100.0  # in place of log 0: the loss of an impossible token stays finite


def compute_log_probs(logits: Tensor, temperature: float) -> Tensor:
    """Return log softmax(logits / temperature), at least MIN_LOG_PROB.

    A logit of -inf, an impossible token, gets no gradient. The temperature must be above 0.
    """
    scores = logits if logits.dtype == torch.float64 else logits.float()
    return (scores / temperature).log_softmax(-1).clamp(min=MIN_LOG_PROB)


def forward_kl(p: Tensor, q: Tensor) -> Tensor:
    """Return KL(p, q) = sum p log(p / q), which covers all of the target's support (Hinton et al.,
    arXiv 1503.02531). All losses take the log probabilities of target and draft, `[N, V]`, and
    return `[N]`."""
    return (p.exp() * (p - q)).sum(-1)


def reverse_kl(p: Tensor, q: Tensor) -> Tensor:
    """Return KL(q, p) = sum q log(q / p), which seeks the target's modes (Gu et al., arXiv
    2306.08543)."""
    return forward_kl(q, p)


def jensen_shannon(p: Tensor, q: Tensor) -> Tensor:
    """Return (KL(p, m) + KL(q, m)) / 2 with m = (p + q) / 2, symmetric and at most log 2 (Agarwal
    et al., arXiv 2306.13649)."""
    m = torch.logaddexp(p, q) - log(2)
    return (forward_kl(p, m) + forward_kl(q, m)) / 2


def total_variation(p: Tensor, q: Tensor) -> Tensor:
    """Return 1 - alpha = 1 - sum min(p, q), the rejected fraction (paper, Theorem 3.5).

    Its gradient in q's logits is -q_j (1[q_j < p_j] - sum_{i: q_i < p_i} q_i). The gradient
    vanishes if the distributions hardly overlap, so an untrained draft learns nothing.
    """
    return 1 - torch.minimum(p, q).exp().sum(-1)


def log_alpha(p: Tensor, q: Tensor) -> Tensor:
    """Return -log alpha. Its gradient is the gradient of total variation divided by alpha, and does
    not vanish."""
    return -torch.minimum(p, q).logsumexp(-1)


def lk(p: Tensor, q: Tensor) -> Tensor:
    """Return lambda KL(p, q) + (1 - lambda) (1 - alpha), with lambda = exp(-3 alpha) held constant:
    forward KL while the distributions differ, total variation once they are close (arXiv
    2602.23881)."""
    rejected = total_variation(p, q)
    weight = torch.exp(-3 * (1 - rejected.detach()))
    return weight * forward_kl(p, q) + (1 - weight) * rejected


LOSSES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "kl": forward_kl,
    "rkl": reverse_kl,
    "jsd": jensen_shannon,
    "tv": total_variation,
    "nla": log_alpha,
    "lk": lk,
}


# step, training loss, alpha if measured, the best alpha so far
DistillationProgress = Callable[[int, float, float | None, float], None]


@dataclass(frozen=True, slots=True)
class Distillation:
    """Settings of a distillation: the loss, the sequences on which it is computed, and how alpha is
    measured.

    At temperature 0, sequences are greedy and alpha is the fraction of positions with the same
    argmax. A one-hot distribution has no gradient, so the loss then compares the distributions at
    temperature 1.
    """

    loss: str = "lk"
    temperature: float = 1.0
    on_policy: float = 0.0  # fraction of sequences that the draft generates
    target_generated: float = 0.0  # fraction that the target generates; the rest is from the data
    length: int = 128  # new tokens of a sequence
    held_out: int = 32  # prompts on which alpha is measured

    def __post_init__(self) -> None:
        if self.loss not in LOSSES:
            raise InputError(f"loss is {self.loss!r}; give one of {', '.join(LOSSES)}")
        SamplingParams(self.temperature)
        for name in ("length", "held_out"):
            require_positive(name, getattr(self, name))
        for name in ("on_policy", "target_generated"):
            require_share(name, getattr(self, name))
        if self.on_policy + self.target_generated > 1:
            raise InputError(
                f"on_policy + target_generated is {self.on_policy + self.target_generated}; "
                "give shares that add up to 1 or less"
            )

    @property
    def loss_temperature(self) -> float:
        """The temperature of the distributions in the loss."""
        return 1.0 if SamplingParams(self.temperature).greedy else self.temperature


def distill(
    pair: Pair,
    examples: Examples,
    out: Path,
    lesson: Distillation,
    recipe: TrainingRecipe,
    report: DistillationProgress,
) -> dict[str, Any]:
    """Train the draft until step `recipe.steps`, then write the weights with the best held-out
    alpha, possibly the initial weights, to `out/model`. Returns the summary.

    If `out` holds a checkpoint, the run resumes from it and gives the result of an uninterrupted
    run. Raises InputError if the examples do not fit the models, the run diverges, or the
    checkpoint belongs to another run.
    """
    shares = {"on_policy": lesson.on_policy, "target_generated": lesson.target_generated}
    source = BatchSource(pair, lesson.temperature, lesson.length, **shares)
    _require_context_length(pair, source.make_requests([*examples.train, *examples.held_out]))
    models = {name: compute_fingerprint(getattr(pair, name)) for name in ("target", "draft")}
    settings = asdict(lesson) | models | {"data": examples.digest}
    loop = TrainingLoop(make_run_folder(out), pair.draft, recipe, settings)
    held_out = source.generate_held_out(examples.held_out, lesson.held_out, recipe.seed)
    if not loop.saved_values:
        before = measure_alpha(pair, held_out, lesson.temperature)
        loop.saved_values["before"] = before
        loop.record_score(before)
        report(0, 0.0, before, before)

    def loss_at(step: int) -> Tensor:
        sequences = source.make_batch(examples.train, recipe.batch, recipe.seed, step)
        return _compute_loss(pair, sequences, lesson)

    try:
        for loss in loop.run_steps(loss_at):
            measured = measure_alpha(pair, held_out, lesson.temperature) if loop.is_due else None
            if measured is not None:
                loop.record_score(measured)
                loop.save(loss=loss, alpha=measured)
            report(loop.step, loss, measured, loop.best["score"])
    except NumericsError:  # in the draft: the target has already generated the held-out outputs
        loop.require_finite(logits=nan)
        raise
    return _export(loop, pair, lesson)


def measure_alpha(pair: Pair, sequences: list[TrainingSequence], temperature: float) -> float:
    """Return the mean of sum min(p, q) over all positions of the sequences (Corollary 3.6, C57); at
    temperature 0 this is the fraction of positions with the same argmax. Positions without a draft
    token count as 0."""
    target, drafter = pair.target_spec.target, pair.target_spec.drafter
    params = SamplingParams(temperature)
    overlaps_by_sequence = [
        compute_overlaps(target, drafter, t.request, t.new_tokens, params) for t in sequences
    ]
    return fmean(beta or 0.0 for overlaps in overlaps_by_sequence for beta in overlaps)


def _compute_loss(pair: Pair, sequences: list[TrainingSequence], lesson: Distillation) -> Tensor:
    with torch.no_grad():
        p = compute_log_probs(
            compute_new_token_logits(pair.target, sequences), lesson.loss_temperature
        )
    scores = compute_new_token_logits(pair.draft, sequences)
    padding = p.shape[-1] - scores.shape[-1]  # output rows of no token, which the draft may lack
    q = compute_log_probs(
        functional.pad(scores, (0, padding), value=-torch.inf), lesson.loss_temperature
    )
    return LOSSES[lesson.loss](p, q).mean()


def _require_context_length(pair: Pair, requests: list[Request]) -> None:
    """Raise InputError, before training, for a sequence that exceeds the draft's context."""
    draft = pair.draft_spec.target
    max_tokens = max(len(r.prompt) + r.limit for r in requests)
    max_source_tokens = max(len(r.source or ()) for r in requests)
    for count, limit in ((max_tokens, draft.context), (max_source_tokens, draft.source_context)):
        if limit is not None and count > limit:
            raise InputError(
                f"a sequence has {count} tokens, but the draft's limit is {limit}; "
                "give a smaller length, shorter prompts, or a draft with a longer context"
            )


def _export(loop: TrainingLoop, pair: Pair, lesson: Distillation) -> dict[str, Any]:
    """Write the best draft in float32, as it was measured, with the target's tokenizer."""
    pair.draft.load_state_dict(loop.best["weights"])
    loop.export(pair.draft, pair.target_spec.tokenizer)
    return loop.summarize(
        loss=lesson.loss,
        temperature=lesson.temperature,
        loss_temperature=lesson.loss_temperature,
        alpha_before=loop.saved_values["before"],
        alpha=loop.best["score"],
        best_step=loop.best["step"],
    )
