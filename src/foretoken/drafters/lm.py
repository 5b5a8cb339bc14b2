"""A smaller model as the drafter (paper 3.6), over any runtime. Knows the Model protocol only."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from foretoken.drafters.base import Draft, pack
from foretoken.errors import InputError
from foretoken.models.base import Blocks, Model, hears, require_model
from foretoken.sampling.distributions import SamplingParams, law, likeliest
from foretoken.sampling.draw import Draw


class LMDrafter:
    """Guesses with `model`, one run per guess; its laws are standardized as the target's are, or by
    `params` of its own (0 as the temperature: always the likeliest).

    vocab_size: V of the target, None where it is the model's.

    A decoder-only model may draft for an encoder-decoder target: it reads the source as the head
    of its prompt. Where a row has outgrown the model's context, or holds an id that the model does
    not know, in its text or source, it falls silent.
    """

    def __init__(
        self, model: Model, vocab_size: int | None = None, params: SamplingParams | None = None
    ) -> None:
        require_model(model)
        if not isinstance(params, SamplingParams | None):
            raise InputError(f"params is {params!r:.60}; give a foretoken.SamplingParams, or None")
        self.model, self.params, self.holds = model, params, (model,)
        self.vocab_size = model.vocab_size if vocab_size is None else vocab_size
        self.runtime = model.runtime
        self.singular = params is not None  # its speed does not follow from its model alone
        self._texts: list[list[int]] = []  # committed tokens, as the model reads them
        self._cached: list[int] = []  # how many of them are in its cache
        self._readable: list[int] = []  # how many of them it can read, from the left

    def start(
        self, rows: list[int], prompts: list[list[int]], sources: list[list[int]] | None
    ) -> None:
        assert rows == list(range(len(self._texts), len(self._texts) + len(rows)))
        heard = self.model.encoder_decoder  # else the source is the head of the prompt
        texts = [
            [*(sources[b] if sources and not heard else []), *p] for b, p in enumerate(prompts)
        ]
        deaf = [heard and not hears(self.model, source) for source in sources or prompts]
        readable = [0 if no else self._known(text) for no, text in zip(deaf, texts, strict=True)]
        heads = [
            text[:-1] if self._room(text, known) > 0 else []
            for text, known in zip(texts, readable, strict=True)
        ]
        if heard and sources:
            sources = [[0] if no else s for s, no in zip(sources, deaf, strict=True)]
        self.model.start(heads, sources if heard else None)
        self._texts += texts
        self._cached += [len(h) for h in heads]
        self._readable += readable

    def propose(self, gamma: list[int], draw: Draw) -> Draft:
        rooms = [self._room(t, n) for t, n in zip(self._texts, self._readable, strict=True)]
        budget = [max(0, min(g, room)) for g, room in zip(gamma, rooms, strict=True)]
        feed: Blocks = [
            text[cached:] if g else []
            for text, cached, g in zip(self._texts, self._cached, budget, strict=True)
        ]
        ids: list[Tensor] = []
        laws: list[Tensor] = []
        tops: list[Tensor] = []
        for i in range(max(budget, default=0)):
            need = [int(g > i) for g in budget]
            logits = self.model.score(feed, need)[:, 0, : self.vocab_size]  # no other id is drawn
            tops.append(logits.amax(-1))
            ids.append(self._guess(logits, draw, i, laws))
            feed = self._next(ids[-1], [g > i + 1 for g in budget])
        for b, g in enumerate(budget):
            self._cached[b] = len(self._texts[b]) + g - 1 if g else self._cached[b]
        return self._drafted(ids, laws, tops, budget)

    def _guess(self, logits: Tensor, draw: Draw, i: int, laws: list[Tensor]) -> Tensor:
        """Guess i of every row, `[B]`; unless it is the argmax, `laws` gains what it was drawn
        from, `[B, V]`."""
        params = self.params or draw.params
        if params.greedy:
            return likeliest(logits)
        q = law(logits, params)
        if q.shape[-1] < self.vocab_size:
            q = functional.pad(q, (0, self.vocab_size - q.shape[-1]))
        laws.append(q)
        return draw(q, i)

    def _next(self, ids: Tensor, active: list[bool]) -> Blocks:
        """One more token for every row that goes on; where it can, it stays on its device."""
        if self.model.takes_tensors:
            return ids[:, None]
        drawn: list[int] = ids.tolist()
        return [[token] if on else [] for token, on in zip(drawn, active, strict=True)]

    def _drafted(
        self, ids: list[Tensor], laws: list[Tensor], tops: list[Tensor], budget: list[int]
    ) -> Draft:
        if not ids:
            return pack([[] for _ in budget])
        return Draft(
            tokens=torch.stack(ids, 1),
            lengths=torch.tensor(budget),
            q=torch.stack(laws, 1) if laws else None,
            calls=len(ids),
            tops=torch.stack(tops, 1),
        )

    def commit(self, tokens: list[list[int]]) -> None:
        for b, kept in enumerate(tokens):
            # the last token kept is the target's own or was never fed: it cannot be in the cache
            self._cached[b] = min(self._cached[b], len(self._texts[b]) + len(kept) - 1)
            if self._readable[b] == len(self._texts[b]):
                self._readable[b] += self._known(kept)
            self._texts[b] += kept
        self.model.set_lengths(self._cached)

    def rewind(self, counts: list[int]) -> None:
        for b, (text, count) in enumerate(zip(self._texts, counts, strict=True)):
            del text[len(text) - count :]
            self._cached[b] = min(self._cached[b], len(text) - 1)
            self._readable[b] = min(self._readable[b], len(text))
        self.model.set_lengths(self._cached)

    def leave(self, rows: list[int]) -> None:
        stay = [b for b in range(len(self._texts)) if b not in rows]
        self._texts = [self._texts[b] for b in stay]
        self._cached = [self._cached[b] for b in stay]
        self._readable = [self._readable[b] for b in stay]
        self.model.leave(rows)

    def _known(self, tokens: list[int]) -> int:
        """How many of them, from the left, are ids of the model."""
        V = self.model.vocab_size
        if max(tokens, default=0) < V:
            return len(tokens)
        return next(i for i, token in enumerate(tokens) if token >= V)

    def _room(self, text: list[int], readable: int) -> int:
        """How many guesses fit in the model's context behind `text`."""
        if readable < len(text):
            return 0
        context = self.model.context
        return 10**9 if context is None else context - len(text) + 1
