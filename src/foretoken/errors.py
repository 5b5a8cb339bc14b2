"""Everything a caller can cause.

ForetokenError
├── InputError     a value that is not allowed: the message names it and the remedy
└── RefusedError   a model, option or pair that cannot be honoured exactly: the message says why
    └── NumericsError   logits that are no logits (NaN, +inf, nothing possible)
"""


class ForetokenError(Exception):
    """Base of all errors meant for the user: one line, no traceback on the command line."""


class InputError(ForetokenError, ValueError):
    """A value outside what is allowed."""


class RefusedError(ForetokenError):
    """Something that cannot be done exactly, and is therefore not done."""


class NumericsError(RefusedError):
    """A model returned logits from which no law can be made."""
