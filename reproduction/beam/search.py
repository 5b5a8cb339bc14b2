"""Plain beam search of one prompt: beams, what continues them, which are finished, when to stop.

Its definitions are those of transformers, so that scores and order are the same.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, cast

import torch
from torch import Tensor
from torch.nn import functional

from foretoken.errors import ControlError, InputError, NumericsError, format_value
from foretoken.request import Request
from foretoken.sampling.checks import Number
from foretoken.sampling.draw import LogitShaper
from foretoken.sampling.params import COUNT_FROM_ONE
from reproduction.beam.tree import Node

# torch leaves the type of tolist() open
# pyright: reportUnknownMemberType=false

CHECKS = {
    "num_beams": COUNT_FROM_ONE,
    "num_return_sequences": COUNT_FROM_ONE,
    # at 50, powers of a million tokens are still float64
    "length_penalty": Number(ge=-50, le=50, remedy="a number from -50 to 50"),
}


@dataclass(frozen=True, slots=True)
class BeamParams:
    """Parameters of a search for the best texts by score / new tokens ** length_penalty.

    A text's end counts as a token. With `early_stopping` True, the search ends as soon as num_beams
    texts have ended; False, as soon as the best beam could not replace one of them at its present
    length; "never", the same at the longest length that is allowed, if the length penalty is
    positive.
    """

    num_beams: int = 4
    num_return_sequences: int = 1
    length_penalty: float = 1.0
    early_stopping: bool | Literal["never"] = False

    def __post_init__(self) -> None:
        for name, check in CHECKS.items():
            object.__setattr__(self, name, check(name, getattr(self, name)))
        if self.num_return_sequences > self.num_beams:
            raise InputError(
                f"num_return_sequences is {format_value(self.num_return_sequences)}, but there "
                "are only "
                f"{format_value(self.num_beams)} beams; give "
                f"num_beams={format_value(self.num_return_sequences)}"
            )
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
    reason: Literal["stop", "length"]


def continuations(
    beams: list[Hypothesis], logits: Tensor, k: int, controls: LogitShaper | None = None
) -> list[Hypothesis]:
    """Return the k best texts that are one token longer than one of `beams`, best first.

    Among equal scores the earlier beam's comes first, then the lower id. Fewer than k where fewer
    are possible. Controls shape the log-probabilities, as in transformers.

    Args:
        beams: The texts to continue.
        logits: The logits after each of them, `[len(beams), V]`.
        k: How many to return.
        controls: The request's controls, or None.
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


def _shaped(scores: Tensor, beams: list[Hypothesis], controls: LogitShaper | None) -> Tensor:
    """Each beam's scores `[V]` as its controls leave them; a beam with no token left ends."""
    if controls is None:
        return scores
    scores = functional.pad(scores, (0, controls.V - scores.shape[-1]), value=-torch.inf)
    for row, beam in zip(scores, beams, strict=True):
        try:
            row.copy_(controls.shape(row, beam.node.new_tokens))
        except ControlError:
            row.fill_(-torch.inf)
    return scores


@dataclass(slots=True)
class Search:
    """The beam search of one prompt; a step adds one token to every beam."""

    request: Request
    params: BeamParams
    controls: LogitShaper | None = None
    running: list[Hypothesis] = field(default_factory=lambda: [Hypothesis(Node(), 0.0)])
    finished: list[Finished] = field(default_factory=list[Finished])  # best first, as `running`
    done: bool = False

    @property
    def depth(self) -> int:
        """New tokens of the running beams."""
        return self.running[0].node.depth

    @property
    def nodes(self) -> list[Node]:
        """The texts of the running beams."""
        return [beam.node for beam in self.running]

    def step(self, logits: Tensor) -> None:
        """Make one step, from the target's logits after the running beams `[len(running), V]`."""
        if bool(logits.amax(-1).isfinite().logical_not().any()):
            raise NumericsError(
                f"the target's logits are invalid after {self.depth} new tokens of a beam; "
                "try dtype='float32', and look for overflow in the model"
            )
        w, eos, length = self.params.num_beams, self.request.eos, self.depth + 1
        # every beam has at most len(eos) continuations that end, so w of these go on
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
            reason = "stop" if beam.node.token in self.request.eos else "length"
            self.finished.append(Finished(beam.node, beam.score / shrink, reason))
        self.finished.sort(key=lambda text: -text.score)
        del self.finished[self.params.num_beams :]

    def _settled(self, length: int) -> bool:
        """Tell whether the num_beams texts that have ended are the result."""
        if self.params.early_stopping is True:
            return True
        penalty = self.params.length_penalty
        if self.params.early_stopping == "never" and penalty > 0:
            length = self.request.limit
        return self.running[0].score / length**penalty <= self.finished[-1].score
