"""Structured output: every text that ends matches, every text that matches can be written in every
tokenization, and a matcher that goes back is as if it had never gone on."""

from __future__ import annotations

import copy
import gc
import random
import re
import sys
import weakref
from functools import cache
from itertools import product

import pytest
import regex
import torch
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from foretoken.controls import grammar as grammar_module
from foretoken.controls.grammar import GrammarMatcher, get_vocabulary
from foretoken.errors import ControlError, InputError
from foretoken.loading.load import load
from foretoken.sampling.params import SamplingParams, Structured
from foretoken.text.decoding import decode, decode_continuation
from tiny import byte_level, metaspace

pytestmark = pytest.mark.daily

ENDS = frozenset({0})


def structured(**sampling) -> Structured:
    params = SamplingParams(structured=sampling).structured
    assert params is not None
    return params


def spelling(words: list[str], decoder=None) -> PreTrainedTokenizerFast:
    """A tokenizer of these tokens and an end, id 0; byte-level unless told otherwise."""
    tokenizer = Tokenizer(models.BPE({w: i for i, w in enumerate(["</s>", *words])}, []))
    tokenizer.decoder = decoder or decoders.ByteLevel()
    tokenizer.add_special_tokens(["</s>"])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="</s>")


@cache
def shipped() -> PreTrainedTokenizerFast:
    return load(runtime="transformers").tokenizer


def t5_like() -> PreTrainedTokenizerFast:
    """Metaspace alone, without bytes."""
    return spelling(["▁", "a", "▁a", "b", "▁ab"], decoders.Metaspace())


TOKENIZERS = {"byte-level": byte_level, "metaspace": metaspace, "shipped": shipped}


def matcher(
    tokenizer, V: int | None = None, eos: frozenset[int] = ENDS, **sampling
) -> GrammarMatcher:
    V = len(tokenizer) if V is None else V
    return get_vocabulary(tokenizer, V, eos).compile_grammar(structured(**sampling)).make_matcher()


def ids(mask: torch.Tensor) -> list[int]:
    return mask.nonzero()[:, 0].tolist()


def written(tokenizer, seed: int, **sampling) -> str:
    """A text drawn under the mask; ends, and tokens that close something, are drawn often."""
    chance, row, tokens = random.Random(seed), matcher(tokenizer, **sampling), []
    closing = {i for i in range(len(tokenizer)) if decode(tokenizer, [i]) in ('"', "}", "]", ".")}
    while len(tokens) < 3000:
        mask = ids(row.compute_mask())
        close = [i for i in mask if i in closing | ENDS]
        token = chance.choice(close if close and chance.random() < 0.3 else mask)
        assert not row.dead
        row.push(token)
        if token in ENDS:
            assert row.ended
            return decode_continuation(tokenizer, tokenizer("It was").input_ids, tokens)
        tokens.append(token)
    raise AssertionError("no end")


REGEXES = ["ab?c*", "[^a-z]{3}", "(?i)yes|no", r"\d{4}-\d\d", "a/b", "^x|y$", "é+\n", ".{0,9}"]
CHOICES = [["yes", "no"], ["a", "ab", "abc"], ['"', "\n", "/i", "%x", "é\U0001f600", "<b>"]]


@pytest.mark.parametrize("name", TOKENIZERS)
def test_texts_match_their_regex_or_are_one_of_their_choice(name):
    for seed, pattern in product(range(4), REGEXES):
        assert re.fullmatch(pattern, written(TOKENIZERS[name](), seed, regex=pattern))
    for seed, choice in product(range(4), CHOICES):
        assert written(TOKENIZERS[name](), seed, choice=choice) in choice


