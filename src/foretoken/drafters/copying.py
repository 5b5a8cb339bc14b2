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
        self.copies: list[_CopiedSequence] = []

    def start(
        self, rows: list[int], prompts: list[list[int]], sources: list[list[int]] | None
    ) -> None:
        self.copies += [_CopiedSequence(ids) for ids in sources or prompts]

    def propose(self, gamma: list[int], draw: Draw) -> Draft:
        return pack([copy.propose(g) for copy, g in zip(self.copies, gamma, strict=True)])

    def commit(self, tokens: list[list[int]]) -> None:
        for copy, text in zip(self.copies, tokens, strict=True):
            copy.append(text)

    def rewind(self, counts: list[int]) -> None:
        for copy, count in zip(self.copies, counts, strict=True):
            copy.pop(count)

    def leave(self, rows: list[int]) -> None:
        self.copies = [self.copies[b] for b in list_remaining_rows(len(self.copies), rows)]


@dataclass(slots=True)
class _CopiedSequence:
    """One row: its input, its output so far, and the place in the input where that goes on."""

    source: list[int]
    output: list[int] = field(default_factory=list[int])
    position: int | None = 0
    previous_positions: list[int | None] = field(
        default_factory=list[int | None]
    )  # its place at every token

    def propose(self, count: int) -> list[int]:
        return [] if self.position is None else self.source[self.position : self.position + count]

    def append(self, tokens: list[int]) -> None:
        """Follow the output as long as it copies, and find the place again where it does not."""
        for token in tokens:
            self.previous_positions.append(self.position)
            self.output.append(token)
            if self.position is not None and self.source[self.position : self.position + 1] == [
                token
            ]:
                self.position += 1
            else:
                self.position = self._find()

    def pop(self, count: int) -> None:
        """Take the last `count` tokens back."""
        for _ in range(count):
            self.output.pop()
            self.position = self.previous_positions.pop()

    def _find(self) -> int | None:
        """Behind the output's shortest end that the input holds in exactly one place, if any."""
        positions = list(range(1, len(self.source) + 1))
        for n, token in enumerate(reversed(self.output)):
            positions = [i for i in positions if i > n and self.source[i - 1 - n] == token]
            if len(positions) < 2:
                break
        return positions[0] if len(positions) == 1 else None
