"""Text that comes in pieces is the text of all tokens; vocabularies are compared, not sizes."""

from __future__ import annotations

import random
from os.path import commonprefix

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from foretoken.errors import RefusedError
from foretoken.text.decoding import (
    IncrementalDetokenizer,
    TokenSpelling,
    count_offsets,
    decode,
    decode_continuation,
    require_same_vocabulary,
)
from tiny import byte_level, metaspace


def llama_like() -> PreTrainedTokenizerFast:
    """The decoder of Llama's first tokenizers: spaces as words' heads, bytes in runs."""
    vocabulary = ["</s>", "<unk>", "▁", "▁a", "a", "▁▁", "b"] + [f"<0x{b:02X}>" for b in range(256)]
    tokenizer = Tokenizer(
        models.BPE({w: i for i, w in enumerate(vocabulary)}, [], byte_fallback=True)
    )
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    tokenizer.add_special_tokens(["</s>", "<unk>"])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="</s>")


TOKENIZERS = {"byte-level": byte_level(), "metaspace": metaspace(), "llama": llama_like()}


def pieces(
    tokenizer: PreTrainedTokenizerFast, chunks: list[list[int]], prompt: list[int] | None = None
) -> list[str]:
    stream = IncrementalDetokenizer(tokenizer, prompt or [])
    return [stream.add(chunk, last=i == len(chunks) - 1) for i, chunk in enumerate(chunks)]


@pytest.mark.parametrize("name", TOKENIZERS)
@given(data=st.data())
def test_any_tokens_in_any_pieces(name, data):
    """Specials, ids without a token, broken characters and runs of bytes included."""
    tokenizer = TOKENIZERS[name]
    ids = st.integers(0, len(tokenizer) + 3)
    if name == "llama":
        emoji = [7 + b for b in "\U0001f600é".encode()]
        ids = st.one_of(st.integers(0, 6), st.sampled_from(emoji), ids)
    chunks = data.draw(st.lists(st.lists(ids, max_size=4), min_size=1, max_size=25))
    tokens = [token for chunk in chunks for token in chunk]
    assert "".join(pieces(tokenizer, chunks)) == decode(tokenizer, tokens)


@pytest.mark.parametrize("name", TOKENIZERS)
@given(data=st.data())
def test_behind_any_prompt_it_is_what_decoding_both_adds(name, data):
    """In any pieces; where the prompt ends within a character, that character is new."""
    tokenizer = TOKENIZERS[name]
    ids = st.integers(0, len(tokenizer) + 3)
    if name == "llama":
        ids = st.one_of(st.integers(0, 6), st.sampled_from([7 + b for b in "é€".encode()]), ids)
    prompt = data.draw(st.lists(ids, max_size=6))
    chunks = data.draw(st.lists(st.lists(ids, max_size=4), min_size=1, max_size=9))
    tokens = [token for chunk in chunks for token in chunk]
    before, whole = decode(tokenizer, prompt), decode(tokenizer, [*prompt, *tokens])
    added = whole[len(commonprefix([before, whole])) :]
    assert "".join(pieces(tokenizer, chunks, prompt)) == added
    assert decode_continuation(tokenizer, prompt, tokens) == added


def test_a_character_that_the_prompt_began_is_the_continuations():
    euro = [7 + b for b in "€".encode()]
    assert decode_continuation(llama_like(), [3, *euro[:2]], [euro[2], 3]) == "€ a"


def test_a_character_is_held_back_until_it_is_whole():
    ids = byte_level()("\U0001f40b", add_special_tokens=False).input_ids
    texts = pieces(byte_level(), [[token] for token in [*ids, *ids]])
    assert len(ids) > 1
    assert [piece for piece in texts if piece] == ["\U0001f40b"] * 2
    broken = pieces(byte_level(), [[token] for token in ids[:-1]])
    assert broken[-1] == "\ufffd" and not any(broken[:-1])


def test_what_is_held_back_can_be_read():
    """As the text would go on if it ended here."""
    stream, (*begun, last) = (
        IncrementalDetokenizer(llama_like(), [3]),
        [7 + b for b in "é".encode()],
    )
    assert [stream.add(begun), stream.pending_text] == ["", "\ufffd"]
    assert [stream.add([last]), stream.pending_text] == ["", "é"]  # a run of bytes may go on
    assert [stream.add([6]), stream.pending_text] == ["éb", ""]


def test_a_run_of_bytes_is_held_back_until_it_ends():
    """Its first character would turn into four replacements if the run went wrong later."""
    whale = [7 + b for b in "\U0001f40b".encode()]
    good = pieces(llama_like(), [[3], whale, [3]])
    assert good == ["a", "", "\U0001f40b a"]
    bad = pieces(llama_like(), [[3], whale, [7 + 0x80], [3]])
    assert "".join(bad) == "a" + "\ufffd" * 5 + " a"


