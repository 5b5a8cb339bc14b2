"""Pages by the texts that they hold."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from foretoken.models.openvino.pages import Prefixes

SIZE = 2


def test_the_longest_known_beginning_in_whole_pages() -> None:
    prefixes = Prefixes()
    prefixes.note([1, 2, 3, 4, 5], [7, 8, 9], SIZE, "")
    assert prefixes.find([1, 2, 3, 4, 5, 6], SIZE, "") == [7, 8]
    assert prefixes.find([1, 2, 3], SIZE, "") == [7]
    assert prefixes.find([1, 3, 3, 4], SIZE, "") == prefixes.find([1], SIZE, "") == []
    assert prefixes.find([3, 4], SIZE, "") == []  # not a beginning


def test_salts_are_apart() -> None:
    prefixes = Prefixes()
    prefixes.note([1, 2], [7], SIZE, "mine")
    assert prefixes.find([1, 2], SIZE, "") == prefixes.find([1, 2], SIZE, "yours") == []
    assert prefixes.find([1, 2], SIZE, "mine") == [7]


def test_what_is_written_anew_is_forgotten_with_what_stands_behind_it() -> None:
    prefixes = Prefixes()
    prefixes.note([1, 2, 3, 4, 5, 6], [7, 8, 9], SIZE, "")
    prefixes.note([1, 2, 4, 4], [7, 5], SIZE, "")
    prefixes.forget(8)
    assert prefixes.find([1, 2, 3, 4, 5, 6], SIZE, "") == [7]
    assert prefixes.find([1, 2, 4, 4], SIZE, "") == [7, 5]
    assert [page in prefixes for page in (7, 5, 8, 9)] == [True, True, False, False]
    prefixes.forget(99)
    prefixes.note([1, 2, 3, 4], [7, 8], SIZE, "")  # and may be known again
    assert prefixes.find([1, 2, 3, 4], SIZE, "") == [7, 8]


def test_equal_texts_in_other_pages_are_known_once() -> None:
    prefixes = Prefixes()
    prefixes.note([1, 2, 3, 4], [7, 8], SIZE, "")
    prefixes.note([1, 2, 3, 4, 5, 6], [4, 5, 6], SIZE, "")
    assert prefixes.find([1, 2, 3, 4, 5, 6], SIZE, "") == [7, 8, 6]
    assert 4 not in prefixes and 5 not in prefixes


TEXTS = st.lists(st.lists(st.integers(0, 1), max_size=9), max_size=12)


@given(texts=TEXTS, forgotten=st.lists(st.integers(0, 40), max_size=8))
def test_what_is_found_holds_the_text(texts: list[list[int]], forgotten: list[int]) -> None:
    """Every page found holds its part of the text behind the very same beginning."""
    prefixes, holds, page = Prefixes(), dict[int, list[int]](), 0
    for i, text in enumerate(texts):
        pages = prefixes.find(text, SIZE, "")
        while len(pages) < len(text) // SIZE:
            page += 1
            pages.append(page)
            holds[page] = text[: len(pages) * SIZE]
        prefixes.note(text, pages, SIZE, "")
        if i < len(forgotten):
            prefixes.forget(forgotten[i])
            holds.pop(forgotten[i], None)
    for text in texts:
        for place, match in enumerate(prefixes.find(text, SIZE, ""), 1):
            assert holds[match] == text[: place * SIZE]


def test_a_salt_whose_pages_are_gone_takes_no_memory() -> None:
    prefixes = Prefixes()
    for i in range(50):
        prefixes.note([1, i, 2, 2], [0, 1], SIZE, f"user {i}")
        prefixes.note([1], [2], SIZE, f"nothing whole {i}")
        prefixes.forget(0)
    assert not prefixes._pages and not prefixes._places and not prefixes._behind
