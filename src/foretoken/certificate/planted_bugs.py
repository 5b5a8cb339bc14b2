"""Bugs to plant in a pair of target and draft. A certificate that misses a bug is void."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from foretoken.drafters.base import Draft, Drafter
from foretoken.models.base import Blocks, Capabilities, Model, SharedKV
from foretoken.models.hidden_states import HiddenStates
from foretoken.sampling.acceptance_rules import Outcome, Rule
from foretoken.sampling.draw import Draw


class NextPositionOutcome(Outcome):
    """An outcome with a bug: the next token is drawn one position too late, after a draft token
    that was not accepted."""

    def compute_next_distribution(self, n: Tensor) -> Tensor:
        rows = torch.arange(len(n), device=n.device)
        return self.p[rows, (n + 1) % (self.lengths + 1)]


def break_rule(rule: Rule) -> Rule:
    """Return `rule` with a bug: the next token is drawn at the wrong position."""

    def broken(p: Tensor, q: Tensor | None, x: Tensor, lengths: Tensor) -> Outcome:
        o = rule(p, q, x, lengths)
        return NextPositionOutcome(o.survival, o.p, o.q, o.x, o.lengths, o.scale)

    return broken


class ArgmaxDrafter(Drafter):
    """A Drafter with a bug: its draft tokens are the most probable tokens, but are reported as
    sampled from q."""

    def __init__(self, drafter: Drafter) -> None:
        self.drafter, self.holds = drafter, (drafter,)
        self.start, self.commit, self.leave = drafter.start, drafter.commit, drafter.leave

    def propose(self, gamma: list[int], draw: Draw) -> Draft:
        draft = self.drafter.propose(gamma, draw)
        return draft if draft.q is None else replace(draft, tokens=draft.q.argmax(-1))


class OffByOneModel(Model):
    """A Model with a bug: each position of a block has the logits of the position before.

    A drafter that uses the target's hidden states must get the hidden states from this model
    (`Drafter.with_target`).
    """

    def __init__(self, model: Model) -> None:
        self.model, self.holds = model, (model,)
        self.vocab_size, self.context = model.vocab_size, model.context
        self.encoder_decoder, self.source_context = model.encoder_decoder, model.source_context
        self.source_vocab_size = model.source_vocab_size
        self.runtime, self.device = model.runtime, model.device
        self.compute_dtype, self.taps = model.compute_dtype, model.taps
        own = model.capabilities
        self.capabilities = Capabilities(
            tensors=own.tensors, hidden=own.hidden, taps=own.taps, shared_kv=own.shared_kv
        )

    def score(self, blocks: Blocks, need: list[int]) -> Tensor:
        logits = self.model.score(blocks, need).roll(1, 1)
        self.padding = self.model.padding
        return logits

    def start(self, prompts: list[list[int]], sources: list[list[int]] | None = None) -> None:
        self.model.start(prompts, sources)

    def set_lengths(self, lengths: list[int]) -> None:
        self.model.set_lengths(lengths)

    def permute(self, rows: list[int]) -> None:
        self.model.permute(rows)

    def leave(self, rows: list[int]) -> None:
        self.model.leave(rows)

    @property
    def hidden(self) -> Tensor:
        return self.model.hidden

    @property
    def lengths(self) -> list[int]:
        return self.model.lengths

    def expose_hidden_states(self, known: Callable[[list[int]], int] | None) -> None:
        self.model.expose_hidden_states(known)

    def take_hidden_states(self) -> list[HiddenStates | None]:
        return self.model.take_hidden_states()

    def get_shared_kv(self, kind: str, rows: list[int], first: int) -> SharedKV:
        return self.model.get_shared_kv(kind, rows, first)
