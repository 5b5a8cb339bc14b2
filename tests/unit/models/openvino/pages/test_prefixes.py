"""Pages by the texts that they hold."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from foretoken.models.openvino.pages.prefixes import Prefixes

SIZE = 2


def test_the_longest_known_beginning_in_whole_pages() -> None:
    known = Prefixes()
    known.note([1, 2, 3, 4, 5], [7, 8, 9], SIZE, "")
    assert known.find([1, 2, 3, 4, 5, 6], SIZE, "") == [7, 8]
    assert known.find([1, 2, 3], SIZE, "") == [7]
    assert known.find([1, 3, 3, 4], SIZE, "") == known.find([1], SIZE, "") == []
    assert known.find([3, 4], SIZE, "") == []  # not a beginning


def test_salts_are_apart() -> None:
    known = Prefixes()
    known.note([1, 2], [7], SIZE, "mine")
    assert known.find([1, 2], SIZE, "") == known.find([1, 2], SIZE, "yours") == []
    assert known.find([1, 2], SIZE, "mine") == [7]


def test_what_is_written_anew_is_forgotten_with_what_stands_behind_it() -> None:
    known = Prefixes()
    known.note([1, 2, 3, 4, 5, 6], [7, 8, 9], SIZE, "")
    known.note([1, 2, 4, 4], [7, 5], SIZE, "")
    known.forget(8)
    assert known.find([1, 2, 3, 4, 5, 6], SIZE, "") == [7]
    assert known.find([1, 2, 4, 4], SIZE, "") == [7, 5]
    assert [page in known for page in (7, 5, 8, 9)] == [True, True, False, False]
    known.forget(99)
    known.note([1, 2, 3, 4], [7, 8], SIZE, "")  # and may be known again
    assert known.find([1, 2, 3, 4], SIZE, "") == [7, 8]


def test_equal_texts_in_other_pages_are_known_once() -> None:
    known = Prefixes()
    known.note([1, 2, 3, 4], [7, 8], SIZE, "")
    known.note([1, 2, 3, 4, 5, 6], [4, 5, 6], SIZE, "")
    assert known.find([1, 2, 3, 4, 5, 6], SIZE, "") == [7, 8, 6]
    assert 4 not in known and 5 not in known


TEXTS = st.lists(st.lists(st.integers(0, 1), max_size=9), max_size=12)


@given(texts=TEXTS, forgotten=st.lists(st.integers(0, 40), max_size=8))
def test_what_is_found_holds_the_text(texts: list[list[int]], forgotten: list[int]) -> None:
    """Every page found holds its part of the text behind the very same beginning."""
    known, holds, page = Prefixes(), dict[int, list[int]](), 0
    for i, text in enumerate(texts):
        pages = known.find(text, SIZE, "")
        while len(pages) < len(text) // SIZE:
            page += 1
            pages.append(page)
            holds[page] = text[: len(pages) * SIZE]
        known.note(text, pages, SIZE, "")
        if i < len(forgotten):
            known.forget(forgotten[i])
            holds.pop(forgotten[i], None)
    for text in texts:
        for place, found in enumerate(known.find(text, SIZE, ""), 1):
            assert holds[found] == text[: place * SIZE]


def test_a_salt_whose_pages_are_gone_takes_no_memory() -> None:
    known = Prefixes()
    for i in range(50):
        known.note([1, i, 2, 2], [0, 1], SIZE, f"user {i}")
        known.note([1], [2], SIZE, f"nothing whole {i}")
        known.forget(0)
    assert not known._roots and not known._nodes
