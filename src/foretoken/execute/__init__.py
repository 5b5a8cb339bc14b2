"""Stochastic speculative execution, outside language models (the paper's Discussion). Knows no
models and no tokens."""

from foretoken.execute.finite import Law
from foretoken.execute.speculation import Bet, Execution, Flag, Seconds, speculate, speculate_async

__all__ = ["Bet", "Execution", "Flag", "Law", "Seconds", "speculate", "speculate_async"]
