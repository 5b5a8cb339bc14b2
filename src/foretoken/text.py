"""Between text and ids: encoding prompts, decoding what was generated, whole or as it comes."""

from __future__ import annotations

from transformers import PreTrainedTokenizerBase

REPLACEMENT = "\ufffd"  # what an incomplete character decodes to


def decode(tokenizer: PreTrainedTokenizerBase, tokens: list[int]) -> str:
    """The text of `tokens` without special tokens, spaces as they are."""
    text = tokenizer.decode(tokens, skip_special_tokens=True, clean_up_tokenization_spaces=False)
    assert isinstance(text, str)
    return text


class Stream:
    """Text as tokens arrive; the pieces concatenate to the text of all tokens.

    A piece that ends within a character is held back. Only the tokens since the last piece but one
    are decoded again, so the cost of a piece does not grow with the text.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self.tokenizer = tokenizer
        self._tokens: list[int] = []  # those still needed: the last piece's, and the ones held back
        self._seen = 0  # how many of them are the last piece's

    def add(self, tokens: list[int], *, last: bool = False) -> str:
        """The text that `tokens` make certain; with `last` all that is left."""
        self._tokens += tokens
        before = decode(self.tokenizer, self._tokens[: self._seen])
        now = decode(self.tokenizer, self._tokens)
        if len(now) <= len(before) or (now.endswith(REPLACEMENT) and not last):
            return ""
        self._tokens = self._tokens[self._seen :]
        self._seen = len(self._tokens)
        return now[len(before) :]
