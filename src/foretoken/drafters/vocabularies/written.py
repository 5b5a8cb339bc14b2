"""Guesses by the text (Timor et al. 2025, arXiv 2502.05202: string-level exact match): the draft
writes on in its own tokens, and what it has written is read in the target's.

It writes what is likeliest, so its guesses follow from the text alone: they are certain (no q), and
any way to cut the text into tokens is exact.
"""

from __future__ import annotations

import torch

from foretoken.drafters.base import Draft, pack
from foretoken.drafters.vocabularies.dictionary import Dictionary
from foretoken.drafters.vocabularies.following import Following
from foretoken.drafters.vocabularies.translation import Translation
from foretoken.models.base import Model
from foretoken.models.rows import staying
from foretoken.sampling.draw import Draw


class WrittenDrafter:
    """Guesses with `model`, which is decoder-only and of any vocabulary; one run for each token
    that it writes, as many as guesses are asked for."""

    singular = True  # its speed does not follow from its type

    def __init__(self, model: Model, dictionary: Dictionary) -> None:
        self.model, self.dictionary, self.holds = model, dictionary, (model,)
        self.runtime = model.runtime
        self._following = Following(model)
        self._texts: list[Translation] = []
        draft = dictionary.draft
        known = [*draft.spelled, *([] if draft.end is None else [draft.end])]
        self._known = torch.tensor(sorted(known), dtype=torch.long, device=model.device)

    def start(
        self, rows: list[int], prompts: list[list[int]], sources: list[list[int]] | None
    ) -> None:
        texts = [[*s, *p] for s, p in zip(sources or [[] for _ in prompts], prompts, strict=True)]
        made = [Translation(self.dictionary) for _ in texts]
        for translation, text in zip(made, texts, strict=True):
            translation.extend(text)
        self._following.start([translation.told for translation in made])
        self._texts += made

    def propose(self, gamma: list[int], draw: Draw) -> Draft:
        told = [text.told for text in self._texts]
        written: list[list[int]] = [[] for _ in gamma]
        calls = 0
        open_ = [g > 0 for g in gamma]
        while any(open_):
            texts = [
                [*a, *w] if on else None for a, w, on in zip(told, written, open_, strict=True)
            ]
            logits = self._following.score(texts, open_)
            likeliest = self._known[logits[:, self._known].argmax(-1)].tolist()
            for b, token in enumerate(likeliest):
                if open_[b]:
                    written[b].append(token)
                    open_[b] = len(written[b]) < gamma[b] and token != self.dictionary.draft.end
            calls += 1
        pairs = zip(self._texts, written, gamma, strict=True)
        return pack([self._guesses(text, new)[:g] for text, new, g in pairs], calls=calls)

    def _guesses(self, text: Translation, written: list[int]) -> list[int]:
        """What was written, in the target's ids, an end of the text included."""
        end = self.dictionary.target.end
        if not written or written[-1] != self.dictionary.draft.end or end is None:
            return text.guesses(written)
        guesses = text.guesses(written[:-1])
        return [*guesses, end] if guesses or len(written) == 1 else []

    def commit(self, tokens: list[list[int]]) -> None:
        for text, new in zip(self._texts, tokens, strict=True):
            text.extend(new)

    def rewind(self, counts: list[int]) -> None:
        for text, count in zip(self._texts, counts, strict=True):
            text.cut(len(text.ids) - count)

    def leave(self, rows: list[int]) -> None:
        self._texts = [self._texts[b] for b in staying(len(self._texts), rows)]
        self._following.leave(rows)
