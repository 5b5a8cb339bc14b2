"""Everything a caller can cause.

ForetokenError
├── InputError     a value that is not allowed: the message names it and the remedy
└── RefusedError   a model, option or pair that cannot be honoured exactly: the message says why
    └── NumericsError   logits that are no logits (NaN, +inf, nothing possible)
"""

import math
from numbers import Integral, Real
from typing import cast

WIDEST = 60  # characters of a value in a message


class ForetokenError(Exception):
    """Base of all errors meant for the user: one line, no traceback on the command line."""


class InputError(ForetokenError, ValueError):
    """A value outside what is allowed."""


class RefusedError(ForetokenError):
    """Something that cannot be done exactly, and is therefore not done."""


class NumericsError(RefusedError):
    """A model returned logits from which no law can be made."""


def whole(value: object) -> bool:
    """Whether it is a whole number: True and False, though Python counts with them, are none."""
    return isinstance(value, Integral) and not isinstance(value, bool)


def real(value: object) -> bool:
    """Whether it is a number, as `whole` means it."""
    return isinstance(value, Real) and not isinstance(value, bool)


def as_float(value: object) -> float:
    """The nearest float of what may be a Fraction or a number of NumPy's; inf where it is too
    large for one, NaN where it is no number at all."""
    if not isinstance(value, Real) or isinstance(value, bool):
        return math.nan
    try:
        return float(value)
    except OverflowError:
        return math.inf if cast(int, value) > 0 else -math.inf


def shown(value: object) -> str:
    """A value as a message names it: short and in one line, whatever it is."""
    try:
        text = repr(value)
    except Exception:  # Python writes out no integer of more than 4,300 digits
        return f"a {type(value).__name__} too large to show"
    text = " ".join(text.split())
    return text if len(text) <= WIDEST else f"{text[: WIDEST - 3]}..."


def one_line(error: Exception) -> str:
    """The beginning of a stranger's error, for a message that must be one line."""
    return " ".join(str(error).split())[:200] or type(error).__name__
