"""Which ids of two vocabularies mean the same."""

from __future__ import annotations

import pytest

from foretoken.errors import RefusedError
from foretoken.models.vocabularies.words import Dictionary, Words


def test_words_are_the_same_by_their_bytes():
    both = Dictionary(Words({0: b"a", 1: b" b", 5: b"c"}), Words({0: b" b", 1: b"d", 2: b"a"}))
    assert list(zip(both.ours, both.theirs, strict=True)) == [(0, 2), (1, 0)]
    assert both.words == 2


def test_words_that_are_spelled_alike_count_once():
    both = Dictionary(Words({0: b"a", 1: b"a"}), Words({3: b"a", 4: b"a"}))
    assert (both.ours, both.theirs) == ([0], [3])


def test_special_tokens_are_the_same_by_name_and_ends_by_what_they_do():
    ours = Words({5: b"a"}, specials={"<s>": 0, "<end>": 1, "<tool>": 2}, end=1)
    theirs = Words({7: b"a"}, specials={"<s>": 3, "</s>": 4, "<tool>": 6}, end=4)
    assert Dictionary(ours, theirs).special == {0: 3, 1: 4, 2: 6}


def test_no_id_of_the_draft_stands_for_two():
    ours = Words({5: b"a"}, specials={"<e>": 0, "<f>": 1}, end=1)
    theirs = Words({7: b"a"}, specials={"<e>": 2}, end=2)
    both = Dictionary(ours, theirs)
    assert both.special == {1: 2}
    assert len(set(both.theirs)) == len(both.theirs)


def test_vocabularies_without_a_common_word_are_refused_in_a_line():
    both = Dictionary(Words({0: b"a", 1: b"b"}), Words({0: b"x"}))
    with pytest.raises(RefusedError) as error:
        both.require("./small", "./big")
    assert str(error.value) == (
        "./small shares none of its 1 words with the 2 of ./big; give a draft for texts of the "
        "same kind, or draft='lookup'"
    )
