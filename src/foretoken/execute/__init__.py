"""Stochastic speculative execution, outside language models (paper, Discussion).

A slow f gives a distribution, a slow g takes a sample of it; g is started on guesses while f runs.
Knows no models and no tokens.

Examples:
    >>> from foretoken.execute import speculate
    >>> def f(x):
    ...     return {x: 1.0}
    >>> def g(y):
    ...     return y + 1
    >>> speculate(f, g, q={3: 1.0}, x=3).value
    4
"""

from typing import TYPE_CHECKING

from foretoken.errors import renamed
from foretoken.execute.finite import Distribution
from foretoken.execute.speculation import Bet, Execution, Flag, Seconds, speculate, speculate_async

__all__ = ["Bet", "Distribution", "Execution", "Flag", "Seconds", "speculate", "speculate_async"]

if not TYPE_CHECKING:

    def __getattr__(name: str) -> None:
        raise renamed("foretoken.execute", name, {"Law": "Distribution"})
