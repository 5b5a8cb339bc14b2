"""Memory for the KV caches of a target and its drafter: a budget for the running sequences, and
memory for the prefix cache."""

from __future__ import annotations

from collections.abc import Sequence

from foretoken.errors import InputError, RefusedError
from foretoken.models.base import Component, Model
from foretoken.request import SequenceState

# Without kv_memory, the prefix cache is limited to the smaller of these two sizes. The number of
# tokens is limited because the cache's pages are searched when a sequence leaves. Running sequences
# take precedence and may allocate more.
DEFAULT_PREFIX_CACHE_BYTES, DEFAULT_PREFIX_CACHE_TOKENS = 1_000_000_000, 65_536


def reserve_prefix_cache(parts: Sequence[Component]) -> None:
    """Reserve memory for the prefix caches of these models and drafters. The operating system
    commits the memory as it is used."""
    _reserve(
        parts,
        min(
            DEFAULT_PREFIX_CACHE_BYTES,
            sum(part.compute_cache_bytes([DEFAULT_PREFIX_CACHE_TOKENS], [1]) for part in parts),
        ),
    )


def _reserve(parts: Sequence[Component], total: int) -> None:
    """Reserve `total` bytes, divided among the parts in proportion to their bytes per token."""
    shares = [part.compute_cache_bytes([1], [1]) for part in parts]
    for part, share in zip(parts, shares, strict=True):
        if share:
            part.reserve(total * share // sum(shares))


class KVCacheBudget:
    """A limit of `total` bytes for the KV caches of `parts`: the target, the drafter and the models
    that these contain. Memory is counted as if sequences shared no prefix.

    Raises InputError if `total` is too small for one token, RefusedError if a part does not report
    its memory.
    """

    def __init__(self, parts: list[Component], total: int) -> None:
        for part in parts:
            if isinstance(part, Model) and not part.capabilities.memory:
                raise RefusedError(
                    f"kv_memory is given, but {type(part).__name__} does not report the memory of "
                    "its KV cache; leave kv_memory out"
                )
        self.parts, self.total = parts, total
        min_bytes = self._count_bytes([1], [1])
        if total < min_bytes:
            raise InputError(
                f"kv_memory is {total} bytes, but one token takes {min_bytes} bytes; give more"
            )

    def reserve(self) -> None:
        """Reserve the whole budget in the parts that can reserve memory. The operating system
        commits the memory as it is used."""
        _reserve(self.parts, self.total)

    def fits(self, seqs: list[SequenceState], num_new_tokens: int) -> bool:
        """Return whether these sequences fit if each gets `num_new_tokens` more tokens, or fewer if
        it then has its maximum length."""
        lengths = [min(len(seq.tokens) + num_new_tokens, _max_length(seq)) for seq in seqs]
        return (
            self._count_bytes(lengths, [self._count_source_states(seq) for seq in seqs])
            <= self.total
        )

    def require_fit(self, seq: SequenceState) -> None:
        """Raise InputError if a sequence does not fit at its maximum length."""
        if not self.fits([seq], _max_length(seq)):
            prompt, limit = len(seq.request.prompt), seq.request.limit
            takes = self._count_bytes([_max_length(seq)], [self._count_source_states(seq)])
            raise InputError(
                f"a prompt of {prompt} tokens and up to {limit} new tokens take {takes} bytes, but "
                f"kv_memory is {self.total}; give a shorter prompt, fewer new tokens or more memory"
            )

    def _count_source_states(self, seq: SequenceState) -> int:
        """Return the length of a sequence's encoder output; for a sequence with media, the greatest
        possible length."""
        if seq.request.media is None:
            return len(seq.request.source or [])
        models = (part for part in self.parts if isinstance(part, Model))
        return max((model.source_context or 0 for model in models), default=0)

    def _count_bytes(self, lengths: list[int], sources: list[int]) -> int:
        return sum(part.compute_cache_bytes(lengths, sources) for part in self.parts)


def _max_length(seq: SequenceState) -> int:
    return len(seq.request.prompt) + seq.request.limit