@pytest.mark.parametrize("decoder", [decoders.ByteLevel(), None])
@pytest.mark.parametrize("pattern", ["a(b|c)?", "(ab)*", "a*b|c", " ?a b", "[^a]a", "abca? "])
def test_exactly_the_beginnings_of_matches(decoder, pattern):
    """All sequences of up to three tokens, in all tokenizations: those that some text begins with
    are allowed, those that spell a text may end."""
    space = "Ġ" if decoder else "▁"
    spellings = ["a", "b", "c", "ab", "ba", space, f"{space}a", f"a{space}"]
    tokenizer = spelling(spellings, decoder or decoders.Metaspace(prepend_scheme="never"))
    texts = [word.replace(space, " ") for word in spellings]
    row = matcher(tokenizer, regex=pattern)
    for n in range(4):
        for tokens in product(range(len(spellings)), repeat=n):
            for token in tokens:
                row.push(token + 1)
            text = "".join(texts[token] for token in tokens)
            ends = [0] if re.fullmatch(pattern, text) else []
            allowed_ids = [i + 1 for i, word in enumerate(texts) if begins(pattern, text + word)]
            assert row.dead == (not begins(pattern, text))
            assert ids(row.compute_mask()) == ends + allowed_ids
            for _ in tokens:
                row.pop()


def begins(pattern: str, text: str) -> bool:
    """Whether some match begins with it."""
    return regex.fullmatch(pattern, text, partial=True) is not None


GRAMMARS = [
    {"json_schema": {"type": "object", "properties": {"a": {"type": "integer"}}}},
    {"json_schema": {"type": "array", "items": {"enum": ["a", "ab"]}}},
    {"regex": "(ab|a)*c?"},
    {"regex": "ab"},
    {"regex": "(?s:.*)"},
    {"choice": ["a", "ab", "abc"]},
    {"lark": 'start: "a" x | "b"\nx: x "c"'},  # a: nothing goes on there
    {"lark": 'start: x "!"\nx[max_tokens=2]: /[ab]*/'},  # llguidance cannot go back in these two
    {"lark": 'start: x "c"\nx[stop="b"]: /a*/'},
    {"lark": 'start: x "!"\nx[suffix="b"]: /[abc]*/'},
    {"lark": '%llguidance {"allow_initial_skip": true}\nstart: w+\nw: "a" | "b"\n%ignore /[ ]+/'},
]


@pytest.mark.parametrize("grammar", GRAMMARS, ids=str)
@given(st.sampled_from([frozenset({0}), frozenset({0, 70, 300})]), st.data())
def test_going_back_is_exact(grammar, eos, data):
    """Random walks of pushes (allowed tokens, forced ones, any at all, ends) and pops: at every
    place a matcher is as a fresh one that was fed the tokens that are left."""
    tokenizer = byte_level()
    walker, left = matcher(tokenizer, 333, eos, **grammar), []
    for move in data.draw(st.lists(st.sampled_from("aaaafepp*"), max_size=14)):
        if move == "p" and left:
            walker.pop()
            left.pop()
        elif move != "p":
            forced = walker.find_forced_tokens()
            allowed = ids(walker.compute_mask()) or [1]
            among = {"a": allowed, "f": forced or allowed, "e": sorted(eos), "*": range(333)}
            token = data.draw(st.sampled_from(among[move]))
            for each in forced if move == "f" and forced else [token]:
                walker.push(each)
                left.append(each)
            assert move != "f" or not forced or not walker.dead
        fresh = matcher(tokenizer, 333, eos, **grammar)
        for token in left:
            fresh.push(token)
        if data.draw(st.booleans()):
            assert walker.find_forced_tokens() == fresh.find_forced_tokens()
        assert (walker.dead, walker.ended) == (fresh.dead, fresh.ended)
        assert torch.equal(walker.compute_mask(), fresh.compute_mask())
    for _ in left:
        walker.pop()
    assert torch.equal(
        walker.compute_mask(), matcher(tokenizer, 333, eos, **grammar).compute_mask()
    )


def test_ends_are_alike():
    """Also one that is an ordinary token, and one whose bytes the text needs."""
    row = matcher(byte_level(), 320, frozenset({0, 5, 66, 300}), regex="ab?")
    assert ids(row.compute_mask()) == [65]
    row.push(65)
    assert ids(row.compute_mask()) == [0, 5, 66, 300]  # 66 is the letter b
    for end in (0, 5, 66, 300):
        row.push(end)
        assert row.ended and not row.compute_mask().any() and row.find_forced_tokens() == []
        row.push(end)
        assert row.dead
        row.pop()
        assert row.ended
        row.pop()
    row.pop()
    row.push(0)
    assert row.dead


