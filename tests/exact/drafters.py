"""Drafters for the proofs: honest ones of every kind, and ones that lie about how they guessed."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from foretoken.drafters.base import Draft, Drafter, pack
from foretoken.sampling.draw import Draw
from oracle import Model, Text


class FunctionDrafter(Drafter):
    """Draws guesses from `distribution(text)`, and remembers only the texts.

    `before(distribution, i)`: no draft token i, decided by its distribution alone;
    `after(distribution, token)`: no draft token behind this one, which is kept.
    """

    runtime = "test"

    def __init__(
        self,
        distribution: Model,
        *,
        before: Callable[[Tensor, int], bool] = lambda distribution, i: False,
        after: Callable[[Tensor, int], bool] = lambda distribution, token: False,
    ) -> None:
        self.distribution, self.before, self.after = distribution, before, after
        self.texts: list[Text] = []

    def start(self, rows, prompts, sources) -> None:
        self.texts += [tuple(prompt) for prompt in prompts]

    def propose(self, gamma: list[int], draw: Draw) -> Draft:
        draft_tokens: list[list[int]] = [[] for _ in gamma]
        going = [g > 0 for g in gamma]
        distributions: list[Tensor] = []
        for i in range(max(gamma)):
            texts = [(*text, *x) for text, x in zip(self.texts, draft_tokens, strict=True)]
            q = torch.tensor([list(self.distribution(text)) for text in texts], dtype=torch.float64)
            for b, g in enumerate(gamma):
                going[b] = going[b] and i < g and not self.before(q[b], i)
            if not any(going):
                break
            q[[b for b, on in enumerate(going) if not on]] = torch.eye(q.shape[1]).double()[0]
            tokens = self.choose(q, i, draw)  # rows that are done meet a certain distribution
            distributions.append(self.claim(q))
            for b, token in enumerate(tokens):
                if going[b]:
                    going[b] = self.keep(q[b], token, draft_tokens[b])
        return self.report(draft_tokens, torch.stack(distributions, 1) if distributions else None)

    def choose(self, q: Tensor, i: int, draw: Draw) -> list[int]:
        return draw(q, i).tolist()

    def claim(self, q: Tensor) -> Tensor:
        return q

    def keep(self, q: Tensor, token: int, draft_tokens: list[int]) -> bool:
        """Keep the draft token; whether to go on."""
        draft_tokens.append(token)
        return not self.after(q, token)

    def report(self, draft_tokens: list[list[int]], q: Tensor | None) -> Draft:
        length = max(map(len, draft_tokens))
        return pack(draft_tokens, q[:, :length] if q is not None and length else None)

    def commit(self, tokens: list[list[int]]) -> None:
        self.texts = [(*text, *kept) for text, kept in zip(self.texts, tokens, strict=True)]

    def leave(self, rows: list[int]) -> None:
        self.texts = [text for b, text in enumerate(self.texts) if b not in rows]


class Certain(FunctionDrafter):
    """Guesses the likeliest token, and says so: no q."""

    def choose(self, q: Tensor, i: int, draw: Draw) -> list[int]:
        return q.argmax(-1).tolist()

    def report(self, draft_tokens: list[list[int]], q: Tensor | None) -> Draft:
        return pack(draft_tokens)


class Wide(FunctionDrafter):
    """Pads to two columns more than were needed, with what is no id and no distribution."""

    def report(self, draft_tokens: list[list[int]], q: Tensor | None) -> Draft:
        length = max(map(len, draft_tokens))
        draft = pack(draft_tokens, q)
        tokens = torch.full((len(draft_tokens), length + 2), -1)
        wide = torch.full(
            (len(draft_tokens), length + 2, len(self.distribution((0,)))), torch.nan
        ).double()
        for b, x in enumerate(draft_tokens):
            tokens[b, : len(x)] = draft.tokens[b, : len(x)]
            if q is not None:
                wide[b, : len(x)] = q[b, : len(x)]
        return Draft(tokens, draft.lengths, wide)


class GreedyClaimsDistribution(FunctionDrafter):
    """Lies: the likeliest token, said to be drawn."""

    def choose(self, q: Tensor, i: int, draw: Draw) -> list[int]:
        return q.argmax(-1).tolist()


class RoundedClaim(FunctionDrafter):
    """Lies a little: the q that it hands over comes from logits, of the usual size, in bfloat16."""

    def claim(self, q: Tensor) -> Tensor:
        return (q.log() + 20).bfloat16().double().softmax(-1)


class Dropper(FunctionDrafter):
    """Lies: has second thoughts about a draft token that it has seen, and drops it."""

    def keep(self, q: Tensor, token: int, draft_tokens: list[int]) -> bool:
        if float(q[token]) < 0.4:
            return False
        return super().keep(q, token, draft_tokens)
