"""JSON schemas over a vocabulary of bytes: what the grammar of one allows."""

from __future__ import annotations

import json
import random
from functools import lru_cache
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from foretoken.controls.grammar import GrammarMatcher, GrammarVocabulary, get_vocabulary
from foretoken.sampling.checks import Structured

END = 256
CLOSING, LIKELY = set(b'"}]'), set(b"abc015267.-:,{[TZ")


@lru_cache
def _tokenizer() -> PreTrainedTokenizerFast:
    """The 256 bytes, and an end."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    made = Tokenizer(models.BPE(vocab={x: i for i, x in enumerate(letters)}, merges=[]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens([AddedToken("</s>", special=True)])
    return PreTrainedTokenizerFast(tokenizer_object=made, eos_token="</s>")


@lru_cache
def _lexicon() -> tuple[GrammarVocabulary, dict[int, int]]:
    """llguidance's form of it, and the byte of each id."""
    known = get_vocabulary(_tokenizer(), END + 1, frozenset({END}))
    return known, {known.lexicon.tokenize_bytes(bytes([byte]))[0]: byte for byte in range(256)}


def matcher(schema: Any) -> GrammarMatcher:
    """Return the matcher of a schema. InputError where it cannot be followed."""
    return (
        _lexicon()[0].compile_grammar(Structured("json_schema", json.dumps(schema))).make_matcher()
    )


def allows(row: GrammarMatcher, text: str) -> bool:
    """Tell whether a text may be written to its end."""
    tokens = [*_lexicon()[0].lexicon.tokenize_str(text), END]
    for token in tokens:
        row.push(token)
    allowed = row.ended
    for _ in tokens:
        row.pop()
    return allowed


def written(row: GrammarMatcher, chance: random.Random, longest: int = 100) -> str | None:
    """Return a text drawn from what a grammar allows; None where it is too long. Bytes that close
    something, and those that mean something to schemas, are drawn often."""
    text, known, ended = bytearray(), _lexicon()[1], False
    while len(text) < longest and not ended:
        ids = row.compute_mask().nonzero()[:, 0].tolist()
        others = [each for each in ids if each != END]
        ended = END in ids and (not others or chance.random() < 0.5)
        if ended or not others:
            break
        closing = [each for each in others if known[each] in CLOSING]
        likely = [each for each in others if known[each] in LIKELY]
        drawn = chance.random()
        among = closing if drawn < 0.35 else likely if drawn < 0.9 else others
        token = chance.choice(among or others)
        row.push(token)
        text.append(known[token])
    for _ in text:
        row.pop()
    return text.decode() if ended else None
