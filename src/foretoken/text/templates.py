"""Contents that a chat template reads: found by having it write a message, as no two go through one
alike.

Where a template fails on that message, its words decide on texts, and on parts nothing is known.
"""

from __future__ import annotations

import re
from functools import lru_cache
from typing import Any

from transformers.utils.chat_template_utils import render_jinja_template

WORD = "wordforatry"
# Templates that go through the parts of a content, and those that know texts, too
LOOP = re.compile(r"""\bin\s+\w+(\.content\b|\[['"]content['"]\])""")
STRING = re.compile(r"""content(['"]\])?\s+is\s+(not\s+)?(string|iterable|sequence)\b""")
MARKS = dict.fromkeys(("bos_token", "eos_token", "pad_token", "unk_token"), "")


def reads_texts(template: str) -> bool:
    """Tell whether it writes a content that is a text: of that, one which knows parts alone would
    write nothing, without a word."""
    written = _written(template)
    if written is None:
        return not LOOP.search(template) or bool(STRING.search(template))
    return WORD in written or not reads_parts(template)


def reads_parts(template: str, kind: str = "text") -> bool | None:
    """Tell whether it writes the parts of this kind in a list: "text", or "image" and "audio", for
    which it has a mark; None where nothing is known."""
    plain = _written(template, "text")
    if plain is None:
        return False if WORD in (_written(template) or "") else None
    if kind == "text":
        return _whole(plain)
    written = _written(template, kind)
    return None if written is None else _whole(written) and written != plain


def _whole(written: str) -> bool:
    """Tell whether it is a text, not Python's name of a list."""
    return WORD in written and "'type':" not in written


@lru_cache(64)
def _written(template: str, kind: str | None = None) -> str | None:
    """A user's message by this template: a text, or for a kind parts; None where it fails."""
    content: Any = WORD
    if kind is not None:
        content = [{"type": "text", "text": WORD}]
        content = content if kind == "text" else [{"type": kind, kind: "x"}, *content]
    try:
        (written,), _ = render_jinja_template(
            [[{"role": "user", "content": content}]], chat_template=template, **MARKS
        )
    except Exception:  # a template is a program
        return None
    return written
