"""Vocabularies: conversion of tokens to bytes and of bytes to tokens, and the tokens that a
target's and a draft model's vocabulary have in common.

Errors in a vocabulary cannot make the output wrong, because a draft model may use any input and any
distribution. Such errors only lower the number of accepted draft tokens.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from functools import lru_cache
from itertools import islice, takewhile
from operator import itemgetter
from typing import TYPE_CHECKING

from foretoken.errors import RefusedError
from foretoken.text.decoding import BYTE_TOKEN

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


SENTENCEPIECE_SPACE = "\u2581"  # SentencePiece's character for a space
ENCODING_PREFIXES = ("", "\n")  # a tokenizer adds no space after "\n"
MAX_CACHED_WORDS = 2**14  # words whose tokens are cached
Encode = Callable[[str], Sequence[int]]


class Vocabulary:
    """The vocabulary of one model.

    spellings: The bytes of each token that is not special.
    encode: The tokenizer's function from a string to ids; None: bytes are tokenized by longest
        match.
    prefix_ids: The special tokens at the beginning of each sequence.
    special_ids: The ids of the special tokens by name.
    eos_id: The end-of-sequence token; None: there is none.
    """

    def __init__(
        self,
        spellings: Mapping[int, bytes],
        encode: Encode | None = None,
        *,
        prefix_ids: Sequence[int] = (),
        special_ids: Mapping[str, int] | None = None,
        eos_id: int | None = None,
    ) -> None:
        self.spellings = {token: word for token, word in spellings.items() if word}
        self.ids_by_bytes: dict[bytes, int] = {}  # the first id of each spelling
        for token, word in self.spellings.items():
            self.ids_by_bytes.setdefault(word, token)
        self.prefix_ids, self.special_ids, self.eos_id = (
            list(prefix_ids),
            dict(special_ids or {}),
            eos_id,
        )
        self._encode = encode
        self._max_word_bytes = max(map(len, self.ids_by_bytes), default=0)
        # SentencePiece adds a space before a string
        self.adds_space = encode is not None and self.to_bytes(encode("a")[:1]).startswith(b" ")
        self.tokenize = lru_cache(MAX_CACHED_WORDS)(self._tokenize)
        self.find_longer = lru_cache(MAX_CACHED_WORDS)(self._find_longer)
        self._sorted = sorted((word, token) for token, word in self.spellings.items())

    @classmethod
    def from_tokenizer(cls, name: str, tokenizer: PreTrainedTokenizerBase, V: int) -> Vocabulary:
        """Return the vocabulary of a tokenizer, with the ids below V only. Raises RefusedError,
        with the model's name, for a slow tokenizer, which does not provide the bytes of its
        tokens."""
        backend = getattr(tokenizer, "backend_tokenizer", None)
        if backend is None:
            raise RefusedError(
                f"{name} has no fast tokenizer ({type(tokenizer).__name__}), so the bytes of its "
                "tokens are unknown; give a target and a draft that both have fast tokenizers of "
                "transformers, or draft='lookup'"
            )
        added = {i: str(token.content) for i, token in tokenizer.added_tokens_decoder.items()}
        special = {*tokenizer.all_special_ids}
        special |= {i for i, token in tokenizer.added_tokens_decoder.items() if token.special}
        spell = _spell_byte_token if "ByteLevel" in str(backend.decoder) else _spell_text_token
        spellings: dict[int, bytes] = {}
        fallback: dict[int, bytes] = {}  # byte tokens like <0x0A>: used only if no other token fits
        for word, i in sorted(tokenizer.get_vocab().items(), key=lambda item: item[1]):
            if i < V and i not in special:
                by_byte = spell is _spell_text_token and BYTE_TOKEN.fullmatch(word)
                which = fallback if by_byte else spellings
                which[i] = added[i].encode() if i in added else spell(word)

        copy = deepcopy(backend)  # calls of the tokenizer set truncation and padding in its backend
        copy.no_truncation()
        copy.no_padding()

        def encode(text: str) -> list[int]:
            return copy.encode(text, add_special_tokens=False).ids

        encoded, plain = tokenizer("a").input_ids, encode("a")
        prefix_length = next(
            (k for k in range(len(encoded)) if encoded[k : k + len(plain)] == plain), 0
        )
        ids = (i for i in special if i < V and i != tokenizer.unk_token_id)
        names = {str(tokenizer.convert_ids_to_tokens(i)): i for i in ids}
        eos_id = tokenizer.eos_token_id
        eos_id = eos_id if isinstance(eos_id, int) and eos_id < V else None
        return cls(
            spellings | fallback,
            encode,
            prefix_ids=encoded[:prefix_length],
            special_ids=names,
            eos_id=eos_id,
        )

    def to_bytes(self, tokens: Sequence[int]) -> bytes:
        """Return the bytes of tokens, concatenated; special tokens have no bytes."""
        return b"".join(self.spellings.get(token, b"") for token in tokens)

    def add_space(self, text: bytes) -> bytes:
        """Return the first bytes of a string with the space that SentencePiece adds before the
        string."""
        return b" " + text if self.adds_space and text else text

    def strip_space(self, text: bytes) -> bytes:
        """Return the bytes of a string's first tokens, without the space that SentencePiece
        adds."""
        return text.removeprefix(b" ") if self.adds_space else text

    def _tokenize(self, text: bytes) -> tuple[int, ...]:
        """Return the tokens of a substring: the tokenizer's tokens if they have exactly the
        substring's bytes; otherwise tokens found by longest match, which skips bytes with which no
        token begins."""
        try:
            string = text.decode()
        except UnicodeDecodeError as error:  # for instance an incomplete character at the end
            start = error.start
            return (*self.tokenize(text[:start]), *self._cut_greedily(text[start:]))
        for before in ENCODING_PREFIXES if self._encode is not None else ():
            assert self._encode is not None
            head = tuple(self._encode(before)) if before else ()
            tokens = tuple(self._encode(before + string))
            if tokens[: len(head)] == head and self.to_bytes(tokens[len(head) :]) == text:
                return tokens[len(head) :]
        return self._cut_greedily(text)

    def _find_longer(self, token: int) -> list[int]:
        """Return the tokens that begin with this token's bytes and are longer."""
        word = self.spellings[token]
        first = bisect_right(self._sorted, word, key=itemgetter(0))
        longer = takewhile(lambda each: each[0].startswith(word), islice(self._sorted, first, None))
        return [each[1] for each in longer]

    def _cut_greedily(self, text: bytes) -> tuple[int, ...]:
        tokens: list[int] = []
        at = 0
        while at < len(text):
            ends = range(min(len(text), at + self._max_word_bytes), at, -1)
            end = next((end for end in ends if text[at:end] in self.ids_by_bytes), None)
            if end is not None:
                tokens.append(self.ids_by_bytes[text[at:end]])
            at = at + 1 if end is None else end
        return tuple(tokens)


