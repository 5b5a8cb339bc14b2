"""A draft model's reading of the target's rows, shared by drafters of every kind.

A decoder-only model has an encoder-decoder's source at the head of its prompt. In a row that it
cannot read, where the text has outgrown its context or source or text hold an id that it lacks, a
model is silent.
"""

from __future__ import annotations

from itertools import takewhile

from foretoken.errors import RefusedError
from foretoken.models.base import Model
from foretoken.models.rows import staying

AHEAD = 128  # tokens that a row may be behind, and that are read in one go
UNLIMITED = 10**9  # draft tokens behind a text, for a model without a context


class Reader:
    """The rows of `model`: their texts as it reads them, and how much of each it has cached. Runs
    nothing."""

    def __init__(self, model: Model) -> None:
        self.model = model
        self._shares = model.capabilities.target_rows
        # behind what the target has read: the states of both stand where these begin
        limit = model.rewind if self._shares else None
        self._beyond = UNLIMITED if limit is None else limit
        self.texts: list[list[int]] = []  # committed tokens
        self.cached: list[int] = []  # how many are in the model's cache
        self._known: list[int] = []  # how many are ids of the model, from the left; -1: no source

    def join(
        self, prompts: list[list[int]], sources: list[list[int]] | None
    ) -> tuple[list[list[int]], list[list[int]] | None]:
        """Rows join behind those present; the prompts and sources to start the model with: all but
        the last token, and nothing where it is silent or where others would wait for long.
        RefusedError for an encoder without sources."""
        if self.model.encoder_decoder and sources is None:
            raise RefusedError("an encoder-decoder cannot draft for a causal target")
        first, media = len(self.texts), self._media(len(prompts))
        if self.model.encoder_decoder or sources is None:
            self.texts += [list(prompt) for prompt in prompts]
        else:
            self.texts += [[*s, *p] for s, p in zip(sources, prompts, strict=True)]
            sources = None
        self._known += map(self._readable, self.texts[first:])
        for b, source in enumerate(sources or [], first):
            if not (self._hears(source) if source else media[b - first]):
                self._known[b] = -1
        rows = range(first, len(self.texts))
        most, heads = AHEAD if first else UNLIMITED, list[list[int]]()
        for b in rows:
            limit = UNLIMITED if media[b - first] else most  # a text with media is read at once
            head, unread = self._head(self.texts[b][:-1], limit) if self.room(b) else ([], 0)
            most -= unread
            heads.append(head)
        self.cached += map(len, heads)
        if sources is not None:  # an encoder reads something in every row
            sources = [s if self._known[b] >= 0 else [0] for b, s in enumerate(sources, first)]
        return heads, sources

    def _media(self, rows: int) -> list[bool]:
        """Tell which of the rows that join have media for the model."""
        attached = self.model.attached if self.model.capabilities.media else []
        return [media is not None for media in attached] or [False] * rows

    def _head(self, text: list[int], most: int) -> tuple[list[int], int]:
        """Return the tokens to start a row with, and how many of them are to be read: all, or where
        that is more than `most` those that the model has kept of other texts; none where another
        reads it."""
        if self._shares:
            return [], 0
        cached = self.model.known(text)
        unread = len(text) - cached
        return (text, unread) if unread <= most else (text[:cached], 0)

    def room(self, b: int) -> int:
        """Return how many draft tokens fit in the context behind a row's text; 0 where the model is
        silent."""
        length = len(self.texts[b])
        if self._known[b] < length:
            return 0
        context = self.model.context
        return UNLIMITED if context is None else max(0, context - length + 1)

    def ahead(self, b: int) -> list[int]:
        """Return the tokens to read of a row that is to draft nothing, so that a long text is not
        read in one go when it does."""
        unread = len(self.texts[b]) - self.cached[b]
        if unread <= AHEAD or not self.room(b) or self._shares:
            return []
        return self.texts[b][self.cached[b] : self.cached[b] + AHEAD]

    def budget(self, gamma: list[int]) -> list[int]:
        """Return how many draft tokens to make in every row where `gamma` are asked for. Tokens
        that a model which shares its rows has read until then are cached."""
        if self._shares:
            self.cached[:] = self.model.lengths
        unread = [len(text) - n for text, n in zip(self.texts, self.cached, strict=True)]
        return [
            min(g, self.room(b), max(0, self._beyond - n))
            for b, (g, n) in enumerate(zip(gamma, unread, strict=True))
        ]

    def move(self, back: list[int], tokens: list[list[int]]) -> None:
        """Every text goes back by so many tokens and on by others; `cached` says what remains."""
        for b, (text, count, new) in enumerate(zip(self.texts, back, tokens, strict=True)):
            if count:
                del text[len(text) - count :]
                self.cached[b] = min(self.cached[b], len(text))
                self._known[b] = min(self._known[b], len(text))
            if self._known[b] == len(text):
                self._known[b] += self._readable(new)
            text += new
            # the last token is the target's own or was never fed: it cannot be in the cache
            self.cached[b] = min(self.cached[b], len(text) - 1)

    def leave(self, rows: list[int]) -> None:
        """These rows are finished; those behind move up."""
        stay = staying(len(self.texts), rows)
        self.texts = [self.texts[b] for b in stay]
        self.cached = [self.cached[b] for b in stay]
        self._known = [self._known[b] for b in stay]

    def _readable(self, tokens: list[int]) -> int:
        """Count the tokens, from the left, that are ids of the model."""
        V = self.model.vocab_size
        if max(tokens, default=0) < V:
            return len(tokens)
        return sum(1 for _ in takewhile(lambda token: token < V, tokens))

    def _hears(self, source: list[int]) -> bool:
        """Tell whether the encoder can read a source: no longer than it may be, of ids it knows."""
        limit, V = self.model.source_context, self.model.source_vocab_size
        fits = limit is None or len(source) <= limit
        return fits and V is not None and max(source, default=0) < V
