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
from typing import TYPE_CHECKING, Any

from foretoken.errors import RefusedError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

REPLACEMENT = "\ufffd"  # what an incomplete character decodes to
BYTE = re.compile(r"<0x[0-9A-F]{2}>")  # a token of SentencePiece's byte fallback


def decode(tokenizer: PreTrainedTokenizerBase, tokens: list[int], *, special: bool = False) -> str:
    """The text of `tokens`, with special tokens or without, spaces as they are."""
    text = tokenizer.decode(
        tokens, skip_special_tokens=not special, clean_up_tokenization_spaces=False
    )
    assert isinstance(text, str)
    return text


def continued(tokenizer: PreTrainedTokenizerBase, prompt: list[int], tokens: list[int]) -> str:
    """Return the text that `tokens` add to that of `prompt`: decoded alone they would lose their
    first space, which SentencePiece decoders drop at the start of a text."""
    return Stream(tokenizer, prompt).add(tokens, last=True)


class Stream:
    """Text as tokens arrive behind a prompt; the pieces concatenate to what they add to its text.

    A piece that ends within a character, or within a run of byte tokens, is held back until the
    rest decides how it reads; likewise where the prompt ends so. Only the tokens since the last
    piece but one are decoded again, so the cost of a piece does not grow with the text. `held`:
    what is held back, as it reads if nothing follows.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        prompt: Sequence[int] = (),
        *,
        special: bool = False,
    ) -> None:
        """`special`: whether special tokens are part of the text."""
        self.tokenizer, self._special = tokenizer, special
        added = tokenizer.added_tokens_decoder.items()
        specials = {*tokenizer.all_special_ids, *(i for i, token in added if token.special)}
        self._silent: set[int] = set() if special else specials
        self._tokens = list(prompt)  # the last piece's, at first the prompt, and those held back
        self._seen = len(self._tokens)  # how many of them are the last piece's
        self.held = ""

    def add(self, tokens: list[int], *, last: bool = False) -> str:
        """The text that is final once `tokens` are known; with `last`, all the rest."""
        self._tokens += tokens
        before, now = (
            decode(self.tokenizer, tokens, special=self._special)
            for tokens in (self._tokens[: self._seen], self._tokens)
        )
        new = now[len(commonprefix([before, now])) :]  # it may complete the prompt's character
        if not new or (not last and self._open(now)):
            self.held = new
            return ""
        self.held = ""
        self._tokens = self._tokens[self._seen :]
        self._seen = len(self._tokens)
        return new

    def _open(self, now: str) -> bool:
        """Tell whether the next token can still change the text of these."""
        if now.endswith(REPLACEMENT):
            return True
        for token in reversed(self._tokens):
            name = self.tokenizer.convert_ids_to_tokens(token)
            if token not in self._silent and isinstance(name, str) and name:
                return BYTE.fullmatch(name) is not None
        return False


class Transcript:
    """The text that new tokens add to a prompt's, up to the first of the stop strings.

    The text ends with the first token at which what has been read, decoded as if nothing followed,
    holds a stop string: replacement characters at its very end, which the next token may complete,
    count only when the text is closed. Among several stop strings in it the one that begins first
    is meant, and among two that begin together the shorter, which was complete first. Text before
    the new tokens takes no part. So the result is a function of the tokens, not of the steps in
    which they came.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        prompt: Sequence[int],
        stop_strings: Sequence[str] = (),
        *,
        include: bool = False,
        special: bool = False,
    ) -> None:
        """`include`: whether the stop string is part of the text, which otherwise ends before it;
        `special`: whether special tokens are. With stop strings every token is decoded as it is
        read, else when the text is asked for."""
        assert all(stop_strings), "an empty string ends every text"
        self._stream = Stream(tokenizer, prompt, special=special)
        self._stops = tuple(stop_strings)
        self._include = include
        self._reach = max(map(len, stop_strings), default=1) - 1
        self._tokens: list[int] = []  # read, not decoded
        self._gone: list[str] = []  # the text that was shown
        self._waiting: list[str] = []  # the text behind it that no token can change
        self._tail = ""  # the last `_reach` characters of both
        self._ended = False

    def read(self, token: int) -> str | None:
        """The stop string that is complete with this token, or None. With one the text has ended:
        no further token is read."""
        assert not self._ended, "the text has ended"
        self._tokens.append(token)
        if not self._stops:
            return None
        window = self._tail + self._decode()
        stop = self._cut(window, self._stream.held.rstrip(REPLACEMENT))
        self._tail = window[max(0, len(window) - self._reach) :]
        return stop

    def close(self) -> str | None:
        """The text ends here: held-back characters are final. A stop string that they complete, or
        None, as where the text has ended before."""
        if self._ended:
            return None
        self._decode()
        pending = self._stream.held
        stop = self._cut(self._tail, pending)
        if stop is None:
            self._end("".join(self._waiting) + pending)
        return stop

    @property
    def text(self) -> str:
        """All of the text; before its end as it is if nothing follows."""
        self._decode()
        pending = "" if self._ended else self._stream.held
        return "".join([*self._gone, *self._waiting, pending])

    def shown(self) -> str:
        """The text that may be shown and has not been: none that a later token can change or that
        a stop string may begin with. The pieces concatenate to `text` once it has ended."""
        self._decode()
        waiting = "".join(self._waiting)
        cut = len(waiting) - (0 if self._ended else self._begun())
        self._waiting = [waiting[cut:]]
        self._gone.append(waiting[:cut])
        return waiting[:cut]

    def _decode(self) -> str:
        """The text that is settled by the tokens read since the last call."""
        if not self._tokens:
            return ""
        new = self._stream.add(self._tokens)
        self._tokens = []
        self._waiting.append(new)
        return new

    def _cut(self, settled: str, pending: str) -> str | None:
        """End the text at the first stop string in `settled`, its last characters, and `pending`,
        what follows if nothing else does. The stop string, or None.

        Nothing shown lies behind the cut: a match that began there would have held it back.
        """
        window = settled + pending
        spans = [(at, at + len(stop)) for stop in self._stops if (at := window.find(stop)) >= 0]
        if not spans:
            return None
        start, end = min(spans)
        behind = len(window) - (end if self._include else start)
        waiting = "".join(self._waiting) + pending
        self._end(waiting[: len(waiting) - behind])
        return window[start:end]

    def _end(self, waiting: str) -> None:
        self._waiting = [waiting]
        self._ended = True

    def _begun(self) -> int:
        """Count the characters at the end of the settled text with which a stop string may
        begin."""
        for start in range(len(self._tail)):
            if any(stop.startswith(self._tail[start:]) for stop in self._stops):
                return len(self._tail) - start
        return 0