def _spell_text_token(word: str) -> bytes:
    """Return the bytes of a token that is stored as text: in SentencePiece's spelling, or
    unchanged."""
    if BYTE_TOKEN.fullmatch(word):
        return bytes([int(word[3:5], 16)])
    return word.replace(SENTENCEPIECE_SPACE, " ").encode()


def _spell_byte_token(word: str) -> bytes:
    """Return the bytes of a token of byte-level BPE, in which each character stands for one
    byte."""
    if all(character in _BYTES for character in word):
        return bytes(_BYTES[character] for character in word)
    return word.encode()


def _make_byte_characters() -> dict[str, int]:
    """Return GPT-2's byte for each character: a printable byte stands for itself, the other bytes
    are represented by the characters from 256 on."""
    printed = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printed]
    return {chr(b): b for b in printed} | {chr(256 + n): b for n, b in enumerate(others)}


_BYTES = _make_byte_characters()


class VocabularyMap:
    """The common tokens of a target's and a draft model's vocabulary. `target_ids` and `draft_ids`
    have the two ids of each common token. Common tokens have the same bytes, are the same special
    token, or are the two ends of sequence."""

    def __init__(self, target: Vocabulary, draft: Vocabulary) -> None:
        self.target, self.draft = target, draft
        pairs = {
            id_: draft.ids_by_bytes[word]
            for word, id_ in target.ids_by_bytes.items()
            if word in draft.ids_by_bytes
        }
        self.num_shared = len(pairs)  # without special tokens
        self.special = {
            i: draft.special_ids[name]
            for name, i in target.special_ids.items()
            if name in draft.special_ids
        }
        if target.eos_id is not None and draft.eos_id is not None:
            self.special = {i: x for i, x in self.special.items() if x != draft.eos_id}
            self.special[target.eos_id] = draft.eos_id
        pairs |= self.special
        self.target_ids, self.draft_ids = list(pairs), list(pairs.values())

    def require(self, draft_name: str, target_name: str) -> None:
        """Raise RefusedError if the two vocabularies have no token in common except special
        tokens."""
        if not self.num_shared:
            raise RefusedError(
                f"{draft_name} has no token in common with {target_name} "
                f"({len(self.draft.spellings)} and {len(self.target.spellings)} tokens); give a "
                "draft for the same kind of text, or draft='lookup'"
            )
