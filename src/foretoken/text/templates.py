"""Contents that a chat template reads: found by having it write a message, as no two go through one
alike.

Where a template fails on that message, nothing is known.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

WORD = "wordforatry"
MARKS = dict.fromkeys(("bos_token", "eos_token", "pad_token", "unk_token"), "")


def reads_texts(template: str) -> bool | None:
    """Tell whether it writes a content that is a text; None where nothing is known."""
    written = _written(template)
    return None if written is None else WORD in written


def reads_parts(template: str, kind: str = "text") -> bool | None:
    """Tell whether it writes the parts of this kind in a list: "text", or "image" and "audio", for
    which it has a mark. None as above."""
    plain = _written(template, "text")
    if plain is None:
        return False if reads_texts(template) else None
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
    from transformers.utils.chat_template_utils import render_jinja_template  # late: takes a while

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
