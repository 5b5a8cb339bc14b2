"""Grammars are compiled in a process of their own first: a few lines may take hours or all memory,
and a compilation cannot be stopped. A grammar that fails there is refused before it
reaches the engine.

`python -m foretoken.server.process.grammar_sandbox` is that process: it imports llguidance alone,
so imports of torch are within functions.
"""

from __future__ import annotations

from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from foretoken.server.process import sandbox
from foretoken.shared_cache import SharedCache

if TYPE_CHECKING:
    from foretoken.sampling.checks import Structured

MAX_CACHED = 256  # grammars that have compiled


class GrammarSandbox:
    """A process that compiles grammars over one tokenizer; it starts with the first."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._sandbox = sandbox.Sandbox(__name__, "compile", "make it simpler", self._settings)
        self.close = self._sandbox.close
        self._good: SharedCache[None] = SharedCache(MAX_CACHED)

    def _settings(self) -> dict[str, Any]:
        from foretoken.controls.grammar import spelled

        return {"tokenizer": spelled(self._tokenizer)}

    def require(self, structured: Structured) -> None:
        """Raise InputError for a grammar that does not compile within the bounds; the engine
        reports one that is invalid."""
        self._good.get(structured, self._require, structured)

    def _require(self, structured: Structured) -> None:
        from foretoken.controls.grammar import source

        if find_spec("llguidance") is None or not getattr(self._tokenizer, "is_fast", False):
            return  # the engine reports it better
        self._sandbox.ask(f"structured's {structured.kind}", {"grammar": source(structured)})


def _start(settings: dict[str, Any]) -> Any:
    from llguidance import LLMatcher, LLTokenizer

    # any end token: it does not matter here
    lexicon = LLTokenizer(settings["tokenizer"], eos_token=0)

    def compiled(question: dict[str, Any], _: bytearray) -> sandbox.Message:
        matcher = LLMatcher(lexicon, question["grammar"], log_level=0)
        if not matcher.is_error():
            matcher.compute_ff_bytes()
            matcher.compute_bitmask()
        return {}, b""

    return compiled


if __name__ == "__main__":
    sandbox.answer(_start)
