"""foretoken: exact, fast generation from Transformers by speculative decoding (arXiv
2211.17192)."""

from foretoken.distributions import SamplingParams
from foretoken.drafters.base import Draft, Drafter
from foretoken.draw import Draw
from foretoken.errors import ForetokenError, InputError, NumericsError, RefusedError
from foretoken.load import load
from foretoken.request import Completion, Piece, Stats, StepRecord
from foretoken.speculator import Speculator

__all__ = [
    "Completion",
    "Draft",
    "Drafter",
    "Draw",
    "ForetokenError",
    "InputError",
    "NumericsError",
    "Piece",
    "RefusedError",
    "SamplingParams",
    "Speculator",
    "Stats",
    "StepRecord",
    "load",
]
