"""Ctrl-C at a chosen line: so that a test can try every place where one may come."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any


def interrupted(call: Callable[[], Any], nth: int, files: tuple[str, ...]) -> bool:
    """Whether Ctrl-C came: ahead of the n-th line that `call` runs in these files."""
    left = nth

    def trace(frame: Any, event: str, arg: Any) -> Any:
        nonlocal left
        if not frame.f_code.co_filename.endswith(files):
            return None
        if event == "line":
            left -= 1
            if not left:
                raise KeyboardInterrupt
        return trace

    sys.settrace(trace)
    try:
        call()
    except KeyboardInterrupt:
        return True
    finally:
        sys.settrace(None)
    return False
