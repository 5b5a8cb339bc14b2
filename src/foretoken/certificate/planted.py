"""Bugs to plant in a pair: a certificate that does not find each of them is void."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from foretoken.drafters.base import Draft, Drafter, DrafterBase
from foretoken.models.base import Blocks, Model
from foretoken.sampling.draw import Draw
from foretoken.sampling.verify import Outcome, Rule


class NextRow(Outcome):
    """The next token comes from the distribution one position too far on, behind a draft token not
    kept."""

    def next_distribution(self, n: Tensor) -> Tensor:
        rows = torch.arange(len(n), device=n.device)
        return self.p[rows, (n + 1) % (self.lengths + 1)]


def next_row(rule: Rule) -> Rule:
    """Return `rule` with replacements from the wrong position."""

    def broken(p: Tensor, q: Tensor | None, x: Tensor, lengths: Tensor) -> Outcome:
        o = rule(p, q, x, lengths)
        return NextRow(o.survival, o.p, o.q, o.x, o.lengths, o.scale)

    return broken


class Likeliest(DrafterBase):
    """A Drafter whose draft tokens are its likeliest tokens, reported as drawn from q."""

    def __init__(self, drafter: Drafter) -> None:
        self.drafter, self.holds = drafter, (drafter,)
        self.start, self.commit, self.leave = drafter.start, drafter.commit, drafter.leave

    def propose(self, gamma: list[int], draw: Draw) -> Draft:
        draft = self.drafter.propose(gamma, draw)
        return draft if draft.q is None else replace(draft, tokens=draft.q.argmax(-1))


SHOWN = ("taps", "show", "shown", "lent")  # of `models.base.LendsKeys`


class OffByOne:
    """A Model whose logits of a block are those of the place before.

    A drafter that reads the target's states must read this model's (`Drafter.reading`).
    """

    def __init__(self, model: Model) -> None:
        self.model, self.holds = model, (model,)
        self.vocab_size, self.context = model.vocab_size, model.context
        self.encoder_decoder, self.source_context = model.encoder_decoder, model.source_context
        self.source_vocab_size = model.source_vocab_size
        self.runtime, self.device = model.runtime, model.device
        self.takes_tensors, self.computed = model.takes_tensors, model.computed
        self.start, self.set_lengths = model.start, model.set_lengths
        self.permute, self.leave = model.permute, model.leave
        for name in SHOWN:  # by drafters that read more of a target than its logits
            if hasattr(model, name):
                setattr(self, name, getattr(model, name))

    @property
    def padding(self) -> int:
        return self.model.padding

    @property
    def hidden(self) -> Tensor:
        """States of the target, where it shows them."""
        return self.model.hidden  # pyright: ignore[reportAttributeAccessIssue]

    @property
    def lengths(self) -> list[int]:
        """Tokens of every row, where the target says."""
        return self.model.lengths  # pyright: ignore[reportAttributeAccessIssue]

    def score(self, blocks: Blocks, need: list[int]) -> Tensor:
        return self.model.score(blocks, need).roll(1, 1)
