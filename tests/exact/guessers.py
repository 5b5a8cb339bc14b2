"""Drafters for the proofs: honest ones of every kind, and ones that lie about how they guessed."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from foretoken.drafters.base import Draft, pack
from foretoken.sampling.draw import Draw
from oracle import Model, Text


class Guesser:
    """Draws guesses from `law(text)`, and remembers only the texts.

    `before(law, i)`: no guess i, decided by its law alone; `after(law, token)`: no guess behind
    this one, which is kept.
    """

    runtime = "test"

    def __init__(
        self,
        law: Model,
        *,
        before: Callable[[Tensor, int], bool] = lambda law, i: False,
        after: Callable[[Tensor, int], bool] = lambda law, token: False,
    ) -> None:
        self.law, self.before, self.after = law, before, after
        self.texts: list[Text] = []

    def start(self, rows, prompts, sources) -> None:
        self.texts += [tuple(prompt) for prompt in prompts]

    def propose(self, gamma: list[int], draw: Draw) -> Draft:
        guesses: list[list[int]] = [[] for _ in gamma]
        going = [g > 0 for g in gamma]
        laws: list[Tensor] = []
        for i in range(max(gamma)):
            texts = [(*text, *x) for text, x in zip(self.texts, guesses, strict=True)]
            q = torch.tensor([list(self.law(text)) for text in texts], dtype=torch.float64)
            for b, g in enumerate(gamma):
                going[b] = going[b] and i < g and not self.before(q[b], i)
            if not any(going):
                break
            q[[b for b, on in enumerate(going) if not on]] = torch.eye(q.shape[1]).double()[0]
            tokens = self.choose(q, i, draw)  # rows that are done meet a certain law
            laws.append(self.claim(q))
            for b, token in enumerate(tokens):
                if going[b]:
                    going[b] = self.keep(q[b], token, guesses[b])
        return self.report(guesses, torch.stack(laws, 1) if laws else None)

    def choose(self, q: Tensor, i: int, draw: Draw) -> list[int]:
        return draw(q, i).tolist()

    def claim(self, q: Tensor) -> Tensor:
        return q

    def keep(self, q: Tensor, token: int, guesses: list[int]) -> bool:
        """Keep the guess; whether to go on."""
        guesses.append(token)
        return not self.after(q, token)

    def report(self, guesses: list[list[int]], q: Tensor | None) -> Draft:
        length = max(map(len, guesses))
        return pack(guesses, q[:, :length] if q is not None and length else None)

    def commit(self, tokens: list[list[int]]) -> None:
        self.texts = [(*text, *kept) for text, kept in zip(self.texts, tokens, strict=True)]

    def leave(self, rows: list[int]) -> None:
        self.texts = [text for b, text in enumerate(self.texts) if b not in rows]


class Certain(Guesser):
    """Guesses the likeliest token, and says so: no q."""

    def choose(self, q: Tensor, i: int, draw: Draw) -> list[int]:
        return q.argmax(-1).tolist()

    def report(self, guesses: list[list[int]], q: Tensor | None) -> Draft:
        return pack(guesses)


class Wide(Guesser):
    """Pads to two columns more than were needed, with what is no id and no law."""

    def report(self, guesses: list[list[int]], q: Tensor | None) -> Draft:
        length = max(map(len, guesses))
        draft = pack(guesses, q)
        tokens = torch.full((len(guesses), length + 2), -1)
        wide = torch.full((len(guesses), length + 2, len(self.law((0,)))), torch.nan).double()
        for b, x in enumerate(guesses):
            tokens[b, : len(x)] = draft.tokens[b, : len(x)]
            if q is not None:
                wide[b, : len(x)] = q[b, : len(x)]
        return Draft(tokens, draft.lengths, wide)


class GreedyClaimsLaw(Guesser):
    """Lies: the likeliest token, said to be drawn."""

    def choose(self, q: Tensor, i: int, draw: Draw) -> list[int]:
        return q.argmax(-1).tolist()


class RoundedClaim(Guesser):
    """Lies a little: the q that it hands over comes from logits, of the usual size, in bfloat16."""

    def claim(self, q: Tensor) -> Tensor:
        return (q.log() + 20).bfloat16().double().softmax(-1)


class Dropper(Guesser):
    """Lies: has second thoughts about a guess that it has seen, and drops it."""

    def keep(self, q: Tensor, token: int, guesses: list[int]) -> bool:
        if float(q[token]) < 0.4:
            return False
        return super().keep(q, token, guesses)
