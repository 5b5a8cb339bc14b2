"""Blockwise heads on the target's hidden states as the approximation model (paper 3.6).

    foretoken generate --target TARGET --draft reproduction.heads:FILE

Non-autoregressive: one call gives the distributions of all draft tokens, each blind to the draft
tokens before it, and the draft tokens are drawn independently from just these distributions. Knows
no files and no training.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from foretoken.drafters.base import Draft, Drafter, pack
from foretoken.errors import InputError, RefusedError
from foretoken.loading.target import LoadedTarget
from foretoken.models.base import Model
from foretoken.models.row_slots import list_remaining_rows
from foretoken.sampling.distributions import mask_invalid
from foretoken.sampling.draw import Draw
from foretoken.transfer import send
from reproduction.blockwise import Heads, ends_of


class HeadsDrafter(Drafter):
    """Guesses with `heads` between `target`'s hidden states and `output`, its output layer.

    A row proposes nothing before its first step, from which its first state comes, and at most one
    draft token per head. Distributions are standardized as the target's are.
    """

    runtime = "torch"
    reads_target = True  # its states come from the target's passes, so these cannot run ahead

    def __init__(
        self, target: Model, heads: Heads, output: nn.Module, embedding: nn.Module
    ) -> None:
        self.target, self.heads, self.output, self.embedding = target, heads, output, embedding
        self.identity = f"heads {tuple(heads.inner.shape)} {heads.inner.dtype}"
        self.states: list[Tensor | None] = []  # [H] of every row: the one its last token came from
        self.last: list[int] = []  # that token

    def with_target(self, target: Model) -> HeadsDrafter:
        """The same heads on the states of another target, without rows."""
        return HeadsDrafter(target, self.heads, self.output, self.embedding)

    def start(
        self, rows: list[int], prompts: list[list[int]], sources: list[list[int]] | None
    ) -> None:
        self.states += [None for _ in prompts]
        self.last += [prompt[-1] for prompt in prompts]

    def propose(self, gamma: list[int], draw: Draw) -> Draft:
        ready = [state is not None for state in self.states]
        budget = [
            min(g, self.heads.count) if able else 0 for g, able in zip(gamma, ready, strict=True)
        ]
        most = max(budget, default=0)
        if not most:
            return pack([[] for _ in gamma])
        logits, tops = mask_invalid(self._logits(most))
        lengths = torch.tensor(budget)
        tokens, distributions = zip(
            *(draw.sample(logits[:, i], i) for i in range(most)), strict=True
        )
        q = None if distributions[0] is None else torch.stack(distributions, 1)
        return Draft(torch.stack(tokens, 1), lengths, q, 1, tops)

    def _logits(self, draft_tokens: int) -> Tensor:
        """`[B, guesses, V]`; a row without a state has meaningless ones."""
        dtype, device = self.heads.inner.dtype, self.heads.inner.device
        present = next(state for state in self.states if state is not None)
        empty = torch.zeros_like(present)
        hidden = torch.stack([empty if state is None else state for state in self.states])
        embedded = self.embedding(send(torch.tensor(self.last), device))
        return self.output(self.heads(hidden.to(dtype), embedded.to(dtype), 0, draft_tokens))

    def commit(self, tokens: list[list[int]]) -> None:
        """The target's last pass read the token before and the draft tokens, so the state that the
        last of n `tokens` came from is at place n - 1; without any the row is finished, or still
        being read."""
        hidden = self.target.hidden
        at = send(torch.tensor([max(0, len(kept) - 1) for kept in tokens]), hidden.device)
        rows = torch.arange(len(tokens), device=hidden.device)
        fresh = zip(hidden[rows, at].unbind(), tokens, self.states, strict=True)
        self.states = [state if kept else old for state, kept, old in fresh]
        self.last = [kept[-1] if kept else x for kept, x in zip(tokens, self.last, strict=True)]

    def leave(self, rows: list[int]) -> None:
        stay = list_remaining_rows(len(self.states), rows)
        self.states = [self.states[b] for b in stay]
        self.last = [self.last[b] for b in stay]


def drafter(argument: str, target: LoadedTarget) -> HeadsDrafter:
    """Return the drafter of the heads in a file, on a target's output layer.

    Args:
        argument: The file.
        target: The target that they were trained for.

    Returns:
        The drafter.

    Raises:
        InputError: The file cannot be read.
        RefusedError: The heads are of another target, or this one exposes no hidden states.
    """
    if not argument:
        raise InputError("no file is given; give --draft reproduction.heads:FILE")
    heads = Heads.load(argument)
    heads.require_shape(argument, target.structure)
    if not target.model.capabilities.hidden:
        raise RefusedError(
            f"{target.model.runtime} exposes no hidden states, which heads read; give another draft"
        )
    network = target.network
    heads.require_target(argument, network)
    output, embeddings = ends_of(network)
    heads.to(embeddings.weight.device, embeddings.weight.dtype)
    return HeadsDrafter(target.model, heads, output, embeddings)
