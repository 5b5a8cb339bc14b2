"""Ctrl-C at a chosen line: so that a test can try every place where one may come."""

from __future__ import annotations

import linecache
import sys
from collections.abc import Callable
from typing import Any


def interrupted(call: Callable[[], Any], nth: int, files: tuple[str, ...]) -> bool:
    """Whether Ctrl-C came: ahead of the n-th line that `call` runs in files whose paths
    hold one of these. Lines that take or give back a lock are passed over: there the interpreter
    handles no signal, though a tracer may speak."""
    countdown = nth

    def trace(frame: Any, event: str, arg: Any) -> Any:
        nonlocal countdown
        if not any(file in frame.f_code.co_filename for file in files):
            return None
        line = linecache.getline(frame.f_code.co_filename, frame.f_lineno)
        if event == "line" and "with LOCK" not in line and "with self._lock" not in line:
            countdown -= 1
            if not countdown:
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
