"""Between ids and text: decoding, whole or as tokens arrive, and comparing two vocabularies."""

from __future__ import annotations

import re
from collections.abc import Sequence
from os.path import commonprefix
from typing import TYPE_CHECKING

from foretoken.errors import RefusedError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

REPLACEMENT = "\ufffd"  # what an incomplete character decodes to
BYTE = re.compile(r"<0x[0-9A-F]{2}>")  # a token of SentencePiece's byte fallback


def decode(tokenizer: PreTrainedTokenizerBase, tokens: list[int]) -> str:
    """The text of `tokens` without special tokens, spaces as they are."""
    text = tokenizer.decode(tokens, skip_special_tokens=True, clean_up_tokenization_spaces=False)
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

    def __init__(self, tokenizer: PreTrainedTokenizerBase, prompt: Sequence[int] = ()) -> None:
        self.tokenizer = tokenizer
        added = tokenizer.added_tokens_decoder.items()
        self._silent = {*tokenizer.all_special_ids, *(i for i, token in added if token.special)}
        self._tokens = list(prompt)  # the last piece's, at first the prompt, and those held back
        self._seen = len(self._tokens)  # how many of them are the last piece's
        self.held = ""

    def add(self, tokens: list[int], *, last: bool = False) -> str:
        """The text that is final once `tokens` are known; with `last`, all the rest."""
        self._tokens += tokens
        before = decode(self.tokenizer, self._tokens[: self._seen])
        now = decode(self.tokenizer, self._tokens)
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