def test_a_byte_that_reads_as_nothing_alone_is_a_byte_still():
    """The decoder strips a space at the start of a text, not within a run of bytes; 3000 random
    texts, seeded."""
    vocabulary = ["</s>", "<unk>", "<0x20>", "<0xE2>", "<0x82>", "<0xAC>", "▁", "▁a", "b"]
    backend = Tokenizer(
        models.BPE({w: i for i, w in enumerate(vocabulary)}, [], byte_fallback=True)
    )
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    backend.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)])
    backend.add_special_tokens(["</s>", "<unk>"])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="</s>")
    dice = random.Random(0)
    for _ in range(3000):
        ids = [dice.randrange(len(vocabulary) + 2) for _ in range(dice.randrange(1, 12))]
        chunks, at = [], 0
        while at < len(ids):
            chunks.append(ids[at : at + dice.randint(1, 3)])
            at += len(chunks[-1])
        assert "".join(pieces(tokenizer, chunks)) == decode(tokenizer, ids), ids


def test_the_same_words():
    require_same_vocabulary("d", 400, byte_level(), 320, byte_level())  # only padding differs
    require_same_vocabulary("d", 320, None, 320, byte_level())
    require_same_vocabulary("d", 320, None, 320, None)


@pytest.mark.parametrize("swap", [False, True])
def test_other_words(swap):
    more = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(byte_level().backend_tokenizer.to_str()),
        eos_token="<|endoftext|>",
    )
    more.add_tokens(["zebra"])
    ours, theirs = (more, byte_level()) if swap else (byte_level(), more)
    with pytest.raises(
        RefusedError,
        match="of the 321 tokens in the two vocabularies, 1 have .* example, 'zebra' is",
    ) as error:
        require_same_vocabulary("draft", 400, theirs, 400, ours)
    assert "\n" not in str(error.value)


def test_sizes_where_there_are_no_words():
    with pytest.raises(RefusedError, match="draft has 64 output rows and the target 65"):
        require_same_vocabulary("draft", 64, None, 65, byte_level())


def test_a_token_within_a_character_is_named_by_its_bytes() -> None:
    """And shown as a replacement; no two tokens have one name."""
    words = TokenSpelling(byte_level())
    cut = [token for token in range(320) if words.to_text(token) == "\ufffd"]
    assert cut and all(words.name(token).startswith("bytes:\\x") for token in cut)
    assert len({words.name(token) for token in range(320)}) == 320
    mixed = Tokenizer(models.BPE({"Ġð": 0, "<0xF0>": 1, "a": 2}, []))
    mixed.decoder = decoders.ByteLevel()
    words = TokenSpelling(PreTrainedTokenizerFast(tokenizer_object=mixed))
    assert [words.name(token) for token in range(3)] == [r"bytes: \xf0", r"bytes:\xf0", "a"]


def test_offsets_in_a_prompt_are_those_of_its_text() -> None:
    """With special tokens that it names or does not, first spaces, and characters of parts."""
    tokenizer = byte_level()
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|call|>"]})
    text = "so<|call|> \U0001f327 né"
    ids = [0, *tokenizer(text).input_ids]
    offsets = count_offsets(tokenizer, ids, text)
    assert offsets[:2] == [0, 0] and len(offsets) == len(ids)
    at = dict(zip(tokenizer.convert_ids_to_tokens(ids), offsets, strict=True))
    assert at["<|call|>"] == 2 and offsets[-1] == len(text) - 1
    silent = decode(tokenizer, ids)
    assert count_offsets(tokenizer, ids, silent)[-1] == len(silent) - 1
    llama, words = llama_like(), [3, 3, *(7 + b for b in "€".encode()), 6]
    assert count_offsets(llama, [0, *words], "a a€b") == [0, 0, 1, 3, 3, 3, 4]


def test_ids_of_padding_have_no_text_and_without_a_tokenizer_ids_are_names() -> None:
    assert TokenSpelling(None).spell(7) == ("<7>", b"")
    assert TokenSpelling(byte_level()).spell(100_000) == ("", b"")


def test_special_tokens_are_told_to_those_who_ask() -> None:
    tokenizer = byte_level()
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|call|>"]})
    ids = tokenizer.encode("so <|call|>né", add_special_tokens=False)
    for special, expected in ((False, "so né"), (True, "so <|call|>né")):
        assert decode(tokenizer, ids, keep_special_tokens=special) == expected
        stream = IncrementalDetokenizer(tokenizer, keep_special_tokens=special)
        pieces = [stream.add([token]) for token in ids] + [stream.add([], last=True)]
        assert "".join(pieces) == expected
