"""Texts of before, apart by whose they are, in bounded memory.

Knows no models and no tokenizer.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from foretoken.text.automaton import Automaton

VOLUME = 2**14  # tokens that are forgotten together
MOST = 2**16  # tokens of all together, some 12 MB


@dataclass(slots=True)
class _Volume:
    salt: str
    texts: Automaton = field(default_factory=Automaton)


class Earlier:
    """Texts by salt: nothing of one salt is shown to another. Beyond `MOST` tokens in all, those
    that came first are forgotten, a volume at a time; of one text at most its last `VOLUME`."""

    def __init__(self) -> None:
        self._volumes: deque[_Volume] = deque()  # the oldest first

    def add(self, salt: str, tokens: Sequence[int]) -> None:
        """Another text of this salt."""
        tokens = tokens[-VOLUME:]
        volume = next((v for v in reversed(self._volumes) if v.salt == salt), None)
        if volume is None or len(volume.texts) + len(tokens) > VOLUME:
            volume = _Volume(salt)
            self._volumes.append(volume)
        for token in tokens:
            volume.texts.append(token)
        volume.texts.bar()
        while sum(len(v.texts) for v in self._volumes) > MOST:
            self._volumes.popleft()

    def of(self, salt: str) -> list[Automaton]:
        """All texts of this salt, the latest first, with barriers between them."""
        return [volume.texts for volume in reversed(self._volumes) if volume.salt == salt]
