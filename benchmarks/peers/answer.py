"""A peer's half of the conversation with `race.py`: JSON lines in, JSON lines out.

First line in: what to load ({target, draft, dtype, draft_dtype, batched, threads, python,
setting}; a setting of "" is the library's own defaults);
answered by what was loaded, {version, precision} and maybe a {note}, or why the pair is not used
for speculation, {plain_only}. Every further line: {prompts,
seeds, max_new_tokens, gamma, temperature, top_k, top_p}, one prompt unless `batched`; answered by
{texts}, for each {tokens, first_tokens, first_seconds, seconds}: seconds until it was there;
first_tokens is 0 where that is not known. What cannot be done is answered by {error}. What
libraries print goes to standard error. Needs nothing but Python: every peer's venv can import it.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import sys
from collections.abc import Callable
from time import perf_counter
from typing import Any

PR_SET_PDEATHSIG = 1  # of Linux
Request = dict[str, Any]
Texts = list[dict[str, Any]]


class Refused(Exception):
    """Something that this peer cannot do; one line."""


class Clock:
    """When a generation's tokens came: all that is reported of its time."""

    def __init__(self) -> None:
        self.began = perf_counter()
        self.first_seconds, self.first_tokens = 0.0, 0

    def tick(self, tokens: int) -> None:
        """That many more tokens are there; the first call is what counts."""
        if not self.first_tokens:
            self.first_seconds, self.first_tokens = perf_counter() - self.began, tokens

    def text(self, tokens: list[int]) -> dict[str, Any]:
        """One of the reply's texts, once all of its new `tokens` are there."""
        seconds = perf_counter() - self.began
        first = {"first_tokens": self.first_tokens, "first_seconds": self.first_seconds}
        return {"tokens": tokens, **first, "seconds": seconds}


def serve(load: Callable[[Request], tuple[dict[str, Any], Callable[[Request], Texts]]]) -> None:
    """Answer until standard input ends. `load` returns a description and what generates."""
    if sys.platform == "linux":  # the asker stops who waits: who has lost it could not end
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what a library prints is no answer
    work: Callable[[Request], Texts] | None = None
    for line in sys.stdin:
        try:
            if work is None:
                reply, work = load(json.loads(line))
            else:
                reply = {"texts": work(json.loads(line))}
        except Refused as error:
            reply = {"error": str(error)}
        except Exception as error:
            reason = " ".join(str(error).split())[:300]
            reply = {"error": f"{type(error).__name__}: {reason}"}
        print(json.dumps(reply), file=out, flush=True)
