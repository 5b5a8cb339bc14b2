"""Decode token ids to text: all at once, incrementally, up to a stop string or one token at a time.
Compare the vocabularies of two tokenizers.

The caller handles EOS and stop token ids: it ends the output instead of appending such an id.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import lru_cache
from os.path import commonprefix
from typing import TYPE_CHECKING, Any, NamedTuple

from foretoken.errors import RefusedError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

REPLACEMENT_CHARACTER = "\ufffd"  # an incomplete UTF-8 sequence, decoded
BYTE_TOKEN = re.compile(r"<0x[0-9A-F]{2}>")  # a token of SentencePiece's byte fallback


def decode(
    tokenizer: PreTrainedTokenizerBase, tokens: list[int], *, keep_special_tokens: bool = False
) -> str:
    """Return the text of `tokens`, with or without special tokens; spaces are not cleaned up."""
    text = tokenizer.decode(
        tokens, skip_special_tokens=not keep_special_tokens, clean_up_tokenization_spaces=False
    )
    assert isinstance(text, str)
    return text


def decode_continuation(
    tokenizer: PreTrainedTokenizerBase, prompt: list[int], tokens: list[int]
) -> str:
    """Return the string that `tokens` add to the decoded `prompt`. Without the prompt, a
    SentencePiece decoder would drop a space at the start of `tokens`."""
    return IncrementalDetokenizer(tokenizer, prompt).add(tokens, last=True)


def count_offsets(
    tokenizer: PreTrainedTokenizerBase, tokens: Sequence[int], text: str
) -> list[int]:
    """Return the offset of each token, in characters, in `text`, which is the decoded `tokens`.
    Special tokens that `text` does not contain have width 0."""
    start = decode(tokenizer, list(tokens), keep_special_tokens=True).find(text)
    stream = IncrementalDetokenizer(tokenizer, keep_special_tokens=start >= 0)
    offsets = (stream.add_token(token).offset - max(0, start) for token in tokens)
    return [min(max(0, offset), len(text)) for offset in offsets]


class TokenText(NamedTuple):
    """The characters that a token adds, and its offset in the output, in characters."""

    text: str
    offset: int


class IncrementalDetokenizer:
    """Detokenizes the tokens after a prompt as they arrive. It returns pieces, which
    concatenate to the string that the tokens add to the prompt.

    A piece that ends within a character, or within a run of byte tokens, is held back until later
    tokens complete the character or run. Such a character may begin in the prompt. Each call
    decodes only the tokens since the last piece but one, so the cost of a call does not grow with
    the output. `pending_text`: the held-back characters, decoded as if no token followed.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        prompt: Sequence[int] = (),
        *,
        keep_special_tokens: bool = False,
    ) -> None:
        """`keep_special_tokens`: whether the output includes special tokens."""
        self.tokenizer, self._keep_special_tokens = tokenizer, keep_special_tokens
        added = tokenizer.added_tokens_decoder.items()
        specials = {*tokenizer.all_special_ids, *(i for i, token in added if token.special)}
        self._skipped_ids: set[int] = set() if keep_special_tokens else specials
        # tokens of the last piece (at first the prompt), then tokens held back
        self._tokens = list(prompt)
        self._num_emitted_tokens = len(self._tokens)  # tokens of the last piece in `_tokens`
        self._length = self._offset = 0  # number of final characters; offset of the last token
        self.pending_text = ""

    def add(self, tokens: list[int], *, last: bool = False) -> str:
        """Append `tokens` and return the characters that became final; with `last`, all remaining
        characters."""
        self._tokens += tokens
        before, now = (
            decode(self.tokenizer, tokens, keep_special_tokens=self._keep_special_tokens)
            for tokens in (self._tokens[: self._num_emitted_tokens], self._tokens)
        )
        new = now[len(commonprefix([before, now])) :]  # may complete a character of the prompt
        if not new or (not last and self._can_still_change(now)):
            self.pending_text = new
            return ""
        self.pending_text = ""
        self._tokens = self._tokens[self._num_emitted_tokens :]
        self._num_emitted_tokens = len(self._tokens)
        return new

    def add_token(self, token: int) -> TokenText:
        """Append one token; return the characters that became final and the token's offset.

        The offset counts the characters that are complete before the token, so all tokens of one
        character have the same offset. The offset does not depend on later tokens.
        """
        before = self.pending_text
        new = self.add([token])
        now = new or self.pending_text
        if now.endswith(REPLACEMENT_CHARACTER):  # incomplete bytes, which may still change
            complete = len(before.rstrip(REPLACEMENT_CHARACTER))
        else:
            complete = len(commonprefix([before, now]))
        self._offset = max(self._offset, self._length + complete)
        self._length += len(new)
        return TokenText(new, self._offset)

    def _can_still_change(self, text: str) -> bool:
        """Return whether the next token can change `text`, the decoded `_tokens`."""
        if text.endswith(REPLACEMENT_CHARACTER):
            return True
        for token in reversed(self._tokens):
            name = self.tokenizer.convert_ids_to_tokens(token)
            if token not in self._skipped_ids and isinstance(name, str) and name:
                return BYTE_TOKEN.fullmatch(name) is not None
        return False


