"""Between ids and text: decoding, whole, as tokens arrive, up to a stop string, or token by token;
and comparing two vocabularies.

Knows no models and no rows. Which tokens end a row by their id is not known here; such a token is
not read, the text is closed instead.
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

REPLACEMENT_CHARACTER = "\ufffd"  # what an incomplete character decodes to
BYTE_TOKEN = re.compile(r"<0x[0-9A-F]{2}>")  # a token of SentencePiece's byte fallback


def decode(
    tokenizer: PreTrainedTokenizerBase, tokens: list[int], *, keep_special_tokens: bool = False
) -> str:
    """The text of `tokens`, with special tokens or without, spaces as they are."""
    text = tokenizer.decode(
        tokens, skip_special_tokens=not keep_special_tokens, clean_up_tokenization_spaces=False
    )
    assert isinstance(text, str)
    return text


def decode_continuation(
    tokenizer: PreTrainedTokenizerBase, prompt: list[int], tokens: list[int]
) -> str:
    """Return the text that `tokens` add to that of `prompt`: decoded alone they would lose their
    first space, which SentencePiece decoders drop at the start of a text."""
    return IncrementalDetokenizer(tokenizer, prompt).add(tokens, last=True)


def count_offsets(
    tokenizer: PreTrainedTokenizerBase, tokens: Sequence[int], text: str
) -> list[int]:
    """Return the offset of each token in `text`, of which they are the tokens: special ones that it
    does not hold have no width."""
    start = decode(tokenizer, list(tokens), keep_special_tokens=True).find(text)
    stream = IncrementalDetokenizer(tokenizer, keep_special_tokens=start >= 0)
    offsets = (stream.add_token(token).offset - max(0, start) for token in tokens)
    return [min(max(0, offset), len(text)) for offset in offsets]


class TokenText(NamedTuple):
    """Text that a token adds, and the number of characters before the token."""

    text: str
    offset: int


class IncrementalDetokenizer:
    """Text as tokens arrive behind a prompt; the pieces concatenate to what they add to its text.

    A piece that ends within a character, or within a run of byte tokens, is held back until the
    rest decides how it reads; likewise where the prompt ends so. Only the tokens since the last
    piece but one are decoded again, so the cost of a piece does not grow with the text.
    `pending_text`: what is held back, as it reads if nothing follows.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        prompt: Sequence[int] = (),
        *,
        keep_special_tokens: bool = False,
    ) -> None:
        """`special`: whether special tokens are part of the text."""
        self.tokenizer, self._keep_special_tokens = tokenizer, keep_special_tokens
        added = tokenizer.added_tokens_decoder.items()
        specials = {*tokenizer.all_special_ids, *(i for i, token in added if token.special)}
        self._skipped_ids: set[int] = set() if keep_special_tokens else specials
        self._tokens = list(prompt)  # the last piece's, at first the prompt, and those held back
        self._num_emitted_tokens = len(self._tokens)  # how many of them are the last piece's
        self._length = self._offset = 0  # of the final text; of the last token in it
        self.pending_text = ""

    def add(self, tokens: list[int], *, last: bool = False) -> str:
        """The text that is final once `tokens` are known; with `last`, all the rest."""
        self._tokens += tokens
        before, now = (
            decode(self.tokenizer, tokens, keep_special_tokens=self._keep_special_tokens)
            for tokens in (self._tokens[: self._num_emitted_tokens], self._tokens)
        )
        new = now[len(commonprefix([before, now])) :]  # it may complete the prompt's character
        if not new or (not last and self._can_still_change(now)):
            self.pending_text = new
            return ""
        self.pending_text = ""
        self._tokens = self._tokens[self._num_emitted_tokens :]
        self._num_emitted_tokens = len(self._tokens)
        return new

    def add_token(self, token: int) -> TokenText:
        """Add one token: the text that is final with it, and its offset.

        The offset counts the characters that are complete before the token, so all tokens of one
        character have the same. It depends on no later token.
        """
        before = self.pending_text
        new = self.add([token])
        now = new or self.pending_text
        if now.endswith(
            REPLACEMENT_CHARACTER
        ):  # a run of bytes, which may decode differently again
            complete = len(before.rstrip(REPLACEMENT_CHARACTER))
        else:
            complete = len(commonprefix([before, now]))
        self._offset = max(self._offset, self._length + complete)
        self._length += len(new)
        return TokenText(new, self._offset)

    def _can_still_change(self, text: str) -> bool:
        """Tell whether the next token can still change the text of these."""
        if text.endswith(REPLACEMENT_CHARACTER):
            return True
        for token in reversed(self._tokens):
            name = self.tokenizer.convert_ids_to_tokens(token)
            if token not in self._skipped_ids and isinstance(name, str) and name:
                return BYTE_TOKEN.fullmatch(name) is not None
        return False


