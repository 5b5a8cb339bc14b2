"""A network over the target's own keys and values as the drafter: Gemma 4's assistants.

It keeps nothing between steps, so there is nothing to take back. All draft tokens of a step are
made as from the text's last position, and know each other by the state that is fed back alone.
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
from foretoken.models.row_slots import list_remaining_rows
from foretoken.models.hidden_states import FINAL_TAP
from foretoken.sampling.distributions import mask_invalid
from foretoken.sampling.draw import Draw
from foretoken.transfer import send


class BorrowingModel(Protocol):
    """A network that reads the keys and values of a target's rows."""

    runtime: str
    identity: str

    def with_target(self, target: Model) -> Any:
        """The same over another target."""
        ...

    def begin(self, rows: list[int]) -> None:
        """Take the target's rows that the next steps are for, as long as they are now."""
        ...

    def step(self, embedded: Tensor, states: Tensor) -> tuple[Tensor, Tensor]:
        """Embeddings of each row's last token and the states before it, `[n, H]` each -> logits
        `[n, V]` of the next token, and the states before that."""
        ...


@dataclass(slots=True)
class _TextEnd:
    length: int
    last: int  # its last token
    state: Tensor | None = None  # [H], the target's at the token before that


class AssistantDrafter(Drafter):
    """Drafts with `model` from the keys, values and last states of `target`.

    A row proposes nothing where its last state is not known.

    Args:
        target: The target, whose one tap is `FINAL`.
        model: The network, over this target.
        embedding: The target's embeddings `[N, H]` of ids `[N]`, as its first layer reads them.
    """

    reads_target = True  # its states come from the target's passes, so these cannot run ahead

    def __init__(
        self, target: Model, model: BorrowingModel, embedding: Callable[[Tensor], Tensor]
    ) -> None:
        self.target: Model = target
        self.network, self.embedding = model, embedding
        self.runtime, self.vocab_size = model.runtime, target.vocab_size
        self.identity = model.identity
        self.texts: list[_TextEnd] = []

    def reading(self, target: Model) -> AssistantDrafter:
        """The same network over another target, without rows."""
        if not target.capabilities.shared_kv or target.taps != (FINAL_TAP,):
            raise InputError("give a target that exposes the states that the draft reads")
        return AssistantDrafter(target, self.network.with_target(target), self.embedding)

    def known(self, text: list[int]) -> int:
        return len(text)  # only the last state is read, which the next pass shows

    def start(
        self, rows: list[int], prompts: list[list[int]], sources: list[list[int]] | None
    ) -> None:
        self.texts += [_TextEnd(len(prompt), prompt[-1]) for prompt in prompts]
        self._take()

    def _take(self) -> None:
        """Keep the last state of each row that the target has read up to its last token."""
        for text, new in zip(self.texts, self.target.take_hidden_states(), strict=True):
            if new is not None:
                reached = new.first + len(new.states) == text.length - 1
                text.state = new.states[-1].clone() if reached else None

    def propose(self, gamma: list[int], draw: Draw) -> Draft:
        pairs = zip(self.texts, gamma, strict=True)
        budget = [g if text.state is not None else 0 for text, g in pairs]
        on = [b for b, g in enumerate(budget) if g]
        if not on:
            return pack([[] for _ in gamma])
        state = torch.stack([x for x in (self.texts[b].state for b in on) if x is not None])
        ids = [send(torch.tensor([text.last for text in self.texts]), state.device)]
        distributions: list[Tensor] = []
        tops: list[Tensor] = []
        self.network.begin(on)
        for i in range(max(budget)):
            logits, state = self.network.step(self.embedding(ids[-1][on]), state)
            logits, top = mask_invalid(_spread(logits, on, len(gamma)))
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
        for text, new in zip(self.texts, tokens, strict=True):
            if new:
                text.length, text.last, text.state = text.length + len(new), new[-1], None
        self._take()

    def leave(self, rows: list[int]) -> None:
        self.texts = [self.texts[b] for b in list_remaining_rows(len(self.texts), rows)]


def _spread(logits: Tensor, rows: list[int], count: int) -> Tensor:
    """Logits of these rows -> of all; the others draft nothing."""
    if len(rows) == count:
        return logits
    every = logits.new_zeros(count, logits.shape[1])
    every[rows] = logits
    return every