@pytest.mark.parametrize("V", [290, 320, 333, 1000])
def test_output_layers_of_any_width(V):
    """Rows without a token are masked; tokens without a row are not there."""
    row = matcher(byte_level(), V, frozenset({0, 5000}), regex="(?s:.*)")
    mask = row.compute_mask()
    assert mask.shape == (V,) and mask.dtype == torch.bool and mask[0] and mask[65]
    assert not mask[320:].any()
    if V > 320:
        row.push(V - 1)
        assert row.dead
        row.pop()
    assert torch.equal(row.compute_mask(), mask)
    assert all(
        token < V for token in matcher(byte_level(), V, regex="the house").find_forced_tokens()
    )


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64])
def test_scores(dtype):
    row = matcher(byte_level(), 333, regex="ab?")
    row.push(65)
    scores = torch.randn(333, generator=torch.manual_seed(0)).to(dtype)
    before = scores.clone()
    masked = row(scores)
    assert torch.equal(scores, before) and masked.dtype == dtype
    assert ids(masked.isfinite()) == [0, 66] and torch.equal(masked[[0, 66]], before[[0, 66]])
    row.push(0)
    assert torch.equal(row(scores), before)  # behind the end nothing is kept


def test_a_text_that_the_vocabulary_cannot_go_on_with():
    row = matcher(spelling(["a", "b"]), regex="(a|b)c|ab")
    row.push(2)
    with pytest.raises(ControlError, match="cannot be followed after 1 tokens: no token continues"):
        row(torch.zeros(3))
    row.pop()
    assert ids(row.compute_mask()) == [1, 2]


@pytest.mark.parametrize(
    ("sampling", "message"),
    [
        ({"regex": "(a"}, "regex cannot be followed: .*unclosed group"),
        ({"regex": "(?=a)b"}, "regex cannot be followed: .*look-around"),
        ({"regex": "(a)\\1"}, "regex cannot be followed: .*backreferences"),
        ({"regex": "[^\\s\\S]"}, "regex cannot be followed: no tokens of this vocabulary"),
        ({"regex": "a[^\\s\\S]"}, "regex cannot be followed: no tokens of this vocabulary"),
        ({"lark": "start: foo"}, "lark cannot be followed: .*unknown name"),
        ({"lark": 'start: "a'}, "lark cannot be followed: "),
        ({"lark": 'begin: "a"'}, "lark cannot be followed: .*start"),
        ({"lark": 'start: start "a"'}, "lark cannot be followed: no tokens of this vocabulary"),
        (
            {"lark": 'start: "a" x\nx: x "b"'},
            "lark cannot be followed: no tokens of this vocabulary",
        ),
        ({"json_schema": False}, "json_schema cannot be followed: Unsatisfiable"),
        ({"json_schema": "{bad"}, "json_schema cannot be followed: Expecting property name"),
        ({"json_schema": "3"}, "json_schema cannot be followed: "),
        ({"json_schema": {"type": "string", "enum": []}}, "json_schema cannot be .*Unsatisfiable"),
        ({"json_schema": {"type": "foo"}}, "json_schema cannot be followed: Invalid type"),
        ({"json_schema": {"type": "array", "uniqueItems": True}}, "json_schema .*uniqueItems"),
        ({"json_schema": {"type": "number", "minimum": 3, "maximum": 2}}, "json_schema .*minimum"),
        ({"json_schema": {"$ref": "#"}}, "json_schema cannot be followed: no tokens"),
        ({"json_schema": '{"anyOf":[' * 2000 + "{}" + "]}" * 2000}, "json_schema .*recursion"),
        ({"lark": "start: " + "(" * 9999}, "lark cannot be followed: .*too deeply nested"),
        ({"choice": ["a\ud800"]}, "choice cannot be followed: "),
    ],
    ids=lambda value: str(value)[:40],
)
def test_grammars_that_are_refused(sampling, message):
    with pytest.raises(InputError, match=f"^structured's {message}") as error:
        matcher(byte_level(), **sampling)
    assert "\n" not in str(error.value) and str(error.value).endswith("; correct it")
    assert len(str(error.value)) < 300 and "%llguidance" not in str(error.value)


@pytest.mark.parametrize("text", ["[]", "[1]", '"a"', "a", "[" * 100_000])
def test_a_choice_that_is_not_one_of_strings(text):
    with pytest.raises(InputError, match="^structured's choice cannot be followed: ") as error:
        get_vocabulary(byte_level(), 320, ENDS).compile_grammar(Structured("choice", text))
    assert "\n" not in str(error.value)


