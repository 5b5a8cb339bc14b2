"""Tokens as bytes, texts as tokens, and the ids of two vocabularies that mean the same."""

from __future__ import annotations

import pytest

from foretoken.errors import RefusedError
from foretoken.models.vocabularies.vocabulary import Vocabulary, VocabularyMap
from tiny import TEXT, byte_level, legacy, metaspace

pytestmark = pytest.mark.daily

TOKENIZERS = {"bytes": byte_level, "metaspace": metaspace, "legacy": legacy}


def words(kind: str) -> Vocabulary:
    return Vocabulary.from_tokenizer(kind, TOKENIZERS[kind](), 10_000)


@pytest.mark.parametrize("kind", TOKENIZERS)
@pytest.mark.parametrize("text", ["a cab", "naïve 日本語 \U0001f600", "x\n  y\tz", TEXT])
def test_tokens_stand_for_the_text_that_they_were_made_of(kind, text):
    own, tokenizer = words(kind), TOKENIZERS[kind]()
    tokens = tokenizer(text, add_special_tokens=False).input_ids
    spelled = own.to_bytes(tokens)
    lost = kind == "metaspace" and "\t" in text  # it has no such byte
    assert lost or own.strip_space(spelled) == text.encode()


@pytest.mark.parametrize("kind", TOKENIZERS)
def test_a_word_within_a_text_gets_no_space_that_it_does_not_have(kind):
    own = words(kind)
    for word in (b" ab", b"ab", b"b", "ï".encode(), b" \xf0\x9f", b"\n"):
        assert own.to_bytes(own.tokenize(word)) == word


def test_a_word_is_cut_as_its_tokenizer_cuts_it():
    tokenizer, own = legacy(), words("legacy")
    assert own.tokenize(b" ab") == (tokenizer.convert_tokens_to_ids("\u2581ab"),)
    assert own.tokenize(b"ab") == (tokenizer.convert_tokens_to_ids("ab"),)


def test_an_incomplete_character_leaves_the_words_before_it_as_they_are():
    tokenizer, own = byte_level(), words("bytes")
    text = " the day \U0001f600"
    whole = own.tokenize(text.encode()[:-1])
    assert own.to_bytes(whole) == text.encode()[:-1]
    head = tokenizer(" the day", add_special_tokens=False).input_ids
    assert list(whole[: len(head)]) == head


@pytest.mark.parametrize("before", [True, False])
def test_how_the_tokenizer_was_called_does_not_matter(before):
    tokenizer = byte_level()

    def call() -> None:
        tokenizer(["the day was over", "a"], truncation=True, max_length=2, padding="max_length")

    tokenizer.pad_token = tokenizer.eos_token
    if before:
        call()
    own = Vocabulary.from_tokenizer("target", tokenizer, 320)
    if not before:
        call()
    assert own.to_bytes(own.tokenize(b" the day was over")) == b" the day was over"
    assert own.tokenize(b" the day was over") == words("bytes").tokenize(b" the day was over")


def test_heads_ends_and_the_space_before_a_text():
    bytes_, spaced = words("bytes"), words("legacy")
    assert (bytes_.prefix_ids, bytes_.eos_id, bytes_.adds_space) == ([], 0, False)
    assert (spaced.prefix_ids, spaced.eos_id, spaced.adds_space) == ([1], 2, True)
    assert set(spaced.special_ids) == {"<s>", "</s>"}  # what is unknown means nothing elsewhere
    assert (
        spaced.add_space(b"a") == b" a"
        and spaced.strip_space(b" a") == b"a"
        and spaced.add_space(b"") == b""
    )
    assert bytes_.add_space(b"a") == b"a" and bytes_.strip_space(b" a") == b" a"


def test_of_words_spelled_alike_the_first_and_no_single_byte_is_used():
    own = words("legacy")
    assert own.ids_by_bytes[b"a"] == 4 and own.spellings[9 + ord("a")] == b"a"


def test_without_a_tokenizer_texts_are_cut_into_the_longest_words():
    own = Vocabulary({0: b"a", 1: b"ab", 2: b" ", 3: b""})
    assert own.tokenize(b"aba ab") == (1, 0, 2, 1)
    assert own.tokenize(b"axb") == (0,)  # what no word begins with is left out
    assert own.tokenize(b"\xffa") == (0,)
    assert 3 not in own.spellings and own.eos_id is None


def test_ids_that_the_output_layer_lacks_are_no_words():
    assert max(Vocabulary.from_tokenizer("target", byte_level(), 300).spellings) == 299


def test_a_tokenizer_that_shows_no_spelling_is_refused():
    class Slow:
        pass

    with pytest.raises(RefusedError, match="draft has no fast tokenizer .Slow.*lookup"):
        Vocabulary.from_tokenizer("draft", Slow(), 10)


def test_words_are_the_same_by_their_bytes():
    both = VocabularyMap(
        Vocabulary({0: b"a", 1: b" b", 5: b"c"}), Vocabulary({0: b" b", 1: b"d", 2: b"a"})
    )
    assert list(zip(both.target_ids, both.draft_ids, strict=True)) == [(0, 2), (1, 0)]
    assert both.num_shared == 2


def test_words_that_are_spelled_alike_count_once():
    both = VocabularyMap(Vocabulary({0: b"a", 1: b"a"}), Vocabulary({3: b"a", 4: b"a"}))
    assert (both.target_ids, both.draft_ids) == ([0], [3])


def test_special_tokens_are_the_same_by_name_and_ends_by_what_they_do():
    ours = Vocabulary({5: b"a"}, special_ids={"<s>": 0, "<end>": 1, "<tool>": 2}, eos_id=1)
    theirs = Vocabulary({7: b"a"}, special_ids={"<s>": 3, "</s>": 4, "<tool>": 6}, eos_id=4)
    assert VocabularyMap(ours, theirs).special == {0: 3, 1: 4, 2: 6}


def test_no_id_of_the_draft_stands_for_two():
    ours = Vocabulary({5: b"a"}, special_ids={"<e>": 0, "<f>": 1}, eos_id=1)
    theirs = Vocabulary({7: b"a"}, special_ids={"<e>": 2}, eos_id=2)
    both = VocabularyMap(ours, theirs)
    assert both.special == {1: 2}
    assert len(set(both.draft_ids)) == len(both.draft_ids)


def test_vocabularies_without_a_common_word_are_refused_in_a_line():
    both = VocabularyMap(Vocabulary({0: b"a", 1: b"b"}), Vocabulary({0: b"x"}))
    with pytest.raises(RefusedError) as error:
        both.require("./small", "./big")
    assert str(error.value) == (
        "./small has no token in common with ./big (1 and 2 tokens); give a draft for the same "
        "kind of text, or draft='lookup'"
    )
