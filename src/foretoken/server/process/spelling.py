"""Tokens as reports show them: text and bytes of each one alone."""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, Any

from foretoken.text.decoding import BYTE

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


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
