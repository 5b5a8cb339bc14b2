"""A drafter for Gemma 4's assistants, networks that attend to the target's own keys and values.

Such a network has no cache, so rejected draft tokens need no rollback. All draft tokens of a step
are computed as if they were at the sequence's last position. A draft token depends on earlier draft
tokens only through their embeddings and through the hidden state that each forward pass returns for
the next forward pass.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from foretoken.drafters.base import Draft, Drafter, pack
from foretoken.errors import InputError
from foretoken.models.base import Model
from foretoken.models.hidden_states import FINAL_TAP
from foretoken.models.row_slots import list_remaining_rows
from foretoken.sampling.distributions import mask_invalid
from foretoken.sampling.draw import Draw
from foretoken.transfer import send


class SharedKVModel(Protocol):
    """A network that drafts by attending to the keys and values of a target's sequences."""

    runtime: str
    identity: str

    def with_target(self, target: Model) -> Any:
        """Return a model with the same network for another target. Raises InputError if that target
        does not share its keys and values."""
        ...

    def begin(self, rows: list[int]) -> None:
        """Select the target's sequences for the next `step` calls. Each of these calls uses the
        sequences' present lengths."""
        ...

    def step(self, embedded: Tensor, states: Tensor) -> tuple[Tensor, Tensor]:
        """Run the network once for the selected rows.

        embedded: `[n, H]`, the embedding of each sequence's last token. states: `[n, H]`, the
        hidden state of the token before the last token.

        Returns logits `[n, V]` of the next token, and hidden states `[n, H]`, which are the
        `states` of the next call.
        """
        ...


@dataclass(slots=True)
class _SequenceEnd:
    length: int
    last: int  # token
    state: Tensor | None = None  # [H], the target's hidden state at the token before `last`


class AssistantDrafter(Drafter):
    """A drafter whose `model` uses the keys, values and last hidden states of `target`.

    It proposes no tokens for a sequence whose last hidden state is missing.

    Args:
        target: The target; its only tap must be `FINAL_TAP`.
        model: The network, made for this target.
        embedding: Function from ids `[N]` to embeddings `[N, H]`, the inputs of the target's first
            layer.
    """

    reads_target = True

    def __init__(
        self, target: Model, model: SharedKVModel, embedding: Callable[[Tensor], Tensor]
    ) -> None:
        self.target: Model = target
        self.network, self.embedding = model, embedding
        self.runtime, self.vocab_size = model.runtime, target.vocab_size
        self.identity = model.identity
        self.seqs: list[_SequenceEnd] = []

    def with_target(self, target: Model) -> AssistantDrafter:
        """Return a drafter without sequences, with the same network, for another target. Raises
        InputError if that target does not expose the hidden states, keys and values that the
        network needs."""
        if target.taps != (FINAL_TAP,):
            raise InputError(
                "the target does not expose the hidden states that the draft needs; give a target "
                "that does"
            )
        return AssistantDrafter(target, self.network.with_target(target), self.embedding)

    def count_cached_tokens(self, tokens: list[int]) -> int:
        return max(0, len(tokens) - 1)  # it needs the last hidden state

    def start(
        self, rows: list[int], prompts: list[list[int]], sources: list[list[int]] | None
    ) -> None:
        self.seqs += [_SequenceEnd(len(prompt), prompt[-1]) for prompt in prompts]
        self._take_states()

    def _take_states(self) -> None:
        """Store the target's hidden state of each sequence's last token but one, if available."""
        for seq, new in zip(self.seqs, self.target.take_hidden_states(), strict=True):
            if new is not None:
                reached = new.first + len(new.states) == seq.length - 1
                seq.state = new.states[-1].clone() if reached else None

    def propose(self, gamma: list[int], draw: Draw) -> Draft:
        pairs = zip(self.seqs, gamma, strict=True)
        budget = [g if seq.state is not None else 0 for seq, g in pairs]
        active = [b for b, g in enumerate(budget) if g]
        if not active:
            return pack([[] for _ in gamma])
        state = torch.stack([x for x in (self.seqs[b].state for b in active) if x is not None])
        ids = [send(torch.tensor([seq.last for seq in self.seqs]), state.device)]
        distributions: list[Tensor] = []
        tops: list[Tensor] = []
        self.network.begin(active)
        for i in range(max(budget)):
            logits, state = self.network.step(self.embedding(ids[-1][active]), state)
            logits, top = mask_invalid(_spread_rows(logits, active, len(gamma)))
            token, q = draw.sample(logits, i)
            ids.append(token)
            tops.append(top)
            distributions += [] if q is None else [q]
        return Draft(
            tokens=torch.stack(ids[1:], 1),
            lengths=torch.tensor(budget),
            q=torch.stack(distributions, 1) if distributions else None,
            calls=max(budget),
            tops=torch.stack(tops, 1),
        )

    def commit(self, tokens: list[list[int]]) -> None:
        for seq, new in zip(self.seqs, tokens, strict=True):
            if new:
                seq.length, seq.last, seq.state = seq.length + len(new), new[-1], None
        self._take_states()

    def leave(self, rows: list[int]) -> None:
        self.seqs = [self.seqs[b] for b in list_remaining_rows(len(self.seqs), rows)]


def _spread_rows(logits: Tensor, rows: list[int], count: int) -> Tensor:
    """Return a tensor `[count, V]` with these logits in `rows`, and zeros in all other rows."""
    if len(rows) == count:
        return logits
    every = logits.new_zeros(count, logits.shape[1])
    every[rows] = logits
    return every
