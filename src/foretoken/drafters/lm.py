"""A smaller model as the drafter (paper 3.6), over any runtime. Knows the Model protocol only."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from foretoken.distributions import check, law, likeliest
from foretoken.drafters.base import Draft, pack
from foretoken.draw import Draw
from foretoken.models.base import Model


class LMDrafter:
    """Guesses with `model`, one run per guess; its laws are standardized as the target's are.

    A decoder-only model may draft for an encoder-decoder target: it reads the source as the head
    of its prompt. Where a row has outgrown the model's context, or holds an id that the model does
    not know, in its text or source, it falls silent.
    """

    def __init__(self, model: Model, vocab_size: int) -> None:
        self.model, self.vocab_size = model, vocab_size
        self.runtime = model.runtime
        self._texts: list[list[int]] = []  # committed tokens, as the model reads them
        self._cached: list[int] = []  # how many of them are in its cache
        self._silent: list[bool] = []  # rows whose text or source it cannot read

    def start(
        self, rows: list[int], prompts: list[list[int]], sources: list[list[int]] | None
    ) -> None:
        assert rows == list(range(len(self._texts), len(self._texts) + len(rows)))
        heard = self.model.encoder_decoder  # else the source is the head of the prompt
        texts = [
            [*(sources[b] if sources and not heard else []), *p] for b, p in enumerate(prompts)
        ]
        deaf = [heard and not self._readable(source) for source in sources or prompts]
        silent = [no or self._unknown(text) for no, text in zip(deaf, texts, strict=True)]
        heads = [
            [] if no or self._room(text) <= 0 else text[:-1]
            for no, text in zip(silent, texts, strict=True)
        ]
        if heard and sources:
            sources = [[0] if no else s for s, no in zip(sources, deaf, strict=True)]
        self.model.start(heads, sources if heard else None)
        self._texts += texts
        self._cached += [len(h) for h in heads]
        self._silent += silent

    def propose(self, gamma: list[int], draw: Draw) -> Draft:
        rooms = [
            0 if no else self._room(t) for t, no in zip(self._texts, self._silent, strict=True)
        ]
        budget = [max(0, min(g, room)) for g, room in zip(gamma, rooms, strict=True)]
        guesses: list[list[int]] = [[] for _ in budget]
        laws: list[Tensor] = []
        feed = [t[c:] for t, c in zip(self._texts, self._cached, strict=True)]
        for i in range(max(budget, default=0)):
            active = [g > i for g in budget]
            blocks = [block if on else [] for block, on in zip(feed, active, strict=True)]
            ids, q = self._guess(blocks, active, draw, i)
            if q is not None:
                laws.append(q)
            for b, on in enumerate(active):
                if on:
                    self._cached[b] += len(blocks[b])
                    guesses[b].append(ids[b])
            feed = [[token] for token in ids]
        return pack(guesses, torch.stack(laws, 1) if laws else None, calls=max(budget, default=0))

    def _guess(
        self, blocks: list[list[int]], active: list[bool], draw: Draw, i: int
    ) -> tuple[list[int], Tensor | None]:
        """Guess i of every row and the law it was drawn from, `[B, V]`; None where it was the
        argmax."""
        need = [int(on) for on in active]
        logits = self.model.score(blocks, need)[..., : self.vocab_size]  # no other id is drawn
        check(logits, "draft", [len(t) + i for t in self._texts], need)
        logits = logits[:, 0]
        if draw.params.greedy:
            return likeliest(logits).tolist(), None
        q = law(logits, draw.params)
        if q.shape[-1] < self.vocab_size:
            q = functional.pad(q, (0, self.vocab_size - q.shape[-1]))
        return draw(q, i).tolist(), q

    def commit(self, tokens: list[list[int]]) -> None:
        for b, kept in enumerate(tokens):
            # the last token kept is the target's own or was never fed: it cannot be in the cache
            self._cached[b] = min(self._cached[b], len(self._texts[b]) + len(kept) - 1)
            self._texts[b] += kept
            self._silent[b] |= self._unknown(kept)
        self.model.set_lengths(self._cached)

    def leave(self, rows: list[int]) -> None:
        stay = [b for b in range(len(self._texts)) if b not in rows]
        self._texts = [self._texts[b] for b in stay]
        self._cached = [self._cached[b] for b in stay]
        self._silent = [self._silent[b] for b in stay]
        self.model.leave(rows)

    def _readable(self, source: list[int]) -> bool:
        limit = self.model.source_context
        return not self._unknown(source) and (limit is None or len(source) <= limit)

    def _unknown(self, tokens: list[int]) -> bool:
        return max(tokens, default=0) >= self.model.vocab_size

    def _room(self, text: list[int]) -> int:
        """How many guesses fit in the model's context behind `text`."""
        context = self.model.context
        return 10**9 if context is None else context - len(text) + 1
