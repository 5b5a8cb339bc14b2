"""A text in a draft's ids as it grows and shrinks, and its end within a longer token."""

from __future__ import annotations

import pytest
import torch

from foretoken.models.vocabularies.translation import (
    MAX_WORD_TOKENS,
    Translation,
    find_continuations,
)
from foretoken.models.vocabularies.vocabulary import Vocabulary, VocabularyMap
from unit.models.vocabularies.test_words import TOKENIZERS, words

TEXT = 'ab a bab, naïve;\n  "ab" — 日本語 \U0001f600 aaab\n\nthe day'
KINDS = [(a, b) for a in TOKENIZERS for b in TOKENIZERS if a != b]


def translation(ours: str, theirs: str, text: str = "") -> Translation:
    result = Translation(VocabularyMap(words(ours), words(theirs)))
    result.extend(TOKENIZERS[ours]()(text).input_ids if text else [])
    return result


@pytest.mark.parametrize(("ours", "theirs"), KINDS)
def test_it_is_what_the_other_tokenizer_makes_of_the_text(ours, theirs):
    text = "the day ab a, the old man"
    assert translation(ours, theirs, text).draft_ids == TOKENIZERS[theirs]()(text).input_ids


@pytest.mark.parametrize(("ours", "theirs"), KINDS)
def test_it_is_a_function_of_the_text_however_that_came(ours, theirs):
    whole, grown = translation(ours, theirs, TEXT), translation(ours, theirs)
    told = []
    for token in whole.ids:
        grown.extend([token])
        told.append(grown.draft_ids)
    assert grown.draft_ids == whole.draft_ids
    for n in range(len(whole.ids), 0, -1):
        grown.cut(n)
        assert grown.draft_ids == told[n - 1]
    grown.extend(whole.ids[1:])
    assert grown.draft_ids == whole.draft_ids


def test_a_new_token_changes_the_last_word_alone():
    grown = translation("bytes", "legacy", "the day was over before the house was warm, and")
    before = grown.draft_ids
    grown.extend(TOKENIZERS["bytes"]()(" the").input_ids)
    grown.extend(TOKENIZERS["bytes"]()("re").input_ids)
    assert grown.draft_ids[: len(before)] == before


def test_a_copy_goes_its_own_way():
    one = translation("bytes", "legacy", "the day")
    other, told = one.copy(), one.draft_ids
    other.extend(one.ids)
    assert one.draft_ids == told != other.draft_ids


def test_a_long_word_is_told_in_parts():
    grown = Translation(VocabularyMap(Vocabulary({0: b"a"}), Vocabulary({0: b"aa", 1: b"a"})))
    grown.extend([0] * (MAX_WORD_TOKENS + 3))
    assert grown.draft_ids == [0] * (MAX_WORD_TOKENS // 2) + [0, 1]


def test_there_is_always_something_to_read():
    assert Translation(VocabularyMap(Vocabulary({0: b"a"}), Vocabulary({0: b"b"}))).draft_ids == [0]
    grown = Translation(VocabularyMap(Vocabulary({0: b"a"}), Vocabulary({0: b"b"}, eos_id=7)))
    grown.extend([0])
    assert grown.draft_ids == [7]


def test_special_tokens_are_told_once_and_those_that_the_draft_lacks_not_at_all():
    ours = Vocabulary({5: b"a"}, special_ids={"<s>": 0, "<end>": 1, "<tool>": 2}, eos_id=1)
    theirs = Vocabulary({7: b"a"}, special_ids={"<s>": 3, "</s>": 4}, eos_id=4, prefix_ids=[3])
    grown = Translation(VocabularyMap(ours, theirs))
    grown.extend([0, 5, 2, 5, 1, 9])
    assert grown.draft_ids == [3, 7, 7, 4]


OURS = Vocabulary({0: b"a", 1: b"b", 2: b"ab", 3: b" ", 4: b" ab"}, eos_id=9)
THEIRS = Vocabulary({0: b"b", 1: b" a", 2: b"a", 3: b" "}, eos_id=5)


@pytest.mark.parametrize(
    ("text", "written", "draft_tokens"),
    [
        ([2], [1, 0, 1], [4, 3, 0]),  # " ab", " a": the last word as far as it goes
        ([2], [2, 0], [2]),  # the words of ours "ab" and "ab"
        ([0], [0], []),  # "ab" is one token of the target's, which the text does not begin
        ([0], [1], [3, 0]),
        ([2], [1, 0, 5], [4, 9]),  # the end is the target's own
        ([2], [5], [9]),
        ([], [2, 0], [2]),
        ([9], [2], [0]),
        ([2], [], []),
    ],
)
def test_draft_tokens_are_what_was_written_in_the_targets_tokens(text, written, draft_tokens):
    grown = Translation(VocabularyMap(OURS, THEIRS))
    grown.extend(text)
    assert grown.to_target_tokens(written) == draft_tokens


@pytest.mark.parametrize(("ours", "theirs"), KINDS)
def test_the_rest_of_a_text_is_guessed_whole(ours, theirs):
    """Whatever the seam, where the draft writes what the target's tokenizer goes on with."""
    text, rest = "the day was ab", " ab a ab, the sea"
    whole = TOKENIZERS[ours]()(text + rest).input_ids
    grown = translation(ours, theirs, text)
    if whole[: len(grown.ids)] == grown.ids:
        written = words(theirs).tokenize(rest.encode())
        assert grown.to_target_tokens(written) == whole[len(grown.ids) :]


OURS_SEAM = Vocabulary({0: b" day", 1: b",", 2: b"s", 3: b" days", 4: b" ", 5: b"!!"}, eos_id=6)
THEIRS_SEAM = Vocabulary(
    {0: b" day", 1: b" day,", 2: b" days", 3: b" day!!", 4: b" ", 5: b" day!?"}
)


def text(*tokens: int) -> Translation:
    translation = Translation(VocabularyMap(OURS_SEAM, THEIRS_SEAM))
    translation.extend(tokens)
    return translation


def logits(*probabilities: float) -> torch.Tensor:
    return torch.tensor([*probabilities, *[1e-9] * (6 - len(probabilities))]).double().log()


def test_they_go_on_from_the_text_without_another_cut_of_it():
    """ " days" is one token of the target's, which the text does not begin."""
    ways = find_continuations(text(0), logits(0.3, 0.1, 0.5, 0.2))
    assert [(way.token, way.suffix, way.target_token) for way in ways] == [
        (3, b"!!", 5),
        (1, b",", 1),
    ]
    assert [way.share for way in ways] == pytest.approx([0.2 / 0.6, 0.1 / 0.6])


def test_unlikely_ones_are_not_weighed():
    assert not find_continuations(text(0), logits(0.5, 0.004, 0.4))


def test_behind_what_has_none_longer_there_are_none():
    assert text(0).last_draft_id == 0 and text(0, 1).last_draft_id is None
    assert not find_continuations(text(0, 1), logits(0.5, 0.5))
    assert text(6).last_draft_id is None and text().last_draft_id is None


def test_invalid_numbers_are_no_ways_on():
    assert not find_continuations(text(0), torch.full((6,), torch.nan))