def test_a_grammar_without_words_for_it():
    with pytest.raises(InputError, match="^structured's regex cannot be followed: no tokens of"):
        matcher(spelling(["a", "b"]), regex="c")
    with pytest.raises(InputError, match="^structured's json_schema cannot be followed: no tokens"):
        matcher(t5_like(), json_schema={"type": "object"})


@pytest.mark.parametrize(
    ("tokenizer", "message"),
    [
        (None, "structured output needs a fast tokenizer of transformers, not NoneType; "),
        ("gpt2", "structured output needs a fast tokenizer of transformers, not str; "),
        (
            spelling(["a", "##b"], decoders.WordPiece()),
            "structured output does not support this tokenizer: can't determine decoder type",
        ),
        (
            spelling(
                ["a", "x"],
                decoders.Sequence([decoders.ByteFallback(), decoders.Replace("x", "y")]),
            ),
            "structured output does not support this tokenizer: it decodes token 2 to 'y', "
            "llguidance decodes it to 'x'; ",
        ),
    ],
    ids=["none", "text", "wordpiece", "replaced"],
)
def test_tokenizers_that_are_refused(tokenizer, message):
    with pytest.raises(InputError, match=f"^{message}") as error:
        get_vocabulary(tokenizer, 320, ENDS).compile_grammar(structured(regex="a"))
    assert "\n" not in str(error.value)


def test_a_model_without_ends():
    for eos in (frozenset(), frozenset({320})):
        with pytest.raises(InputError, match="^structured output ends with an EOS token, but the"):
            get_vocabulary(byte_level(), 320, eos)
    with pytest.raises(InputError, match="this tokenizer has no id 325"):
        get_vocabulary(byte_level(), 333, frozenset({325}))


def test_without_llguidance(monkeypatch):
    monkeypatch.setitem(sys.modules, "llguidance", None)
    with pytest.raises(InputError, match="^structured output needs llguidance"):
        get_vocabulary(spelling(["a"]), 2, ENDS)


def test_vocabularies_are_kept_as_long_as_their_tokenizers():
    tokenizer = spelling(["a", "b"])
    kept = get_vocabulary(tokenizer, 3, ENDS)
    assert get_vocabulary(tokenizer, 3, ENDS) is kept
    assert get_vocabulary(tokenizer, 4, ENDS) is not kept
    assert get_vocabulary(copy.deepcopy(tokenizer), 3, ENDS) is not kept
    tokenizer.add_tokens(["c"])
    assert ids(matcher(tokenizer, 4, regex="c").compute_mask()) == [3]
    gone = weakref.ref(kept)
    del tokenizer, kept
    gc.collect()
    assert gone() is None


def test_padding_and_truncation_of_a_tokenizer_do_not_matter():
    tokenizer = copy.deepcopy(byte_level())
    tokenizer.backend_tokenizer.enable_padding(length=50)
    tokenizer.backend_tokenizer.enable_truncation(2)
    row = matcher(tokenizer, choice=["the house"])
    assert decode(tokenizer, row.find_forced_tokens()) == "the house"


def test_a_tokenizer_is_read_once_whatever_ends_a_text(monkeypatch):
    """Reading one takes a second, in which no other thread runs."""
    read, own = [], frozenset({0})
    lexicon = grammar_module._build_lexicon
    monkeypatch.setattr(
        grammar_module, "_build_lexicon", lambda *a: read.append(a[1]) or lexicon(*a)
    )
    tokenizer = spelling(["a", "b", "c"])
    for eos in ({0}, {0, 1}, {1}, {0, 2}, {3}):
        get_vocabulary(tokenizer, 4, frozenset(eos), own)
    assert read == [0]


def test_an_end_of_the_model_that_ends_no_text_is_never_allowed():
    """As with ignore_eos and stop_token_ids."""
    tokenizer = spelling(["a", "b"])
    row = get_vocabulary(tokenizer, 3, frozenset({2}), frozenset({0})).compile_grammar(
        structured(regex="a*")
    )
    row = row.make_matcher()
    assert ids(row.compute_mask()) == [1, 2]
    row.push(0)
    assert row.dead
    row.pop()
    row.push(1)
    row.push(2)
    assert row.ended