class StoppingDetokenizer:
    """Detokenizes new tokens after a prompt, and cuts the output at the first stop string.

    The output ends with the first token after which the output, decoded as if no token followed,
    contains a stop string. Replacement characters at the end of the output, which the next token
    may complete, are part of a stop string only in `close`. If several stop strings are found, the
    output ends at the stop string that begins first, or at the shorter one if two begin together. A
    stop string that begins in the prompt is ignored. A stop string that is complete within the
    first `min_tokens` tokens is ignored, also later. So the output, and the part of it that each
    token adds, depend only on the tokens, not on their split into steps.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        prompt: Sequence[int],
        stop_strings: Sequence[str] = (),
        *,
        include_stop_string: bool = False,
        keep_special_tokens: bool = False,
        min_tokens: int = 0,
    ) -> None:
        """`include_stop_string`: whether the output includes the stop string or ends before it.
        `keep_special_tokens`: whether the output includes special tokens."""
        assert all(stop_strings), "an empty string ends every text"
        self._stream = IncrementalDetokenizer(
            tokenizer, prompt, keep_special_tokens=keep_special_tokens
        )
        self._stops = tuple(stop_strings)
        self._include_stop_string, self._min_tokens = include_stop_string, min_tokens
        self._max_tail = max(map(len, stop_strings), default=1) - 1
        self._count = 0  # tokens
        self._length = 0  # number of final characters
        self._min_length = 0  # number of characters of the first `min_tokens` tokens
        self._pieces: list[TokenText] = []  # not taken yet
        self._emitted: list[str] = []  # all pieces
        self._settled = ""  # final characters after `_emitted`, which may begin a stop string
        self._tail = ""  # the last `_max_tail` final characters
        self._ended = self._closed = False

    def append_token(self, token: int) -> str | None:
        """Append a token and return the stop string that it completes, or None. After a stop string
        the output has ended and accepts no token."""
        assert not self._ended, "the output has ended"
        new, offset = self._stream.add_token(token)
        self._count += 1
        self._settled += new
        self._length += len(new)
        window, stop = self._tail + new, None
        if self._stops:
            pending = self._stream.pending_text.rstrip(REPLACEMENT_CHARACTER)
            if self._count <= self._min_tokens:
                self._min_length = self._length + len(pending)
            stop = self._end_at_stop_string(window, pending)
        self._tail = window[max(0, len(window) - self._max_tail) :]
        self._emit_piece(offset)
        return stop

    def close(self) -> str | None:
        """End the output: held-back characters become final. Return the stop string that they
        complete; None if they complete none or the output had already ended."""
        if self._closed:
            return None
        self._closed, stop = True, None
        if not self._ended:
            pending = self._stream.pending_text
            stop = (
                self._end_at_stop_string(self._tail, pending)
                if self._count > self._min_tokens
                else None
            )
            if stop is None:
                self._end_text(self._settled + pending)
        self._emit_piece(sum(map(len, self._emitted)) + len(self._settled))
        return stop

    @property
    def text(self) -> str:
        """Return the whole output so far. Until the output has ended, it is decoded as if no token
        followed."""
        pending = "" if self._ended else self._stream.pending_text
        return "".join([*self._emitted, self._settled, pending])

    def take_pieces(self) -> list[TokenText]:
        """Return the pieces since the last call: one per token, and one for the end. Pieces are
        final: no later token can change them or make them part of a stop string. After `close`, all
        pieces concatenate to `text`."""
        pieces, self._pieces = self._pieces, []
        return pieces

    def take_text(self) -> str:
        """Return the concatenated pieces since the last call of this or `take_pieces`."""
        return "".join(piece.text for piece in self.take_pieces())

    def _emit_piece(self, offset: int) -> None:
        """Append a piece: the settled characters before a possible beginning of a stop string."""
        cut = len(self._settled) - (0 if self._ended else self._count_withheld_characters())
        text, self._settled = self._settled[:cut], self._settled[cut:]
        self._emitted.append(text)
        self._pieces.append(TokenText(text, offset))

    def _end_at_stop_string(self, settled: str, pending: str) -> str | None:
        """End the output at the first stop string in `settled + pending`: the last final characters
        and the held-back characters. Return the stop string, or None.

        Emitted pieces are never cut: characters that may begin a stop string are withheld.
        """
        window = settled + pending
        # a stop string must end after this index
        min_end = self._min_length - (self._length - len(settled))
        matches = (
            (window.find(stop, max(0, min_end - len(stop) + 1)), stop) for stop in self._stops
        )
        spans = [(at, at + len(stop)) for at, stop in matches if at >= 0]
        if not spans:
            return None
        start, end = min(spans)
        dropped = len(window) - (end if self._include_stop_string else start)
        waiting = self._settled + pending
        self._end_text(waiting[: len(waiting) - dropped])
        return window[start:end]

    def _end_text(self, waiting: str) -> None:
        self._settled = waiting
        self._ended = True

    def _count_withheld_characters(self) -> int:
        """Return the number of characters at the end of `_tail` that may begin a stop string."""
        for start in range(len(self._tail)):
            if any(stop.startswith(self._tail[start:]) for stop in self._stops):
                return len(self._tail) - start
        return 0


class TokenSpelling:
    """Names and bytes of one tokenizer's tokens. Tokens with different incomplete characters have
    different names. Without a tokenizer, a token's name is its id."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase | None) -> None:
        self.tokenizer = tokenizer
        backend = getattr(tokenizer, "backend_tokenizer", None)
        self.spells_bytes = "ByteLevel" in str(getattr(backend, "decoder", ""))
        self.spell = lru_cache(2**16)(self._spell)

    def name(self, token: int) -> str:
        return self.spell(token)[0]

    def to_text(self, token: int) -> str:
        """Return the token as text, with replacement characters for incomplete characters."""
        name, encoded = self.spell(token)
        return encoded.decode(errors="replace") if encoded else name

    def _spell(self, token: int) -> tuple[str, bytes]:
        if self.tokenizer is None:
            return f"<{token}>", b""
        name: Any = self.tokenizer.convert_ids_to_tokens(token)
        if not isinstance(name, str):  # an id of the output layer's padding
            return "", b""
        if BYTE_TOKEN.fullmatch(name):
            encoded = bytes([int(name[3:5], 16)])
            return _format_bytes(encoded), encoded
        if not self.spells_bytes:
            text = name.replace("\u2581", " ")
            return text, text.encode()
        try:
            encoded = bytes(_BYTE_OF_LETTER[letter] for letter in name)
        except KeyError:  # a special token
            encoded = name.encode()
        return _format_bytes(encoded), encoded


