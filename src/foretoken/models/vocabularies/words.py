"""The tokens of a vocabulary as the bytes that they stand for, texts as its tokens, and the tokens
of a target and a draft that mean the same.

Nothing here decides what is exact: a draft may read any text and draft token by any distribution
over the text so far. It decides how well a draft understands what it reads.
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
from foretoken.text.decoding import BYTE

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


SPACE = "\u2581"  # SentencePiece's mark for a space
BEHIND = ("", "\n")  # what a text is tokenized behind, so that no space is put before it
KEPT = 2**14  # words whose tokens are remembered
Encode = Callable[[str], Sequence[int]]


class Words:
    """One vocabulary.

    spelled: the bytes of every token that has some. encode: the tokens of a text as its tokenizer
    makes them; without it a text is cut into the longest words. head: what texts begin with.
    specials: ids of tokens without a text. end: of those the one that ends a text.
    """

    def __init__(
        self,
        spelled: Mapping[int, bytes],
        encode: Encode | None = None,
        *,
        head: Sequence[int] = (),
        specials: Mapping[str, int] | None = None,
        end: int | None = None,
    ) -> None:
        self.spelled = {token: word for token, word in spelled.items() if word}
        self.ids: dict[bytes, int] = {}  # the first of those that are spelled alike
        for token, word in self.spelled.items():
            self.ids.setdefault(word, token)
        self.head, self.specials, self.end = list(head), dict(specials or {}), end
        self._encode = encode
        self._longest = max(map(len, self.ids), default=0)
        # SentencePiece puts a space before a text
        self.spaced = encode is not None and self.text(encode("a")[:1]).startswith(b" ")
        self.tokens = lru_cache(KEPT)(self._tokens)
        self.longer = lru_cache(KEPT)(self._longer)
        self._sorted = sorted((word, token) for token, word in self.spelled.items())

    @classmethod
    def of(cls, name: str, tokenizer: PreTrainedTokenizerBase, V: int) -> Words:
        """Return the words of a tokenizer whose ids are below V. RefusedError for one that does not
        show how its tokens are spelled."""
        backend = getattr(tokenizer, "backend_tokenizer", None)
        if backend is None:
            raise RefusedError(
                f"{name} has a tokenizer of another kind ({type(tokenizer).__name__}), which shows "
                "no spelling; give fast tokenizers of transformers to both, or draft='lookup'"
            )
        added = {i: str(token.content) for i, token in tokenizer.added_tokens_decoder.items()}
        silent = {*tokenizer.all_special_ids}
        silent |= {i for i, token in tokenizer.added_tokens_decoder.items() if token.special}
        spell = _of_bytes if "ByteLevel" in str(backend.decoder) else _of_text
        spelled: dict[int, bytes] = {}
        fallback: dict[int, bytes] = {}  # single bytes, which spell a text only where they must
        for word, i in sorted(tokenizer.get_vocab().items(), key=lambda item: item[1]):
            if i < V and i not in silent:
                by_byte = spell is _of_text and BYTE.fullmatch(word)
                which = fallback if by_byte else spelled
                which[i] = added[i].encode() if i in added else spell(word)

        copy = deepcopy(backend)  # calls of the given one leave settings in it
        copy.no_truncation()
        copy.no_padding()

        def encode(text: str) -> list[int]:
            return copy.encode(text, add_special_tokens=False).ids

        encoded, plain = tokenizer("a").input_ids, encode("a")
        at = next((k for k in range(len(encoded)) if encoded[k : k + len(plain)] == plain), 0)
        ids = (i for i in silent if i < V and i != tokenizer.unk_token_id)
        names = {str(tokenizer.convert_ids_to_tokens(i)): i for i in ids}
        end = tokenizer.eos_token_id
        end = end if isinstance(end, int) and end < V else None
        return cls(spelled | fallback, encode, head=encoded[:at], specials=names, end=end)

    def text(self, tokens: Sequence[int]) -> bytes:
        """Return the text of tokens."""
        return b"".join(self.spelled.get(token, b"") for token in tokens)

    def first(self, text: bytes) -> bytes:
        """The beginning of a text as its tokens spell it."""
        return b" " + text if self.spaced and text else text

    def plain(self, text: bytes) -> bytes:
        """The beginning of a text, without the space that tokens put before it."""
        return text.removeprefix(b" ") if self.spaced else text

    def _tokens(self, text: bytes) -> tuple[int, ...]:
        """A text within a longer one as tokens, as its tokenizer makes them where that spells it,
        else by the longest words; bytes that no word begins with are left out."""
        try:
            string = text.decode()
        except UnicodeDecodeError as error:  # such as a character that is still incomplete
            start = error.start
            return (*self.tokens(text[:start]), *self._cut(text[start:]))
        for before in BEHIND if self._encode is not None else ():
            assert self._encode is not None
            head = tuple(self._encode(before)) if before else ()
            tokens = tuple(self._encode(before + string))
            if tokens[: len(head)] == head and self.text(tokens[len(head) :]) == text:
                return tokens[len(head) :]
        return self._cut(text)

    def _longer(self, token: int) -> list[int]:
        """The tokens that begin as this one does, and go on."""
        word = self.spelled[token]
        first = bisect_right(self._sorted, word, key=itemgetter(0))
        longer = takewhile(lambda each: each[0].startswith(word), islice(self._sorted, first, None))
        return [each[1] for each in longer]

    def _cut(self, text: bytes) -> tuple[int, ...]:
        tokens: list[int] = []
        at = 0
        while at < len(text):
            ends = range(min(len(text), at + self._longest), at, -1)
            end = next((end for end in ends if text[at:end] in self.ids), None)
            if end is not None:
                tokens.append(self.ids[text[at:end]])
            at = at + 1 if end is None else end
        return tuple(tokens)


def _of_text(word: str) -> bytes:
    """A token of SentencePiece's, or one that is spelled as it is."""
    if BYTE.fullmatch(word):
        return bytes([int(word[3:5], 16)])
    return word.replace(SPACE, " ").encode()


def _of_bytes(word: str) -> bytes:
    """A token of byte-level BPE, each of whose characters is a byte."""
    if all(character in _BYTES for character in word):
        return bytes(_BYTES[character] for character in word)
    return word.encode()


def _byte_characters() -> dict[str, int]:
    """GPT-2's: bytes that can be printed are themselves, the others the characters from 256 on."""
    printed = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printed]
    return {chr(b): b for b in printed} | {chr(256 + n): b for n, b in enumerate(others)}


_BYTES = _byte_characters()


class Dictionary:
    """Two vocabularies. ours, theirs: the ids of the tokens that both have, pair by pair: they
    stand for the same bytes, are the same special token, or each ends a text."""

    def __init__(self, target: Words, draft: Words) -> None:
        self.target, self.draft = target, draft
        pairs = {id_: draft.ids[word] for word, id_ in target.ids.items() if word in draft.ids}
        self.words = len(pairs)  # without special tokens
        self.special = {
            i: draft.specials[name] for name, i in target.specials.items() if name in draft.specials
        }
        if target.end is not None and draft.end is not None:
            self.special = {i: x for i, x in self.special.items() if x != draft.end}
            self.special[target.end] = draft.end
        pairs |= self.special
        self.ours, self.theirs = list(pairs), list(pairs.values())

    def require(self, draft_name: str, target_name: str) -> None:
        """RefusedError where the two have no word in common."""
        if not self.words:
            raise RefusedError(
                f"{draft_name} shares none of its {len(self.draft.spelled)} words with the "
                f"{len(self.target.spelled)} of {target_name}; give a draft for texts of the same "
                "kind, or draft='lookup'"
            )
