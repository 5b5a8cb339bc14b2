"""What a draft model is started with, where it is silent, and what of its cache stays."""

from __future__ import annotations

import pytest

from foretoken.errors import RefusedError
from foretoken.models.draft_sequences import CATCH_UP_TOKENS, UNLIMITED_TOKENS, DraftSequences
from table import TableModel


def reader(**options) -> DraftSequences:
    return DraftSequences(TableModel(lambda text: [0.25] * 4, 4, **options))


def test_all_but_the_last_token_is_read_ahead() -> None:
    rows = reader()
    assert rows.join([[1, 2, 3], [0]], None) == ([[1, 2], []], None)
    assert rows.num_cached == [2, 0] and rows.compute_budgets([5, 0]) == [5, 0]
    assert rows.count_free_positions(0) == UNLIMITED_TOKENS


def test_rows_that_join_others_are_read_ahead_together_as_far_as_one_would_be() -> None:
    rows = reader()
    half = [1] * (CATCH_UP_TOKENS // 2 + 1)
    assert rows.join([half] * 3, None)[0] == [half[:-1]] * 3  # nobody waits
    assert rows.join([half] * 3, None)[0] == [half[:-1], half[:-1], []]
    assert rows.num_cached == [CATCH_UP_TOKENS // 2] * 5 + [0]


def test_a_source_is_the_head_of_a_prompt_where_there_is_no_encoder() -> None:
    assert reader().join([[0]], [[1, 2]]) == ([[1, 2]], None)
    assert reader(encoder_decoder=True).join([[0]], [[1, 2]]) == ([[]], [[1, 2]])
    with pytest.raises(RefusedError, match="cannot draft for a decoder-only target"):
        reader(encoder_decoder=True).join([[0]], None)


def test_an_unreadable_source_is_silence_for_good() -> None:
    rows = reader(encoder_decoder=True)
    assert rows.join([[0, 1], [0, 1]], [[7], [3]]) == ([[], [0]], [[0], [3]])
    assert rows.compute_budgets([2, 2]) == [0, 2]
    rows.update([1, 1], [[2], [2]])
    assert rows.compute_budgets([2, 2]) == [0, 2]


def test_a_source_must_fit_and_be_known() -> None:
    rows = reader(encoder_decoder=True)
    rows.model.source_context, sources = 3, [[0, 1, 3], [1], [0, 4], [0, 0, 0, 0]]
    rows.join([[0]] * 4, sources)
    assert rows.compute_budgets([1] * 4) == [1, 1, 0, 0]


def test_an_unknown_id_is_silence_until_it_is_taken_back() -> None:
    rows = reader()
    assert rows.join([[1, 9, 2]], None) == ([[]], None)
    rows.update([0], [[3]])
    assert rows.count_free_positions(0) == 0
    rows.update([3], [[2, 2]])
    assert rows.count_free_positions(0) == UNLIMITED_TOKENS and rows.token_ids == [[1, 2, 2]]


def test_a_full_context_is_silence() -> None:
    rows = reader(context=4)
    rows.join([[1, 2], [1, 2, 3, 1, 2]], None)
    assert rows.compute_budgets([9, 9]) == [3, 0]  # the last draft token is never fed


def test_the_last_token_is_never_cached() -> None:
    rows = reader()
    rows.join([[1, 2], [1, 2]], None)
    rows.num_cached[:] = [4, 4]  # three draft tokens, of which two were fed
    rows.update([0, 0], [[3], [3, 1, 0, 2]])
    assert rows.num_cached == [2, 4]
    rows.update([2, 0], [[], [1]])
    assert rows.num_cached == [0, 4] and rows.token_ids == [[1], [1, 2, 3, 1, 0, 2, 1]]
    rows.leave([0])
    assert rows.num_cached == [4] and rows.token_ids == [[1, 2, 3, 1, 0, 2, 1]]
