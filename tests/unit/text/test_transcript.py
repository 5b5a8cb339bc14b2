"""Stop strings against `str.find`, in any tokens and steps; what was shown stays; the text without
them is what decoding all tokens gives."""

from __future__ import annotations

import random
from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import pytest
from transformers import PreTrainedTokenizerFast

from foretoken.text.decoding import (
    REPLACEMENT_CHARACTER,
    StoppingDetokenizer,
    TokenSpelling,
    TokenText,
    decode_continuation,
)
from tiny import byte_level, metaspace

LETTERS = "aab\u00e9\U0001f600 \n"


class Pieces:
    """A tokenizer whose tokens read as the given pieces, one behind the other."""

    all_special_ids: Sequence[int] = ()

    def __init__(self, pieces: list[str]) -> None:
        self.take_pieces = pieces
        self.added_tokens_decoder: dict[int, object] = {}

    def decode(self, tokens: list[int], **options: bool) -> str:
        return "".join(self.take_pieces[token] for token in tokens)

    def convert_ids_to_tokens(self, token: int) -> str:
        return self.take_pieces[token]


def whole(transcript: StoppingDetokenizer, tokens: list[int]) -> tuple[str | None, str]:
    """The stop string that ended a text, and the text."""
    for token in tokens:
        if stop := transcript.append_token(token):
            return stop, transcript.text
    return transcript.close(), transcript.text


class End(NamedTuple):
    """`count`: the tokens it took; one more than there are where closing made the end."""

    stop: str | None
    count: int
    text: str


def expected(texts: list[str], stops: list[str], include: bool, minimum: int = 0) -> End:
    """From the texts of all prefixes, by `str.find`, as vLLM looks for them behind its min_tokens:
    only text beyond these completes one."""
    prefixes = [text.rstrip(REPLACEMENT_CHARACTER) for text in texts]
    if minimum >= len(texts) - 1:
        return End(None, len(texts), texts[-1])
    floor = len(prefixes[minimum])
    for count, text in enumerate([*prefixes, texts[-1]]):
        if count <= minimum:
            continue
        starts = [(text.find(stop, max(0, floor - len(stop) + 1)), stop) for stop in stops]
        found = [(at, len(stop), stop) for at, stop in starts if at >= 0]
        if found:
            at, length, stop = min(found)
            return End(stop, count, text[: at + length if include else at])
    return End(None, len(texts), texts[-1])


def some(dice: random.Random, letters: str, most: int) -> str:
    return "".join(dice.choices(letters, k=dice.randint(1, most)))


def stop_strings(dice: random.Random, text: str) -> list[str]:
    """Parts of the text, and others."""
    stops: list[str] = []
    for _ in range(dice.randint(0, 3)):
        at = dice.randrange(max(1, len(text)))
        part = text[at : at + dice.randint(1, 5)]
        stops.append(part if part and dice.random() < 0.6 else some(dice, LETTERS, 4))
    return stops


def check(
    dice: random.Random, transcript: StoppingDetokenizer, tokens: list[int], end: End
) -> None:
    """Read `tokens` in random steps: the end is as expected, and nothing shown lies behind it."""
    shown: list[str] = []
    for count, token in enumerate(tokens[: end.count], 1):
        assert transcript.append_token(token) == (end.stop if count == end.count else None)
        if count < end.count and dice.random() < 0.5:  # a step ends here
            shown.append(transcript.take_text())
            assert end.text.startswith("".join(shown))
    assert transcript.close() == (end.stop if end.count > len(tokens) else None)
    assert transcript.text == end.text
    assert "".join([*shown, transcript.take_text()]) == end.text
    assert (
        transcript.take_text() == "" and transcript.text == end.text and transcript.close() is None
    )


def ids_of(dice: random.Random, tokenizer: PreTrainedTokenizerFast) -> list[int]:
    """Words, texts byte by byte, characters cut short, special tokens, ids that read as nothing."""
    ids: list[int] = []
    for _ in range(dice.randint(1, 4)):
        text = some(dice, LETTERS, 3)
        kind = dice.random()
        if kind < 0.3:
            ids += tokenizer(text, add_special_tokens=False).input_ids
        elif kind < 0.9:
            spelled = bytes_of(tokenizer, text)
            ids += spelled if kind < 0.7 else spelled[: dice.randint(1, len(spelled))]
        else:
            ids.append(dice.randrange(len(tokenizer) + 3))
    return ids[:12]


def bytes_of(tokenizer: PreTrainedTokenizerFast, text: str) -> list[int]:
    """A token for every byte of a text."""
    names = tokenizer.get_vocab()
    if "<0x00>" in names:
        return [names[f"<0x{byte:02X}>"] for byte in text.encode()]
    spelled = tokenizer.backend_tokenizer.pre_tokenizer.pre_tokenize_str(text)
    return [names[letter] for word, _ in spelled for letter in word]


@pytest.mark.parametrize("make", [byte_level, metaspace])
def test_stop_strings_in_any_tokens_are_those_of_str_find(make):
    """1,000 random texts of each tokenizer, seeded, characters cut by tokens among them."""
    dice, tokenizer, met = random.Random(1), make(), 0
    for _ in range(1_000):
        prompt = ids_of(dice, tokenizer) if dice.random() < 0.5 else []
        tokens = ids_of(dice, tokenizer)
        texts = [decode_continuation(tokenizer, prompt, tokens[:i]) for i in range(len(tokens) + 1)]
        stops, include = stop_strings(dice, texts[-1]), dice.random() < 0.5
        minimum = dice.choice([0, 0, *range(6)])
        end = expected(texts, stops, include, minimum)
        transcript = StoppingDetokenizer(
            tokenizer, prompt, stops, include_stop_string=include, min_tokens=minimum
        )
        check(dice, transcript, tokens, end)
        met += end.stop is not None
    assert met > 150


