"""Copy from context: what is found, how far it is copied, and which row it belongs to."""

import pytest

from foretoken.drafters.base import Draw
from foretoken.drafters.lookup import LookupDrafter, Repeats
from foretoken.errors import InputError
from foretoken.request import Request
from foretoken.sampling.distributions import SamplingParams
from foretoken.sampling.keys import RowKey


def propose(drafter, gamma):
    keys = [RowKey(0, b) for b in range(len(gamma))]
    draft = drafter.propose(gamma, Draw(keys, [9] * len(gamma), [SamplingParams(1.0)] * len(gamma)))
    assert draft.q is None and draft.calls == 0
    pairs = zip(draft.tokens.tolist(), draft.lengths.tolist(), strict=True)
    return [ids[:n] for ids, n in pairs]


def guesses(prompt, gamma, source=None, longest=8):
    drafter = LookupDrafter(longest)
    drafter.start([0], [prompt], None if source is None else [source])
    return propose(drafter, [gamma])[0]


def test_the_longest_match_wins_over_a_later_one():
    assert guesses([1, 2, 3, 9, 2, 4, 1, 2], 2) == [3, 9]


def test_of_equal_matches_the_most_recent_wins():
    assert guesses([1, 5, 1, 6, 1], 1) == [6]


def test_matches_are_cut_at_longest():
    assert guesses([1, 2, 3, 9, 2, 4, 1, 2], 2, longest=1) == [4, 1]


def test_a_period_goes_on_past_the_end():
    assert guesses([1, 2, 3, 1, 2, 3], 7) == [1, 2, 3, 1, 2, 3, 1]
    assert guesses([4, 4], 3) == [4, 4, 4]


def test_the_end_does_not_match_itself():
    assert guesses([1, 2, 3], 4) == []
    assert guesses([7], 4) == []
    assert guesses([], 4) == []


def test_gamma_zero_gives_nothing():
    assert guesses([1, 1, 1], 0) == []


def test_the_source_is_searched_and_copied_to_its_end():
    assert guesses([0, 5], 9, source=[4, 5, 6, 7]) == [6, 7]


def test_the_text_wins_over_the_source_at_equal_length_and_loses_to_longer():
    assert guesses([5, 8, 5], 1, source=[5, 6]) == [8]
    assert guesses([5, 8, 3, 5], 1, source=[3, 5, 6]) == [6]


def test_no_match_crosses_from_source_to_text():
    assert guesses([2, 3, 1, 2], 2, source=[9, 1]) == [3, 1]
    assert guesses([7, 1], 2, source=[3, 1]) == []


def test_runs_of_equal_hash_are_told_apart(monkeypatch):
    monkeypatch.setattr("foretoken.drafters.lookup.hash", lambda run: 0, raising=False)
    assert guesses([1, 2, 3], 4) == []
    assert guesses([1, 3, 3], 2) == [3, 3]


def repeats(prompt: list[int], source: list[int] | None = None) -> Repeats:
    return Repeats(Request(prompt, 50, RowKey(0, 0), source=source))


def test_repeats_say_what_followed_the_last_four_tokens():
    four = [5, 6, 7, 8]
    assert repeats([*four, 9, 3, *four[1:]]).after([], 2) == []  # three agree
    assert repeats([*four, 9, 3, *four]).after([], 2) == [9, 3]
    assert repeats([5], [*four, 1]).after(four[1:], 4) == [1]
    text = repeats([*four, 9, 3])
    for new, told in (([], []), (four, [9, 3]), ([*four, 9], [3, 5]), ([4, 4], []), (four, [9, 3])):
        assert text.after(new, 2) == told  # a function of the text alone


def test_rows_join_behind_and_leave_closes_the_gap():
    drafter = LookupDrafter()
    drafter.start([0, 1], [[1, 2, 1], [3, 4, 3]], None)
    drafter.start([2], [[5, 6, 5]], None)
    assert propose(drafter, [1, 2, 0]) == [[2], [4, 3], []]
    drafter.leave([0, 1])
    assert propose(drafter, [1]) == [[6]]
    drafter.commit([[7, 5]])
    assert propose(drafter, [2]) == [[7, 5]]
    drafter.leave([0])
    drafter.start([0], [[8, 9, 8]], None)
    assert propose(drafter, [1]) == [[9]]


def test_longest_must_be_positive():
    with pytest.raises(InputError, match="longest is 0"):
        LookupDrafter(0)
