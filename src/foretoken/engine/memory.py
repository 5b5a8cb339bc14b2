"""Memory for keys and values, of a target and its drafter together: a budget for rows, and what is
kept of texts that have left."""

from __future__ import annotations

from collections.abc import Sequence

from foretoken.errors import InputError, RefusedError
from foretoken.models.base import Component, Model
from foretoken.request import SequenceState

# For texts that have left, where no budget is stated: bytes, and tokens, whose pages are looked at
# when a row leaves. Rows that run come first, and grow the memory where it is not enough.
DEFAULT_PREFIX_CACHE_BYTES, DEFAULT_PREFIX_CACHE_TOKENS = 1_000_000_000, 65_536


def reserve_prefix_cache(parts: Sequence[Component]) -> None:
    """Room for texts that have left, in the parts that keep them; it is touched as it is used."""
    _reserve(
        parts,
        min(
            DEFAULT_PREFIX_CACHE_BYTES,
            sum(part.memory([DEFAULT_PREFIX_CACHE_TOKENS], [1]) for part in parts),
        ),
    )


def _reserve(parts: Sequence[Component], total: int) -> None:
    """So many bytes, now, shared out by what a token takes, where parts can."""
    shares = [part.memory([1], [1]) for part in parts]
    for part, share in zip(parts, shares, strict=True):
        if share:
            part.reserve(total * share // sum(shares))


class KVCacheBudget:
    """At most `total` bytes for the rows of these parts, counted as if they shared nothing.
    InputError for a total below one token's, RefusedError for parts that do not say what their
    rows take."""

    def __init__(self, parts: list[Component], total: int) -> None:
        for part in parts:
            if isinstance(part, Model) and not part.capabilities.memory:
                raise RefusedError(
                    f"kv_memory is given, but {type(part).__name__} does not say what its rows "
                    "take; leave kv_memory out"
                )
        self.parts, self.total = parts, total
        min_bytes = self._count_bytes([1], [1])
        if total < min_bytes:
            raise InputError(f"kv_memory is {total} bytes, one token takes {min_bytes}; give more")

    def reserve(self) -> None:
        """Take all of it now, where parts can; it is touched as rows need it."""
        _reserve(self.parts, self.total)

    def fits(self, seqs: list[SequenceState], num_new_tokens: int) -> bool:
        """Tell whether there is memory for these rows with `num_new_tokens` tokens more, or to
        their ends."""
        lengths = [min(len(seq.tokens) + num_new_tokens, _max_length(seq)) for seq in seqs]
        return (
            self._count_bytes(lengths, [self._count_source_states(seq) for seq in seqs])
            <= self.total
        )

    def require_fit(self, seq: SequenceState) -> None:
        """InputError for a row that can never fit."""
        if not self.fits([seq], _max_length(seq)):
            prompt, limit = len(seq.request.prompt), seq.request.limit
            takes = self._count_bytes([_max_length(seq)], [self._count_source_states(seq)])
            raise InputError(
                f"a prompt of {prompt} tokens and up to {limit} new ones take {takes} bytes, "
                f"kv_memory is {self.total}; shorten one of them, or give more memory"
            )

    def _count_source_states(self, seq: SequenceState) -> int:
        """States that an encoder makes for a row; of media as many as it can make."""
        if seq.request.media is None:
            return len(seq.request.source or [])
        models = (part for part in self.parts if isinstance(part, Model))
        return max((model.source_context or 0 for model in models), default=0)

    def _count_bytes(self, lengths: list[int], sources: list[int]) -> int:
        return sum(part.memory(lengths, sources) for part in self.parts)


def _max_length(seq: SequenceState) -> int:
    """Tokens of the longest text that the row can become."""
    return len(seq.request.prompt) + seq.request.limit
