"""Long sounds, cut into windows where they are quietest."""

from __future__ import annotations

from itertools import pairwise
from math import ceil
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

BLOCKS = 10  # a second: cuts go through the middle of one


def windows(samples: NDArray[np.float32], rate: int, longest: float) -> list[tuple[int, int]]:
    """Return windows of at most `longest` seconds each, as their first samples and those behind
    their last: the whole sound, or about equally long ones of 5/6 of `longest` at most, each cut in
    the quietest tenth of a second within a twelfth of `longest` around its end.

    Args:
        samples: One channel, `[n]`.
        rate: Samples a second.
        longest: Seconds.

    Examples:
        >>> import numpy
        >>> sound = numpy.ones(40, dtype="float32")
        >>> sound[21:24] = 0
        >>> windows(sound, 10, 3.0)
        [(0, 21), (21, 40)]
    """
    n, most = len(samples), int(longest * rate)
    count = 1 if n <= most else ceil(n / (most * 5 / 6))
    cuts = [_quietest(samples, i * n // count, most // 12, rate) for i in range(1, count)]
    return list(pairwise([0, *cuts, n]))


def _quietest(samples: NDArray[np.float32], middle: int, reach: int, rate: int) -> int:
    """The middle of the quietest block within `reach` samples of `middle`."""
    begin, size = middle - reach, max(1, rate // BLOCKS)
    count = 2 * reach // size
    if not count:
        return middle
    blocks = samples[begin : begin + count * size].reshape(count, size)
    return begin + int((blocks**2).sum(1).argmin()) * size + size // 2