class StoppingDetokenizer:
    """The text that new tokens add to a prompt's, up to the first of the stop strings.

    The text ends with the first token at which what has been read, decoded as if nothing followed,
    holds a stop string: replacement characters at its very end, which the next token may complete,
    count only when the text is closed. Among several stop strings in it the one that begins first
    is meant, and among two that begin together the shorter, which was complete first. Text before
    the new tokens takes no part, and a stop string that is complete within the first `min_tokens`
    tokens ends nothing, then or later. So the result is a function of the tokens, not of the steps
    in which they came, and so is the part of it that each token adds.
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
        """`include_stop_string`: whether the stop string is part of the text, which otherwise ends
        before it; `special`: whether special tokens are."""
        assert all(stop_strings), "an empty string ends every text"
        self._stream = IncrementalDetokenizer(
            tokenizer, prompt, keep_special_tokens=keep_special_tokens
        )
        self._stops = tuple(stop_strings)
        self._include_stop_string, self._min_tokens = include_stop_string, min_tokens
        self._max_tail = max(map(len, stop_strings), default=1) - 1
        self._count = 0  # tokens
        self._length = 0  # of the text that no token can change
        self._min_length = 0  # the length of the text of the first `minimum` tokens
        self._pieces: list[TokenText] = []  # that were not taken
        self._emitted: list[str] = []  # the text of all pieces
        self._settled = ""  # the text behind it that no token can change
        self._tail = ""  # the last `_reach` characters of both
        self._ended = self._closed = False

    def append_token(self, token: int) -> str | None:
        """The stop string that is complete with this token, or None. With one the text has ended:
        no further token is read."""
        assert not self._ended, "the text has ended"
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
        """The text ends here: held-back characters are final. A stop string that they complete, or
        None, as where the text has ended before."""
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
        """All of the text; before its end as it is if nothing follows."""
        pending = "" if self._ended else self._stream.pending_text
        return "".join([*self._emitted, self._settled, pending])

    def take_pieces(self) -> list[TokenText]:
        """The text that may be shown with each token, of those that were read since the last call;
        the end, too, is a piece. None of it can be changed by a later token or begins a stop
        string. The pieces concatenate to `text` once it is closed."""
        pieces, self._pieces = self._pieces, []
        return pieces

    def take_text(self) -> str:
        """The text of `pieces`."""
        return "".join(piece.text for piece in self.take_pieces())

    def _emit_piece(self, offset: int) -> None:
        """Make a piece of what may be shown."""
        cut = len(self._settled) - (0 if self._ended else self._count_withheld_characters())
        text, self._settled = self._settled[:cut], self._settled[cut:]
        self._emitted.append(text)
        self._pieces.append(TokenText(text, offset))

    def _end_at_stop_string(self, settled: str, pending: str) -> str | None:
        """End the text at the first stop string in `settled`, its last characters, and `pending`,
        what follows if nothing else does. The stop string, or None.

        Nothing shown lies behind the cut: a match that began there would have held it back.
        """
        window = settled + pending
        min_end = self._min_length - (self._length - len(settled))  # where no stop string may end
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
        """Count the characters at the end of the settled text with which a stop string may
        begin."""
        for start in range(len(self._tail)):
            if any(stop.startswith(self._tail[start:]) for stop in self._stops):
                return len(self._tail) - start
        return 0


class TokenSpelling:
    """Spelling of one tokenizer's tokens: names, in which no part of a character is like another
    one, with their bytes; without a tokenizer a token is shown as its id."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase | None) -> None:
        self.tokenizer = tokenizer
        backend = getattr(tokenizer, "backend_tokenizer", None)
        self.spells_bytes = "ByteLevel" in str(getattr(backend, "decoder", ""))
        self.spell = lru_cache(2**16)(self._spell)

    def name(self, token: int) -> str:
        return self.spell(token)[0]

    def text(self, token: int) -> str:
        """The token as text, with replacement characters for parts of others."""
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
    """A token's text, or its bytes as OpenAI writes those that are no text."""
    try:
        return encoded.decode()
    except UnicodeDecodeError:
        letters = (chr(b) if 32 <= b < 127 and b != ord("\\") else f"\\x{b:02x}" for b in encoded)
        return f"bytes:{''.join(letters)}"


def _map_letters_to_bytes() -> dict[str, int]:
    """The letters that byte-level tokenizers write for bytes: printable ones stand for themselves,
    the others for the first letters from 256 on."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [encoded for encoded in range(256) if encoded not in printable]
    return {chr(encoded): encoded for encoded in printable} | {
        chr(256 + i): encoded for i, encoded in enumerate(others)
    }


_BYTE_OF_LETTER = _map_letters_to_bytes()


def find_differing_tokens(
    first: PreTrainedTokenizerBase, second: PreTrainedTokenizerBase
) -> list[str]:
    """The tokens that are not the same id in both vocabularies."""
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
    """RefusedError where a draft's ids mean other tokens than the target's.

    Vocabularies are compared, so padding of the output layer does not matter; without two
    tokenizers, sizes must do, and `remedy` says what else to do.
    """
    if draft is None or target is None:
        if draft_V != target_V:
            raise RefusedError(
                f"{draft_name} has {draft_V} output rows and the target {target_V}, and there are "
                "no two tokenizers to compare; "
                + (remedy or "give a draft with the target's tokenizer")
            )
        return
    different = find_differing_tokens(draft, target)
    if different:
        ours, theirs, token = target.get_vocab(), draft.get_vocab(), min(different)
        tokens = ours.keys() | theirs.keys()
        raise RefusedError(
            f"{draft_name} has another tokenizer: {len(different)} of the {len(tokens)} tokens in "
            f"either vocabulary differ, {token!r} is id {theirs.get(token)} there and "
            f"{ours.get(token)} in the target; "
            "give a draft with the same vocabulary, or 'lookup'"
        )