def test_all_that_is_certain_is_shown():
    """Held back is the longest end of the text that a stop string begins with, and no more."""
    dice = random.Random(2)
    for _ in range(1_000):
        pieces = [some(dice, "ab", 3) for _ in range(8)]
        stops = [some(dice, "abc", 5) + "c" for _ in range(dice.randint(0, 3))]
        transcript, shown, text = StoppingDetokenizer(Pieces(pieces), [], stops), "", ""
        for token, piece in enumerate(pieces):
            assert transcript.append_token(token) is None
            text, shown = text + piece, shown + transcript.take_text()
            beginnings = [stop[:i] for stop in stops for i in range(len(stop))]
            begun = max(filter(text.endswith, beginnings), key=len, default="")
            assert shown == text.removesuffix(begun)
            assert transcript.text == text


@pytest.mark.parametrize(
    ("pieces", "stops", "stop", "text"),
    [
        (["abc"], ["b", "abc"], "abc", ""),  # in one token, the one that begins first
        (["a", "b", "c"], ["b", "abc"], "b", "a"),  # token by token, the one complete first
        (["xabc"], ["abc", "ab"], "ab", "x"),  # of two that begin together, the shorter
        (["xa", "ab", "y"], ["aab"], "aab", "x"),
        (["a", "a", "a", "b"], ["aab"], "aab", "a"),
    ],
)
def test_which_of_several(pieces, stops, stop, text):
    tokens = list(range(len(pieces)))
    assert whole(StoppingDetokenizer(Pieces(pieces), [], stops), tokens) == (stop, text)
    kept = whole(StoppingDetokenizer(Pieces(pieces), [], stops, include_stop_string=True), tokens)
    assert kept == (stop, text + stop)


def test_a_stop_string_that_the_prompt_began_is_none():
    transcript = StoppingDetokenizer(Pieces(["the e", "nd", " end."]), [0], ["end"])
    assert transcript.append_token(1) is None
    assert transcript.append_token(2) == "end" and transcript.text == "nd "


def test_a_line_break_that_is_a_byte_ends_the_text_at_once():
    """A run of bytes is held back, as the next of them may change it; where the text ends with
    the run, none does."""
    tokenizer = metaspace()
    tokens = bytes_of(tokenizer, "a\n")
    transcript = StoppingDetokenizer(tokenizer, [], ["\n"])
    assert transcript.append_token(tokens[0]) is None and transcript.take_text() == ""
    assert transcript.append_token(tokens[1]) == "\n" and transcript.take_text() == "a"


@pytest.mark.parametrize("make", [byte_level, metaspace])
def test_what_each_token_adds_does_not_depend_on_when_it_is_asked_for(make):
    """Nor on later tokens; and offsets count characters, of which parts add none: 300 texts of
    whole characters, seeded."""
    dice, tokenizer = random.Random(4), make()
    spelling, cut = TokenSpelling(tokenizer), 0
    for _ in range(300):
        text = some(dice, LETTERS, 9)
        tokens = bytes_of(tokenizer, text) if dice.random() < 0.7 else tokenizer(text).input_ids
        prompt, stops = bytes_of(tokenizer, "a"), stop_strings(dice, text)
        one, other = (StoppingDetokenizer(tokenizer, prompt, stops) for _ in range(2))
        pieces = list[TokenText]()
        for token in tokens:
            stopped = [each.append_token(token) for each in (one, other)]
            pieces += one.take_pieces() if dice.random() < 0.5 else []
            if any(stopped):
                break
        assert one.close() == other.close()
        assert [*pieces, *one.take_pieces()] == other.take_pieces()
        transcript = StoppingDetokenizer(tokenizer, prompt)
        for token in tokens:
            transcript.append_token(token)
        transcript.close()
        *pieces, end = transcript.take_pieces()
        assert "".join(piece.text for piece in [*pieces, end]) == transcript.text
        spelled = [spelling.spell(token)[1] for token in tokens]
        before = [b"".join(spelled[:i]).decode(errors="ignore") for i in range(len(tokens) + 1)]
        assert [piece.offset for piece in [*pieces, end]] == [*map(len, before)]
        cut += any(one == other for one, other in pairwise(before))
    assert cut > 50


def test_the_cost_of_a_token_does_not_grow_with_the_text(monkeypatch):
    """At most two tokens are decoded for one that is read, whatever is held back for the stops."""
    ids = byte_level()("the sea " * 200).input_ids
    lengths = counted(monkeypatch)
    transcript = StoppingDetokenizer(byte_level(), [], ["the sea " * 3 + "!"])
    for token in ids:
        transcript.append_token(token)
    assert max(lengths) <= 2 and len(lengths) == 2 * len(ids)
    assert transcript.text == "the sea " * 200


def counted(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many tokens each call of a tokenizer's `decode` is given from here on."""
    lengths: list[int] = []
    original = PreTrainedTokenizerFast.decode

    def decode(self, tokens, **options):
        lengths.append(len(tokens))
        return original(self, tokens, **options)

    monkeypatch.setattr(PreTrainedTokenizerFast, "decode", decode)
    return lengths
