"""A draft model's reading of the target's rows, shared by drafters of every kind.

A decoder-only model has an encoder-decoder's source at the head of its prompt. In a row that it
cannot read, where the text has outgrown its context or source or text hold an id that it lacks, a
model is silent.
"""

from __future__ import annotations

from itertools import takewhile

from foretoken.errors import RefusedError
from foretoken.models.base import Model
from foretoken.models.row_slots import list_remaining_rows

CATCH_UP_TOKENS = 128  # tokens that a row may be behind, and that are read in one go
UNLIMITED_TOKENS = 10**9  # draft tokens behind a text, for a model without a context


class DraftSequences:
    """The rows of `model`: their texts as it reads them, and how much of each it has cached. Runs
    nothing."""

    def __init__(self, model: Model) -> None:
        self.model = model
        self._uses_target_cache = model.capabilities.target_rows
        # behind what the target has read: the states of both stand where these begin
        limit = model.max_rewind if self._uses_target_cache else None
        self._max_uncached = UNLIMITED_TOKENS if limit is None else limit
        self.token_ids: list[list[int]] = []  # committed tokens
        self.num_cached: list[int] = []  # how many are in the model's cache
        self._num_readable: list[
            int
        ] = []  # how many are ids of the model, from the left; -1: no source

    def join(
        self, prompts: list[list[int]], sources: list[list[int]] | None
    ) -> tuple[list[list[int]], list[list[int]] | None]:
        """Rows join behind those present; the prompts and sources to start the model with: all but
        the last token, and nothing where it is silent or where others would wait for long.
        RefusedError for an encoder without sources."""
        if self.model.encoder_decoder and sources is None:
            raise RefusedError("an encoder-decoder cannot draft for a causal target")
        first, media = len(self.token_ids), self._find_media(len(prompts))
        if self.model.encoder_decoder or sources is None:
            self.token_ids += [list(prompt) for prompt in prompts]
        else:
            self.token_ids += [[*s, *p] for s, p in zip(sources, prompts, strict=True)]
            sources = None
        self._num_readable += map(self._count_readable, self.token_ids[first:])
        for b, source in enumerate(sources or [], first):
            if not (self._can_encode(source) if source else media[b - first]):
                self._num_readable[b] = -1
        rows = range(first, len(self.token_ids))
        max_tokens, heads = CATCH_UP_TOKENS if first else UNLIMITED_TOKENS, list[list[int]]()
        for b in rows:
            limit = (
                UNLIMITED_TOKENS if media[b - first] else max_tokens
            )  # a text with media is read at once
            head, unread = (
                self._take_head(self.token_ids[b][:-1], limit)
                if self.count_free_positions(b)
                else ([], 0)
            )
            max_tokens -= unread
            heads.append(head)
        self.num_cached += map(len, heads)
        if sources is not None:  # an encoder reads something in every row
            sources = [
                s if self._num_readable[b] >= 0 else [0] for b, s in enumerate(sources, first)
            ]
        return heads, sources

    def _find_media(self, count: int) -> list[bool]:
        """Tell which of the rows that join have media for the model."""
        attached = self.model.joining_media if self.model.capabilities.media else []
        return [media is not None for media in attached] or [False] * count

    def _take_head(self, tokens: list[int], max_tokens: int) -> tuple[list[int], int]:
        """Return the tokens to start a row with, and how many of them are to be read: all, or where
        that is more than `max_tokens` those that the model has kept of other texts; none where
        another reads it."""
        if self._uses_target_cache:
            return [], 0
        cached = self.model.count_cached_tokens(tokens)
        unread = len(tokens) - cached
        return (tokens, unread) if unread <= max_tokens else (tokens[:cached], 0)

    def count_free_positions(self, b: int) -> int:
        """Return how many draft tokens fit in the context behind a row's text; 0 where the model is
        silent."""
        length = len(self.token_ids[b])
        if self._num_readable[b] < length:
            return 0
        context = self.model.context
        return UNLIMITED_TOKENS if context is None else max(0, context - length + 1)

    def get_catch_up_tokens(self, b: int) -> list[int]:
        """Return the tokens to read of a row that is to draft nothing, so that a long text is not
        read in one go when it does."""
        unread = len(self.token_ids[b]) - self.num_cached[b]
        if unread <= CATCH_UP_TOKENS or not self.count_free_positions(b) or self._uses_target_cache:
            return []
        return self.token_ids[b][self.num_cached[b] : self.num_cached[b] + CATCH_UP_TOKENS]

    def compute_budgets(self, gamma: list[int]) -> list[int]:
        """Return how many draft tokens to make in every row where `gamma` are asked for. Tokens
        that a model which shares its rows has read until then are cached."""
        if self._uses_target_cache:
            self.num_cached[:] = self.model.lengths
        unread = [len(text) - n for text, n in zip(self.token_ids, self.num_cached, strict=True)]
        return [
            min(g, self.count_free_positions(b), max(0, self._max_uncached - n))
            for b, (g, n) in enumerate(zip(gamma, unread, strict=True))
        ]

    def update(self, num_removed: list[int], tokens: list[list[int]]) -> None:
        """Every text goes back by so many tokens and on by others; `cached` says what remains."""
        for b, (seq, count, new) in enumerate(
            zip(self.token_ids, num_removed, tokens, strict=True)
        ):
            if count:
                del seq[len(seq) - count :]
                self.num_cached[b] = min(self.num_cached[b], len(seq))
                self._num_readable[b] = min(self._num_readable[b], len(seq))
            if self._num_readable[b] == len(seq):
                self._num_readable[b] += self._count_readable(new)
            seq += new
            # the last token is the target's own or was never fed: it cannot be in the cache
            self.num_cached[b] = min(self.num_cached[b], len(seq) - 1)

    def leave(self, rows: list[int]) -> None:
        """These rows are finished; those behind move up."""
        stay = list_remaining_rows(len(self.token_ids), rows)
        self.token_ids = [self.token_ids[b] for b in stay]
        self.num_cached = [self.num_cached[b] for b in stay]
        self._num_readable = [self._num_readable[b] for b in stay]

    def _count_readable(self, tokens: list[int]) -> int:
        """Count the tokens, from the left, that are ids of the model."""
        V = self.model.vocab_size
        if max(tokens, default=0) < V:
            return len(tokens)
        return sum(1 for _ in takewhile(lambda token: token < V, tokens))

    def _can_encode(self, source: list[int]) -> bool:
        """Tell whether the encoder can read a source: no longer than it may be, of ids it knows."""
        limit, V = self.model.source_context, self.model.source_vocab_size
        fits = limit is None or len(source) <= limit
        return fits and V is not None and max(source, default=0) < V
