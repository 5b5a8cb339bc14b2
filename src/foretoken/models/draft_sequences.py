"""The token ids and cache lengths of a draft model's sequences, for all drafters that use a model.

If the target is an encoder-decoder and the draft model is decoder-only, the draft model's prompt is
the source followed by the target's prompt. A model makes no draft tokens for a sequence that is
longer than its context or that contains an id outside its vocabulary.
"""

from __future__ import annotations

from itertools import takewhile

from foretoken.errors import RefusedError
from foretoken.models.base import Model
from foretoken.models.row_slots import list_remaining_rows

CATCH_UP_TOKENS = 128  # maximum prefill in a step: long prompts must not delay other sequences
UNLIMITED_TOKENS = 10**9  # for a model without a context limit


class DraftSequences:
    """The sequences of a draft model: their token ids, and how many tokens of each are in the
    model's cache. Does not run the model."""

    def __init__(self, model: Model) -> None:
        self.model = model
        self._uses_target_cache = model.capabilities.target_rows
        # recurrent states in the target's cache can be rewound by this many tokens at most
        limit = model.max_rewind if self._uses_target_cache else None
        self._max_uncached = UNLIMITED_TOKENS if limit is None else limit
        self.token_ids: list[list[int]] = []  # committed tokens
        self.num_cached: list[int] = []  # tokens of each sequence in the model's cache
        # for each sequence, the number of tokens before the first one outside the model's
        # vocabulary; -1: the model cannot encode the source
        self._num_readable: list[int] = []

    def join(
        self, prompts: list[list[int]], sources: list[list[int]] | None
    ) -> tuple[list[list[int]], list[list[int]] | None]:
        """Add sequences; return the prompts and sources to start the model with.

        A returned prompt lacks the sequence's last token, and is empty if the model cannot draft
        for the sequence. If prefilling the prompt would delay running sequences, only its cached
        prefix is returned, and later steps prefill the rest (`get_catch_up_tokens`).
        Raises RefusedError for an encoder-decoder model without sources.
        """
        if self.model.encoder_decoder and sources is None:
            raise RefusedError(
                "an encoder-decoder cannot draft for a decoder-only target; give a decoder-only "
                "draft"
            )
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
        # if no sequence is running, a long prefill delays nothing
        max_tokens, heads = CATCH_UP_TOKENS if first else UNLIMITED_TOKENS, list[list[int]]()
        for b in rows:
            # a prompt with media must be prefilled in one call
            limit = UNLIMITED_TOKENS if media[b - first] else max_tokens
            head, uncached = (
                self._take_head(self.token_ids[b][:-1], limit)
                if self.count_free_positions(b)
                else ([], 0)
            )
            max_tokens -= uncached
            heads.append(head)
        self.num_cached += map(len, heads)
        if sources is not None:  # no source may be empty
            sources = [
                s if self._num_readable[b] >= 0 else [0] for b, s in enumerate(sources, first)
            ]
        return heads, sources

    def _find_media(self, count: int) -> list[bool]:
        """Return, for each sequence that joins, whether it has media that the model takes."""
        attached = self.model.joining_media if self.model.capabilities.media else []
        return [media is not None for media in attached] or [False] * count

    def _take_head(self, tokens: list[int], max_tokens: int) -> tuple[list[int], int]:
        """Return the tokens with which to start a sequence, and how many of them must be prefilled:
        all of `tokens`; the cached prefix if more than `max_tokens` are uncached; none if the model
        shares the target's cache."""
        if self._uses_target_cache:
            return [], 0
        cached = self.model.count_cached_tokens(tokens)
        uncached = len(tokens) - cached
        return (tokens, uncached) if uncached <= max_tokens else (tokens[:cached], 0)

    def count_free_positions(self, b: int) -> int:
        """Return how many draft tokens fit in the context after sequence b; 0 if the model cannot
        draft for it."""
        length = len(self.token_ids[b])
        if self._num_readable[b] < length:
            return 0
        context = self.model.context
        return UNLIMITED_TOKENS if context is None else max(0, context - length + 1)

    def get_catch_up_tokens(self, b: int) -> list[int]:
        """Return the tokens of sequence b to prefill in a step without draft tokens for it, so that
        a later step with draft tokens needs no long prefill."""
        n = self.num_cached[b]
        uncached = len(self.token_ids[b]) - n
        if (
            uncached <= CATCH_UP_TOKENS
            or not self.count_free_positions(b)
            or self._uses_target_cache
        ):
            return []
        return self.token_ids[b][n : n + CATCH_UP_TOKENS]

    def compute_budgets(self, gamma: list[int]) -> list[int]:
        """Return how many draft tokens to make for each sequence b: gamma[b], or fewer if the
        context or the recurrent states do not allow gamma[b]. Updates `num_cached` for a model that
        shares the target's cache."""
        if self._uses_target_cache:
            self.num_cached[:] = self.model.lengths
        uncached = [len(ids) - n for ids, n in zip(self.token_ids, self.num_cached, strict=True)]
        return [
            min(g, self.count_free_positions(b), max(0, self._max_uncached - n))
            for b, (g, n) in enumerate(zip(gamma, uncached, strict=True))
        ]

    def update(self, num_removed: list[int], tokens: list[list[int]]) -> None:
        """Remove the last num_removed[b] tokens of each sequence b, then append tokens[b]. Lowers
        num_cached[b] to the number of tokens whose cache remains valid."""
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
            # the last token is not cached: the draft model has not run over a token that the target
            # chose, nor over the last draft token
            self.num_cached[b] = min(self.num_cached[b], len(seq) - 1)

    def leave(self, rows: list[int]) -> None:
        """Remove these sequences; later sequences move up."""
        stay = list_remaining_rows(len(self.token_ids), rows)
        self.token_ids = [self.token_ids[b] for b in stay]
        self.num_cached = [self.num_cached[b] for b in stay]
        self._num_readable = [self._num_readable[b] for b in stay]

    def _count_readable(self, tokens: list[int]) -> int:
        """Return how many of the first tokens are in the model's vocabulary."""
        V = self.model.vocab_size
        if max(tokens, default=0) < V:
            return len(tokens)
        return sum(1 for _ in takewhile(lambda token: token < V, tokens))

    def _can_encode(self, source: list[int]) -> bool:
        """Return whether a source fits the encoder's context and vocabulary."""
        limit, V = self.model.source_context, self.model.source_vocab_size
        fits = limit is None or len(source) <= limit
        return fits and V is not None and max(source, default=0) < V
