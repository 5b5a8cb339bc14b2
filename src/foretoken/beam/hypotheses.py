"""Beam search as bookkeeping: beams, what continues them, which are finished, and when to stop.

The definitions are those of transformers' beam search, so that scores and order are the same. Pure
functions of logits: knows no models, no drafts and no caches.
"""
# torch leaves the type of tolist() open
# pyright: reportUnknownMemberType=false

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, cast

import torch
from torch import Tensor
from torch.nn import functional

from foretoken.beam.tree import Node
from foretoken.errors import DeadEndError, InputError, NumericsError, as_float, shown, whole
from foretoken.request import FinishReason, Request
from foretoken.sampling.draw import Shaping

STEEPEST = 50  # a length penalty: at it, powers of a million tokens are still float64


@dataclass(frozen=True, slots=True)
class BeamParams:
    """What is looked for: the best texts under score / new tokens ** length_penalty.

    A text's end counts as a token. `early_stopping` True ends as soon as num_beams texts have
    ended; False as soon as the best beam could not enter them at its present length; "never" asks
    that at the longest length that is allowed, for a positive length penalty.
    """

    num_beams: int = 4
    num_return_sequences: int = 1
    length_penalty: float = 1.0
    early_stopping: bool | Literal["never"] = False

    def __post_init__(self) -> None:
        for name in ("num_beams", "num_return_sequences"):
            value = getattr(self, name)
            if not whole(value) or value < 1:
                raise InputError(f"{name} is {shown(value)}; give a whole number from 1")
            object.__setattr__(self, name, int(value))  # NumPy's overflow
        if self.num_return_sequences > self.num_beams:
            raise InputError(
                f"num_return_sequences is {shown(self.num_return_sequences)}, but there are only "
                f"{shown(self.num_beams)} beams; give num_beams={shown(self.num_return_sequences)}"
            )
        penalty = as_float(self.length_penalty)
        if not -STEEPEST <= penalty <= STEEPEST:
            raise InputError(
                f"length_penalty is {shown(self.length_penalty)}; give a number from -{STEEPEST} "
                f"to {STEEPEST}"
            )
        object.__setattr__(self, "length_penalty", penalty)
        if not (isinstance(self.early_stopping, bool) or self.early_stopping == "never"):
            raise InputError(
                f"early_stopping is {self.early_stopping!r:.60}; give True, False or 'never'"
            )


@dataclass(frozen=True, slots=True)
class Hypothesis:
    """A text and its score: the sum of the log-probabilities of its new tokens."""

    node: Node
    score: float


@dataclass(frozen=True, slots=True)
class Finished:
    """A text that has ended, and its score with the length penalty."""

    node: Node
    score: float
    reason: FinishReason


def continuations(
    beams: list[Hypothesis], logits: Tensor, k: int, controls: Shaping | None = None
) -> list[Hypothesis]:
    """The k best texts that are one token longer than one of `beams`, best first.

    logits: `[len(beams), V]`. Of equal scores the earlier beam's comes first, then the lower id.
    Fewer than k where fewer are possible. Controls shape the log-probabilities, as in transformers.
    """
    past = torch.tensor([beam.score for beam in beams], dtype=torch.float64, device=logits.device)
    log_p = logits.double().log_softmax(-1)
    scores = (_shaped(log_p, beams, controls) + past[:, None]).flatten()
    edge = scores.topk(min(k, len(scores))).values[-1]
    at = ((scores >= edge) & (scores > -torch.inf)).nonzero()[:, 0]
    at = at[scores[at].argsort(descending=True, stable=True)[:k]]
    best = zip(cast(list[int], at.tolist()), cast(list[float], scores[at].tolist()), strict=True)
    V = len(scores) // len(beams)
    return [Hypothesis(beams[i // V].node.child(i % V), score) for i, score in best]


def _shaped(scores: Tensor, beams: list[Hypothesis], controls: Shaping | None) -> Tensor:
    """Each beam's scores `[V]` behind its own text; a beam whose controls leave nothing ends."""
    if controls is None:
        return scores
    scores = functional.pad(scores, (0, controls.V - scores.shape[-1]), value=-torch.inf)
    for row, beam in zip(scores, beams, strict=True):
        try:
            row.copy_(controls.shape(row, beam.node.new_tokens))
        except DeadEndError:
            row.fill_(-torch.inf)
    return scores


@dataclass(slots=True)
class Search:
    """One prompt's beam search on its way; a step looks at one token more."""

    request: Request
    params: BeamParams
    controls: Shaping | None = None
    running: list[Hypothesis] = field(init=False)  # best first
    finished: list[Finished] = field(default_factory=list[Finished], init=False)  # best first
    done: bool = field(default=False, init=False)

    def __post_init__(self) -> None:
        self.running = [Hypothesis(Node(self.request.prompt[-1]), 0.0)]

    @property
    def depth(self) -> int:
        """New tokens of the running beams."""
        return self.running[0].node.depth

    def step(self, logits: Tensor) -> None:
        """One step of plain beam search, from the target's logits at the running beams
        `[len(running), V]`."""
        if bool(logits.amax(-1).isfinite().logical_not().any()):
            raise NumericsError(
                f"the target's logits are invalid after {self.depth} new tokens of a beam; "
                "try dtype='float32', and look for overflow in the model"
            )
        w, eos, length = self.params.num_beams, self.request.eos, self.depth + 1
        # every beam has at most len(eos) texts that end, so w of these go on
        longer = continuations(self.running, logits, w * (1 + len(eos)), self.controls)
        last = length == self.request.limit
        open_ = [beam for beam in longer if not last and beam.node.token not in eos]
        complete = [beam for beam in longer[:w] if last or beam.node.token in eos]
        self._finish(complete, length)
        self.running = open_[:w] or self.running
        self.done = not open_ or (len(self.finished) == w and self._settled(length))

    def _finish(self, complete: list[Hypothesis], length: int) -> None:
        shrink = length**self.params.length_penalty
        for beam in complete:
            reason: FinishReason = "stop" if beam.node.token in self.request.eos else "length"
            self.finished.append(Finished(beam.node, beam.score / shrink, reason))
        self.finished.sort(key=lambda text: -text.score)
        del self.finished[self.params.num_beams :]

    def _settled(self, length: int) -> bool:
        """Whether the texts that have ended are the result, all num_beams of them being there."""
        if self.params.early_stopping is True:
            return True
        penalty = self.params.length_penalty
        if self.params.early_stopping == "never" and penalty > 0:
            length = self.request.limit
        return self.running[0].score / length**penalty <= self.finished[-1].score
