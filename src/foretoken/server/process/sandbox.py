"""Grammars are compiled in a process of their own first: a few lines may take hours or all memory,
and a compilation cannot be stopped. A grammar that fails there is refused before the engine takes
it up.

`python -m foretoken.server.process.sandbox` is that process: lines of JSON in and out, a tokenizer
first, then grammars. It imports llguidance alone, and ends itself where one takes too long.
"""

from __future__ import annotations

import faulthandler
import json
import subprocess
import sys
from contextlib import suppress
from functools import lru_cache
from importlib.util import find_spec
from threading import Lock
from typing import TYPE_CHECKING, Any

from foretoken.errors import InputError

if TYPE_CHECKING:
    from foretoken.sampling.checks import Structured

SECONDS = 10.0
BYTES = 4 * 2**30  # of its address space
KEPT = 256  # grammars that are known to be good


class GrammarSandbox:
    """A process that compiles grammars over one tokenizer; it starts with the first."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._process: subprocess.Popen[str] | None = None
        self._lock = Lock()
        self.require = lru_cache(KEPT)(self._require)

    def close(self) -> None:
        """End the process, whatever it does."""
        process = self._process
        if process is not None:
            process.kill()  # before the lock, which waits for its answer
        with self._lock:
            self._end_process()

    def _require(self, structured: Structured) -> None:
        """InputError for what does not compile within these bounds; what compiles to an error is
        left to who tells it."""
        from foretoken.controls.grammar import source

        if find_spec("llguidance") is None or not getattr(self._tokenizer, "is_fast", False):
            return  # which the engine tells better
        text = source(structured)
        with self._lock:
            if self._process is None:
                self._process = self._started()
            if self._answer(text) is None:
                self._end_process()
                raise InputError(
                    f"structured's {structured.kind} takes more than {SECONDS:g} s or "
                    f"{BYTES // 2**30} GB to compile; make it simpler"
                )

    def _started(self) -> subprocess.Popen[str]:
        from foretoken.controls.grammar import spelled

        process = subprocess.Popen(
            [sys.executable, "-m", "foretoken.server.process.sandbox"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        assert process.stdin is not None
        settings = {"tokenizer": spelled(self._tokenizer), "seconds": SECONDS, "bytes": BYTES}
        process.stdin.write(f"{json.dumps(settings)}\n")
        return process

    def _answer(self, text: str) -> str | None:
        """None where the process has ended."""
        assert self._process is not None and self._process.stdin and self._process.stdout
        try:
            self._process.stdin.write(f"{json.dumps(text)}\n")
            self._process.stdin.flush()
        except OSError:
            return None
        return self._process.stdout.readline() or None

    def _end_process(self) -> None:
        if self._process is None:
            return
        self._process.kill()
        with suppress(OSError):  # what it did not read any more
            self._process.__exit__(None, None, None)
        self._process = None


def main() -> None:
    """The process's whole life."""
    from llguidance import LLMatcher, LLTokenizer

    settings = json.loads(sys.stdin.readline())
    # any end token: how texts end is no matter here
    lexicon = LLTokenizer(settings["tokenizer"], eos_token=0)
    _bound(settings["bytes"])
    while line := sys.stdin.readline():
        faulthandler.dump_traceback_later(settings["seconds"], exit=True)  # which needs no lock
        matcher = LLMatcher(lexicon, json.loads(line), log_level=0)
        if not matcher.is_error():
            matcher.compute_ff_bytes()
            matcher.compute_bitmask()
        faulthandler.cancel_dump_traceback_later()
        print("done", flush=True)


def _bound(size: int) -> None:
    with suppress(ImportError, ValueError, OSError):  # there is none on Windows
        import resource

        resource.setrlimit(resource.RLIMIT_AS, (size, size))


if __name__ == "__main__":
    main()
