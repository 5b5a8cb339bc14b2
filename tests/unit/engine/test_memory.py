"""A budget for keys and values: what fits, what never does, and how it is shared out."""

from __future__ import annotations

from typing import Any

import pytest

from foretoken.drafters.lm import LMDrafter
from foretoken.drafters.lookup import LookupDrafter
from foretoken.engine.memory import (
    DEFAULT_PREFIX_CACHE_BYTES,
    DEFAULT_PREFIX_CACHE_TOKENS,
    KVCacheBudget,
    reserve_prefix_cache,
)
from foretoken.errors import InputError, RefusedError
from foretoken.models.base import Capabilities
from foretoken.request import Request, SequenceState
from foretoken.sampling.keys import SequenceKey
from oracle import random_model
from table import TableModel

V = 4


class SizedTable(TableModel):
    """Tokens of its own are `size` bytes, those of sources one."""

    capabilities = Capabilities(memory=True, prefix_cache=True)

    def __init__(self, size: int = 2, **options: Any) -> None:
        super().__init__(random_model(1, V), V, **options)
        self.size, self.reserved = size, 0

    def compute_cache_bytes(self, lengths: list[int], sources: list[int]) -> int:
        return self.size * sum(lengths) + self.encoder_decoder * sum(sources)

    def reserve(self, total: int) -> None:
        self.reserved = total


def row(prompt: int, limit: int, source: list[int] | None = None) -> SequenceState:
    return SequenceState.from_request(
        Request([1] * prompt, limit, SequenceKey(0, 0), source=source)
    )


def test_rows_fit_up_to_the_last_byte() -> None:
    memory = KVCacheBudget([SizedTable(2)], 20)
    one, other = row(3, 9), row(5, 1)
    assert memory.fits([one, other], 1)  # 4 + 6
    assert not memory.fits([one, other], 2)  # 5 + 6
    assert memory.fits([one], 7) and not memory.fits([one], 8)
    assert memory.fits([other], 100)  # it ends before


def test_sources_and_drafts_count() -> None:
    target, draft = SizedTable(2, encoder_decoder=True), SizedTable(1)
    memory = KVCacheBudget([target, draft], 18)
    assert memory.fits([row(1, 3, source=[0] * 6)], 3)  # 2 * 4 + 6, and 4
    assert not memory.fits([row(1, 3, source=[0] * 7)], 3)


def test_what_can_never_fit_is_said_with_the_numbers() -> None:
    memory = KVCacheBudget([SizedTable(2), SizedTable(1), LookupDrafter()], 30)
    memory.require_fit(row(4, 6))
    with pytest.raises(
        InputError, match="prompt of 4 tokens and up to 7 new tokens take 33 bytes, "
    ):
        memory.require_fit(row(4, 7))
    with pytest.raises(InputError, match="kv_memory is 2 bytes, but one token takes 3"):
        KVCacheBudget([SizedTable(2), SizedTable(1)], 2)


def test_models_that_do_not_say_what_they_take_are_refused() -> None:
    plain = TableModel(random_model(1, V), V)
    with pytest.raises(RefusedError, match="TableModel does not report the memory"):
        KVCacheBudget([SizedTable(), LMDrafter(plain, V), plain], 99)


def test_each_part_is_given_its_share() -> None:
    target, draft = SizedTable(3), SizedTable(1)
    KVCacheBudget([target, draft], 100).reserve()
    assert (target.reserved, draft.reserved) == (75, 25)


@pytest.mark.parametrize(
    ("size", "total"),
    [
        (2, 3 * DEFAULT_PREFIX_CACHE_TOKENS),
        (DEFAULT_PREFIX_CACHE_BYTES // 9, DEFAULT_PREFIX_CACHE_BYTES),
    ],
)
def test_texts_that_have_left_have_some_room_shared_out_by_what_a_token_takes(
    size: int, total: int
) -> None:
    target, draft = SizedTable(size), SizedTable(size // 2)
    reserve_prefix_cache([target, draft, LookupDrafter()])
    assert target.reserved + draft.reserved == pytest.approx(total, abs=2)
    assert target.reserved == pytest.approx(2 * draft.reserved, rel=1e-6)
