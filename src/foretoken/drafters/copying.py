"""Copy of the input (Sun et al. 2021, arXiv 2106.04970: Shallow Aggressive Decoding).

For tasks that give most of their input back, such as corrections: guess that the output goes on
copying. After a difference it waits until the output's end occurs in the input again, in one place
only. Draft tokens are certain (no q). Knows no model and no tokenizer. Unlike `LookupDrafter` it
does not search the output.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from foretoken.drafters.base import Draft, Drafter, Draw, pack
from foretoken.models.row_slots import list_remaining_rows


class CopyDrafter(Drafter):
    """Guesses the input from its beginning on: an encoder-decoder's source, else the prompt."""

    runtime = "python"

    def __init__(self) -> None:
        self.copies: list[_Copy] = []

    def start(
        self, rows: list[int], prompts: list[list[int]], sources: list[list[int]] | None
    ) -> None:
        self.copies += [_Copy(ids) for ids in sources or prompts]

    def propose(self, gamma: list[int], draw: Draw) -> Draft:
        return pack([copy.propose(g) for copy, g in zip(self.copies, gamma, strict=True)])

    def commit(self, tokens: list[list[int]]) -> None:
        for copy, text in zip(self.copies, tokens, strict=True):
            copy.read(text)

    def rewind(self, counts: list[int]) -> None:
        for copy, count in zip(self.copies, counts, strict=True):
            copy.unread(count)

    def leave(self, rows: list[int]) -> None:
        self.copies = [self.copies[b] for b in list_remaining_rows(len(self.copies), rows)]


@dataclass(slots=True)
class _Copy:
    """One row: its input, its output so far, and the place in the input where that goes on."""

    ids: list[int]
    output: list[int] = field(default_factory=list[int])
    place: int | None = 0
    before: list[int | None] = field(default_factory=list[int | None])  # its place at every token

    def propose(self, count: int) -> list[int]:
        return [] if self.place is None else self.ids[self.place : self.place + count]

    def read(self, tokens: list[int]) -> None:
        """Follow the output as long as it copies, and find the place again where it does not."""
        for token in tokens:
            self.before.append(self.place)
            self.output.append(token)
            if self.place is not None and self.ids[self.place : self.place + 1] == [token]:
                self.place += 1
            else:
                self.place = self._find()

    def unread(self, count: int) -> None:
        """Take the last `count` tokens back."""
        for _ in range(count):
            self.output.pop()
            self.place = self.before.pop()

    def _find(self) -> int | None:
        """Behind the output's shortest end that the input holds in exactly one place, if any."""
        places = list(range(1, len(self.ids) + 1))
        for n, token in enumerate(reversed(self.output)):
            places = [i for i in places if i > n and self.ids[i - 1 - n] == token]
            if len(places) < 2:
                break
        return places[0] if len(places) == 1 else None
