"""The errors that a caller can cause, and helpers for their messages.

ForetokenError
├── InputError     an invalid value: the message names the value and a remedy
│   └── BusyError       a full queue: the request may be sent again later
└── RefusedError   a model, option or pair that cannot run exactly: the message has the reason
    ├── ForeignError    a call of transformers' `generate` that only transformers can run
    ├── NumericsError   invalid logits (NaN, +inf, or -inf for every token)
    └── ControlError    a sequence's controls forbid every token, or a user's control failed
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from numbers import Integral, Real
from os.path import exists
from pathlib import Path
from typing import Any, Self, cast

log = logging.getLogger(__name__)

MAX_VALUE_CHARS = 60  # characters of a value in a message


class ForetokenError(Exception):
    """Base class of all errors meant for the user. The command line prints only the message, in
    one line.

    Attributes:
        option: The name of the invalid option; None if the error is not about one option.

    Examples:
        >>> import foretoken
        >>> try:
        ...     foretoken.SamplingParams(temperature=-1)
        ... except foretoken.ForetokenError as error:
        ...     print(error.option)
        temperature
    """

    option: str | None = None

    def with_option(self, option: str) -> Self:
        """Set `option`, unless it is set already, and return this error.

        Args:
            option: The name of an option.

        Returns:
            This error.
        """
        self.option = self.option or option
        return self


class InputError(ForetokenError, ValueError):
    """An invalid value. The message names the value and a remedy.

    Examples:
        >>> import foretoken
        >>> foretoken.SamplingParams(top_p=2)
        Traceback (most recent call last):
            ...
        foretoken.errors.InputError: top_p is 2.0; give a number in (0, 1]; 1 is off
    """


class BusyError(InputError):
    """A request is refused because the queue is full. The request may be sent again later."""


class SameModelError(InputError):
    """The draft would be an identical copy of the target."""


class RefusedError(ForetokenError):
    """A model, an option, or a pair of target and draft that cannot run exactly. The message
    states the reason.

    Examples:
        >>> import foretoken
        >>> foretoken.SamplingParams(min_new_tokens=9, max_new_tokens=8)
        Traceback (most recent call last):
            ...
        foretoken.errors.RefusedError: min_new_tokens=9 is above max_new_tokens=8; lower the minimum
    """


class ForeignError(RefusedError):
    """A call of transformers' `generate` that a Speculator cannot run, but transformers may.

    Examples:
        >>> import foretoken, torch
        >>> from transformers import LlamaConfig, LlamaForCausalLM
        >>> shape = {"hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 2}
        >>> model = LlamaForCausalLM(LlamaConfig(vocab_size=64, num_hidden_layers=1, **shape))
        >>> spec = foretoken.attach(model, draft="lookup", strict=True)
        >>> try:
        ...     model.generate(torch.tensor([[5, 6, 7]]), num_beams=3, max_new_tokens=2)
        ... except foretoken.ForeignError as error:
        ...     print(str(error).partition(";")[0])
        num_beams=3 asks for a beam search
    """


class NumericsError(RefusedError):
    """Logits of a model that define no distribution: NaN, +inf, or -inf for every token.

    Attributes:
        row: The index of the sequence in the batch; None if unknown.
        whose: "target" or "draft", the model that computed these logits.

    Args:
        message: The error's message.
        row: See the attribute.
        whose: See the attribute.

    Examples:
        >>> import foretoken
        >>> error = foretoken.NumericsError("the logits are NaN", row=2)
        >>> error.row, error.whose
        (2, 'target')
    """

    def __init__(self, message: str, row: int | None = None, whose: str = "target") -> None:
        super().__init__(message)
        self.row, self.whose = row, whose


class ControlError(RefusedError):
    """Controls of a sequence that forbid every token, or a user's control that failed.

    Examples:
        >>> import foretoken
        >>> spec = foretoken.load("novels")
        >>> every_token = range(spec.target.vocab_size)
        >>> try:
        ...     spec.generate("It was", suppress_tokens=every_token, gamma=2)
        ... except foretoken.ControlError as error:
        ...     print(type(error).__name__)
        ControlError
    """


@contextmanager
def name_option_in_errors(option: str) -> Iterator[None]:
    """Set the `option` of a ForetokenError raised within the `with`, unless it has one already."""
    try:
        yield
    except ForetokenError as error:
        error.with_option(option)
        raise


def is_whole_number(value: object) -> bool:
    """Return whether `value` is an integer and not a bool."""
    return isinstance(value, Integral) and not isinstance(value, bool)


def is_real_number(value: object) -> bool:
    """Return whether `value` is a real number and not a bool."""
    return isinstance(value, Real) and not isinstance(value, bool)


def to_float(value: object) -> float:
    """Return the float nearest to a real number `value`, such as a Fraction; an infinity if `value`
    is too large for a float, NaN if `value` is not a real number."""
    if not is_real_number(value):
        return math.nan
    try:
        return float(cast(Real, value))
    except OverflowError:
        return math.inf if cast(int, value) > 0 else -math.inf


def format_value(value: object) -> str:
    """Return a value as messages show it: at most `MAX_VALUE_CHARS` characters, in one line."""
    try:
        text = repr(value)
    except Exception:  # such as an integer of more than 4,300 digits
        return f"a {type(value).__name__} too large to show"
    text = " ".join(text.split())
    return text if len(text) <= MAX_VALUE_CHARS else f"{text[: MAX_VALUE_CHARS - 3]}..."


LOOKUP_PREFIX = "lookup+"  # prefix of a draft's name: look-up proposes first, then the draft


def get_base_name(model: str) -> str:
    """Return the name of a model, and of its adapter if any, without their parent folders."""
    front = LOOKUP_PREFIX if model.startswith(LOOKUP_PREFIX) else ""
    parts = model.removeprefix(front).split(" with ")
    return front + " with ".join(Path(part).name if exists(part) else part for part in parts)


def log_error_kind(error: Exception) -> str:
    """Return the class name of an error that a model's own code raised. Log the error with its
    traceback at DEBUG, because the error's message would not help a user."""
    log.debug("a model's own code raised an error", exc_info=error)
    return type(error).__name__


def to_one_line(error: Exception) -> str:
    """Return the beginning of a library's error message, in one line."""
    return " ".join(str(error).split())[:200] or type(error).__name__


EXPECTED_KINDS = {
    "string_type": "text",
    "int_type": "a whole number",
    "int_from_float": "a whole number",
    "int_parsing": "a whole number",
    "int_parsing_size": "a whole number",
    "float_type": "a number",
    "float_parsing": "a number",
    "bool_type": "true or false",
    "bool_parsing": "true or false",
    "list_type": "a list",
    "tuple_type": "a list",
    "dict_type": "an object",
    "model_type": "an object",
    "model_attributes_type": "an object",
    "dataclass_type": "an object",
    "finite_number": "a finite number",
    "literal_error": "one of {expected}",
    "greater_than": "above {gt}",
    "greater_than_equal": "{ge} or more",
    "less_than": "below {lt}",
    "less_than_equal": "{le} or less",
    "none_required": "null",
}
VALIDATION_MESSAGES = {
    "string_too_short": "it is too short; give at least {min_length} characters",
    "string_too_long": "it is too long; give at most {max_length} characters",
    "too_short": "it is too short; give at least {min_length} entries",
    "bytes_too_short": "it is empty",
    "bytes_type": "it is not a file; upload a file",
    "too_long": "it is too long; give at most {max_length} entries",
    "string_pattern_mismatch": "it has characters that are not allowed",
    "missing": "it is missing",
    "extra_forbidden": "it is unknown",
    "json_invalid": "it is not valid JSON: {error}",
}


def describe_mismatch(error: Mapping[str, Any]) -> str:
    """Return a message about an invalid value, from one of pydantic's errors."""
    kind, context = str(error["type"]), dict(error.get("ctx") or {})
    if kind in VALIDATION_MESSAGES:
        return VALIDATION_MESSAGES[kind].format(**context)
    if kind in EXPECTED_KINDS:
        return f"it must be {EXPECTED_KINDS[kind].format(**context)}"
    if kind == "value_error":  # raised by one of our own checks
        return str(error["msg"]).removeprefix("Value error, ")
    return "it is invalid"
