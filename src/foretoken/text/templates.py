"""Render probe messages with a chat template, to find out which contents the template accepts and
with which tokens it ends a turn.

If a template fails on a probe, patterns in its source decide whether it accepts strings, and it is
unknown whether it accepts parts. The end-of-turn ids in a model's own config files are handled
elsewhere.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import lru_cache
from os.path import commonprefix
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

from transformers.utils.chat_template_utils import render_jinja_template

PROBE_WORD = "wordforatry"
# Templates that loop over the parts of a content, and those that test for a string
PARTS_LOOP_PATTERN = re.compile(r"""\bin\s+\w+(\.content\b|\[['"]content['"]\])""")
STRING_TEST_PATTERN = re.compile(
    r"""content(['"]\])?\s+is\s+(not\s+)?(string|iterable|sequence)\b"""
)
EMPTY_SPECIAL_TOKENS = dict.fromkeys(("bos_token", "eos_token", "pad_token", "unk_token"), "")
# Names of control tokens that end a turn or a document in every vocabulary that has them, as in
# llama.cpp
TURN_END_TOKENS = frozenset(
    "<|im_end|> <|eot_id|> <|eom_id|> <|eot|> <|end|> <|return|> <|call|> <|flush|> <|calls|> "
    "<end_of_turn> <turn|> <end_of_utterance> <|END_OF_TURN_TOKEN|> <EOT> _<EOT> [EOT] [EOS] <eos> "
    "<|endoftext|> <|end_of_text|> <｜end▁of▁sentence｜> [e~[".split()
)
# In vocabularies with these tokens, <|end|> separates the parts of a turn (gpt-oss, Solar Open)
SPLIT_TURN_TOKENS = ({"<|return|>", "<|call|>"}, {"<|flush|>", "<|calls|>"})
PROBE_QUESTION, PROBE_REPLY, PROBE_NEXT_TURN = "askedforatry", "replyforatry", "nextforatry"


def accepts_strings(template: str) -> bool:
    """Return whether the template renders a content that is a string. A template that supports
    only parts renders nothing for a string, without an error."""
    written = _render_probe(template)
    if written is None:
        return not PARTS_LOOP_PATTERN.search(template) or bool(STRING_TEST_PATTERN.search(template))
    return PROBE_WORD in written or not accepts_parts(template)


def accepts_parts(template: str, kind: str = "text") -> bool | None:
    """Return whether the template renders parts of the type `kind`: "text", "image" or "audio" (as
    a placeholder); None if unknown."""
    plain = _render_probe(template, "text")
    if plain is None:
        return False if PROBE_WORD in (_render_probe(template) or "") else None
    if kind == "text":
        return _is_rendered_word(plain)
    written = _render_probe(template, kind)
    return None if written is None else _is_rendered_word(written) and written != plain


def _is_rendered_word(written: str) -> bool:
    """Return whether the probe was rendered as text, not as the repr of a list."""
    return PROBE_WORD in written and "'type':" not in written


@lru_cache(64)
def _render_probe(template: str, kind: str | None = None) -> str | None:
    """Return a user message rendered by this template: a string, or parts of `kind`; None if the
    template fails."""
    content: Any = PROBE_WORD
    if kind is not None:
        content = [{"type": "text", "text": PROBE_WORD}]
        content = content if kind == "text" else [{"type": kind, kind: "x"}, *content]
    try:
        (written,), _ = render_jinja_template(
            [[{"role": "user", "content": content}]], chat_template=template, **EMPTY_SPECIAL_TOKENS
        )
    except Exception:  # a template is a program
        return None
    return written


def find_turn_end_ids(control: Mapping[str, int]) -> set[int]:
    """Return the ids of the tokens that end a turn or a document. control: the ids of a
    vocabulary's control tokens by name."""
    parted = any(names <= control.keys() for names in SPLIT_TURN_TOKENS)
    names = TURN_END_TOKENS & control.keys() - ({"<|end|>"} if parted else set())
    return {control[name] for name in names}


def find_turn_end_tokens(tokenizer: PreTrainedTokenizerBase) -> list[str]:
    """Return the tokens that the chat template writes at the end of every assistant turn, in their
    order; [] if the template writes none, or fails."""
    template = tokenizer.chat_template
    template = template.get("default") if isinstance(template, Mapping) else template
    names = [token.content for token in tokenizer.added_tokens_decoder.values() if token.content]
    if not template or not names:
        return []
    texts = {"user": PROBE_QUESTION, "assistant": PROBE_REPLY}
    turns = [
        {"role": role, "content": text}
        for role, text in [*texts.items(), ("user", PROBE_NEXT_TURN)]
    ]
    messages: list[Any] = turns
    if not accepts_strings(template):
        messages = [x | {"content": [{"type": "text", "text": x["content"]}]} for x in turns]
    try:
        written = [
            str(tokenizer.apply_chat_template(messages[:count], tokenize=False)) for count in (2, 3)
        ]
    except Exception:  # a template is a program
        return []
    if not all(PROBE_REPLY in text for text in written):
        return []
    end = commonprefix(
        [text.rpartition(PROBE_REPLY)[2].partition(PROBE_NEXT_TURN)[0] for text in written]
    )
    return re.findall("|".join(map(re.escape, sorted(names, key=len, reverse=True))), end)


def get_special_ids(tokenizer: PreTrainedTokenizerBase) -> dict[str, int]:
    """Return the ids of a tokenizer's special tokens by their names."""
    added = tokenizer.added_tokens_decoder.items()
    return {token.content: i for i, token in added if token.special}
