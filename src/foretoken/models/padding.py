"""How far a pass is padded where one of another size than the last costs more, as on runtimes that
prepare every layer anew for it.

Does not know what runs the pass.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(slots=True)
class Padding:
    """The rule for hiring and buying: a smaller pass is padded to the size of the last one until
    that has cost as much as the change would; then the smaller size is the new one. So at most
    twice of what the best choice in hindsight costs is lost.

    Nothing is padded before `price` has told the costs.
    """

    last: int = 0  # tokens of the last pass
    lost: float = 0.0  # seconds since a pass of that size was needed
    change: float = 0.0  # seconds that a pass of another size than the last takes more
    seconds: Callable[[int], float] | None = None  # of a pass over so many tokens
    single: bool = False  # whether passes over one token of each row are padded too

    def price(self, seconds: Callable[[int], float] | None, change: float, *, single: bool) -> None:
        """What passes cost from now on; None: unknown."""
        self.seconds, self.change, self.single, self.lost = seconds, change, single, 0.0

    def forget(self) -> None:
        """A new batch: what it is padded to does not depend on passes before it."""
        self.last, self.lost = 0, 0.0

    def missing(self, tokens: int, room: int, *, single: bool = False) -> int:
        """Tokens to add to a pass, at most `room`; `single`: it is over one token of each row."""
        missing = self.last - tokens
        possible = 0 < missing <= room and (self.single or not single)
        if possible and self.seconds is not None:
            self.lost += max(0.0, self.seconds(self.last) - self.seconds(tokens))
            if self.lost <= self.change:
                return missing
        self.last, self.lost = tokens, 0.0
        return 0
