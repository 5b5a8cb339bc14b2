"""Tokens that end a turn: those that are known to by their names, and those with which a chat
template does, found by having it write a conversation.

Does not know which ids a model's own files name as ends.
"""

from __future__ import annotations

from collections.abc import Mapping
from os.path import commonprefix
from re import escape, findall
from typing import TYPE_CHECKING, Any

from foretoken.text.templates import reads_texts

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# Names of control tokens that end a turn or a document in every vocabulary that has them, as in
# llama.cpp
KNOWN = frozenset(
    "<|im_end|> <|eot_id|> <|eom_id|> <|eot|> <|end|> <|return|> <|call|> <|flush|> <|calls|> "
    "<end_of_turn> <turn|> <end_of_utterance> <|END_OF_TURN_TOKEN|> <EOT> _<EOT> [EOT] [EOS] <eos> "
    "<|endoftext|> <|end_of_text|> <｜end▁of▁sentence｜> [e~[".split()
)
# Beside these <|end|> stands between the parts of a turn (gpt-oss, Solar Open)
PARTED = ({"<|return|>", "<|call|>"}, {"<|flush|>", "<|calls|>"})
ASKED, REPLY, NEXT = "askedforatry", "replyforatry", "nextforatry"


def known_ends(control: Mapping[str, int]) -> set[int]:
    """Return those ids of a vocabulary's control tokens, by name, that end a turn or a document."""
    parted = any(names <= control.keys() for names in PARTED)
    names = KNOWN & control.keys() - ({"<|end|>"} if parted else set())
    return {control[name] for name in names}


def turn_ends(tokenizer: PreTrainedTokenizerBase) -> list[str]:
    """Return the tokens that the chat template writes at the end of an assistant's turn, in their
    order, whether another turn follows or none; [] if it writes none, or fails."""
    template = tokenizer.chat_template
    template = template.get("default") if isinstance(template, Mapping) else template
    names = [token.content for token in tokenizer.added_tokens_decoder.values() if token.content]
    if not template or not names:
        return []
    texts = {"user": ASKED, "assistant": REPLY}
    turns = [{"role": role, "content": text} for role, text in [*texts.items(), ("user", NEXT)]]
    messages: list[Any] = turns
    if not reads_texts(template):
        messages = [x | {"content": [{"type": "text", "text": x["content"]}]} for x in turns]
    try:
        written = [
            str(tokenizer.apply_chat_template(messages[:count], tokenize=False)) for count in (2, 3)
        ]
    except Exception:  # a template is a program
        return []
    if not all(REPLY in text for text in written):
        return []
    end = commonprefix([text.rpartition(REPLY)[2].partition(NEXT)[0] for text in written])
    return findall("|".join(map(escape, sorted(names, key=len, reverse=True))), end)


def special_ids(tokenizer: PreTrainedTokenizerBase) -> dict[str, int]:
    """Return the ids of a tokenizer's special tokens by their names."""
    added = tokenizer.added_tokens_decoder.items()
    return {token.content: i for i, token in added if token.special}
