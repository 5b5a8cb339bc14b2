"""A drafter that copies the input (Sun et al. 2021, arXiv 2106.04970: Shallow Aggressive Decoding).

It is meant for tasks whose output repeats most of the input, such as corrections. After the output
has differed from the input, it proposes nothing until the last tokens of the output occur at
exactly one position of the input. Draft tokens are certain (no q). Unlike `LookupDrafter` it does
not search the output.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from foretoken.drafters.base import Draft, Drafter, Draw, pack
from foretoken.models.row_slots import list_remaining_rows


class CopyDrafter(Drafter):
    """A drafter that proposes the tokens of the input, from the first on. The input is the source
    of an encoder-decoder, else the prompt."""

    runtime = "python"

    def __init__(self) -> None:
        self.copies: list[_CopiedSequence] = []
        self._output_lengths: list[int] = []  # of the sequences that start next; empty: no output

    def set_output_lengths(self, lengths: list[int]) -> None:
        self._output_lengths = lengths

    def start(
        self, rows: list[int], prompts: list[list[int]], sources: list[list[int]] | None
    ) -> None:
        lengths = self._output_lengths or [0] * len(prompts)
        self._output_lengths = []
        for b, (prompt, n) in enumerate(zip(prompts, lengths, strict=True)):
            start = len(prompt) - n
            copy = _CopiedSequence(sources[b] if sources else prompt[:start])
            copy.append(prompt[start:])
            self.copies.append(copy)

    def propose(self, gamma: list[int], draw: Draw) -> Draft:
        return pack([copy.propose(g) for copy, g in zip(self.copies, gamma, strict=True)])

    def commit(self, tokens: list[list[int]]) -> None:
        for copy, new in zip(self.copies, tokens, strict=True):
            copy.append(new)

    def rewind(self, counts: list[int]) -> None:
        for copy, count in zip(self.copies, counts, strict=True):
            copy.pop(count)

    def leave(self, rows: list[int]) -> None:
        self.copies = [self.copies[b] for b in list_remaining_rows(len(self.copies), rows)]


@dataclass(slots=True)
class _CopiedSequence:
    """One sequence: its input, its output so far, and the input position to copy from next."""

    source: list[int]
    output: list[int] = field(default_factory=list[int])
    position: int | None = 0
    # the value of `position` before each output token, which `pop` restores
    previous_positions: list[int | None] = field(default_factory=list[int | None])

    def propose(self, count: int) -> list[int]:
        return [] if self.position is None else self.source[self.position : self.position + count]

    def append(self, tokens: list[int]) -> None:
        """Append output tokens. A token that copies the input advances the position; after any
        other token, the position is searched for again."""
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
        """Remove the last `count` output tokens."""
        for _ in range(count):
            self.output.pop()
            self.position = self.previous_positions.pop()

    def _find(self) -> int | None:
        """Return the input position to copy from next: the one after the shortest suffix of the
        output that occurs exactly once in the input. None if there is no such suffix."""
        positions = list(range(1, len(self.source) + 1))
        for n, token in enumerate(reversed(self.output)):
            positions = [i for i in positions if i > n and self.source[i - 1 - n] == token]
            if len(positions) < 2:
                break
        return positions[0] if len(positions) == 1 else None