def _format_bytes(encoded: bytes) -> str:
    """Return a token's text or, if its bytes are not valid UTF-8, the bytes in OpenAI's format."""
    try:
        return encoded.decode()
    except UnicodeDecodeError:
        letters = (chr(b) if 32 <= b < 127 and b != ord("\\") else f"\\x{b:02x}" for b in encoded)
        return f"bytes:{''.join(letters)}"


def _map_letters_to_bytes() -> dict[str, int]:
    """Return the byte that each letter of byte-level vocabularies stands for. Printable bytes are
    their own letters; the letters of all other bytes are the characters from code point 256 on."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [encoded for encoded in range(256) if encoded not in printable]
    return {chr(encoded): encoded for encoded in printable} | {
        chr(256 + i): encoded for i, encoded in enumerate(others)
    }


_BYTE_OF_LETTER = _map_letters_to_bytes()


def find_differing_tokens(
    first: PreTrainedTokenizerBase, second: PreTrainedTokenizerBase
) -> list[str]:
    """Return the tokens whose ids differ in two vocabularies, or that only one of them has."""
    ours, theirs = first.get_vocab(), second.get_vocab()
    return [t for t in ours.keys() | theirs.keys() if ours.get(t) != theirs.get(t)]


def require_same_vocabulary(
    draft_name: str,
    draft_V: int,
    draft: PreTrainedTokenizerBase | None,
    target_V: int,
    target: PreTrainedTokenizerBase | None,
    remedy: str | None = None,
) -> None:
    """Raise RefusedError if ids stand for other tokens in the draft model than in the target.

    The check compares the vocabularies of the tokenizers, so padding of the output layers does not
    matter. If a tokenizer is missing, it compares the sizes of the output layers; `remedy` is then
    the end of the message.
    """
    if draft is None or target is None:
        if draft_V != target_V:
            raise RefusedError(
                f"{draft_name} has {draft_V} output rows and the target {target_V}, and without "
                "both tokenizers the two vocabularies cannot be compared; "
                + (remedy or "give a draft with the target's tokenizer")
            )
        return
    different = find_differing_tokens(draft, target)
    if different:
        ours, theirs, token = target.get_vocab(), draft.get_vocab(), min(different)
        tokens = ours.keys() | theirs.keys()
        raise RefusedError(
            f"{draft_name} has another tokenizer than the target: of the {len(tokens)} tokens in "
            f"the two vocabularies, {len(different)} have different ids or are in one of them "
            f"only; for example, {token!r} is id {theirs.get(token)} in the draft and "
            f"{ours.get(token)} in the target; "
            "give a draft with the same vocabulary, or 'lookup'"
        )