class Spelling:
    """Spelling of one tokenizer's tokens; without a tokenizer a token is shown as its id."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase | None) -> None:
        self.tokenizer = tokenizer
        backend = getattr(tokenizer, "backend_tokenizer", None)
        self.spells_bytes = "ByteLevel" in str(getattr(backend, "decoder", ""))
        self.word = lru_cache(2**16)(self._word)

    def text(self, token: int) -> str:
        return self.word(token)[0]

    def _word(self, token: int) -> tuple[str, bytes]:
        if self.tokenizer is None:
            return f"<{token}>", b""
        name: Any = self.tokenizer.convert_ids_to_tokens(token)
        if not isinstance(name, str):  # an id of the output layer's padding
            return "", b""
        if BYTE.fullmatch(name):
            encoded = bytes([int(name[3:5], 16)])
            return encoded.decode(errors="replace"), encoded
        if not self.spells_bytes:
            text = name.replace("\u2581", " ")
            return text, text.encode()
        try:
            encoded = bytes(_BYTES[letter] for letter in name)
        except KeyError:  # a special token
            encoded = name.encode()
        return encoded.decode(errors="replace"), encoded


def _letters() -> dict[str, int]:
    """The letters that byte-level tokenizers write for bytes: printable ones stand for themselves,
    the others for the first letters from 256 on."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [encoded for encoded in range(256) if encoded not in printable]
    return {chr(encoded): encoded for encoded in printable} | {
        chr(256 + i): encoded for i, encoded in enumerate(others)
    }


_BYTES = _letters()


def other_words(one: PreTrainedTokenizerBase, other: PreTrainedTokenizerBase) -> list[str]:
    """The tokens that are not the same id in both vocabularies."""
    ours, theirs = one.get_vocab(), other.get_vocab()
    return [t for t in ours.keys() | theirs.keys() if ours.get(t) != theirs.get(t)]


def require_same_words(
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
    different = other_words(draft, target)
    if different:
        ours, theirs, token = target.get_vocab(), draft.get_vocab(), min(different)
        tokens = ours.keys() | theirs.keys()
        raise RefusedError(
            f"{draft_name} has another tokenizer: {len(different)} of the {len(tokens)} tokens in "
            f"either vocabulary differ, {token!r} is id {theirs.get(token)} there and "
            f"{ours.get(token)} in the target; "
            "give a draft with the same vocabulary, or 'lookup'"
        )
