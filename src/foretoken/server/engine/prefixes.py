"""Which engine has read how much of a prompt: digests of its beginnings, each of which goes for all
that stands before it."""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Hashable
from typing import Any

CHARACTERS, IDS = 64, 16  # of a prompt that one digest more stands for
KEPT = 2**17  # digests: prompts of 8 million characters


def digests(prompt: Any, options: dict[str, Any]) -> list[int]:
    """Of a prompt's beginnings, the shortest first: of a text, of ids, or of messages in which
    every turn extends the last. Those of other salts and templates differ."""
    size = CHARACTERS
    if isinstance(prompt, list) and prompt and isinstance(prompt[0], dict):
        prompt = "".join(f"{turn.get('role')}\0{turn.get('content')}\0" for turn in prompt)
    elif isinstance(prompt, list):
        size = IDS
    about = options.get("cache_salt"), options.get("chat_template")
    running, hashes = hashlib.blake2b(repr(about).encode(), digest_size=8), list[int]()
    for start in range(0, len(prompt) - size + 1, size):
        running.update(repr(prompt[start : start + size]).encode(errors="surrogatepass"))
        hashes.append(int.from_bytes(running.digest()))
    return hashes


class Prefixes:
    """Who has read what; what was asked for longest ago is forgotten."""

    def __init__(self) -> None:
        self._readers: OrderedDict[int, set[Hashable]] = OrderedDict()

    def known(self, reader: Hashable, prompt: list[int]) -> int:
        """How many of these digests, from the first on, this reader has read."""
        for count, digest in enumerate(prompt):
            if reader not in self._readers.get(digest, ()):
                return count
        return len(prompt)

    def note(self, reader: Hashable, prompt: list[int]) -> None:
        """This reader reads them now."""
        for digest in prompt:
            self._readers.setdefault(digest, set()).add(reader)
            self._readers.move_to_end(digest)
        while len(self._readers) > KEPT:
            self._readers.popitem(last=False)
