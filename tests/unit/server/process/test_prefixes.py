"""Digests of beginnings."""

from __future__ import annotations

import pytest

from foretoken.server.process.fleet import DIGEST_CHARACTERS, DIGEST_IDS, digests
from foretoken.server.process.messages import GenerateRequest


@pytest.mark.parametrize(
    ("long", "unit"),
    [("".join(map(str, range(400))), DIGEST_CHARACTERS), ([*range(400)], DIGEST_IDS)],
)
def test_a_longer_prompt_begins_with_the_digests_of_a_shorter(long, unit: int) -> None:
    whole = digests(GenerateRequest(long))
    assert len(whole) == len(long) // unit and len(set(whole)) == len(whole)
    for cut in (0, 1, unit - 1, unit, 3 * unit + 1):
        assert digests(GenerateRequest(long[:cut])) == whole[: cut // unit]
    other = digests(GenerateRequest(long[unit:]))
    assert not set(other) & set(whole), "a digest stands for all before it too"


def test_turns_extend_each_other_and_salts_part_them() -> None:
    talk = [
        {"role": "user", "content": "word " * 40},
        {"role": "assistant", "content": "yes " * 40},
    ]
    first, both = digests(GenerateRequest(talk[:1])), digests(GenerateRequest(talk))
    assert both[: len(first)] == first and len(both) > len(first) > 1
    assert not set(first) & set(digests(GenerateRequest(talk[:1], cache_salt="b")))
    assert digests(GenerateRequest([{"role": "user", "content": None}])) == []
