"""Numbers and values in messages, whatever a caller gives."""

from __future__ import annotations

import math
from fractions import Fraction
from typing import Annotated, Any

import numpy as np
import pytest
from pydantic import BaseModel, Field, ValidationError

from foretoken.errors import (
    ControlError,
    ForeignError,
    ForetokenError,
    InputError,
    NumericsError,
    RefusedError,
    as_float,
    mismatch,
    one_line,
    real,
    shown,
    whole,
)


def test_the_tree():
    assert issubclass(InputError, ForetokenError) and issubclass(InputError, ValueError)
    assert issubclass(NumericsError, RefusedError) and issubclass(RefusedError, ForetokenError)
    assert issubclass(ControlError, RefusedError) and issubclass(ForeignError, RefusedError)


@pytest.mark.parametrize(
    "value", [3, np.int64(3), 10**5000], ids=lambda value: type(value).__name__
)
def test_whole_numbers(value):
    assert whole(value) and real(value)


@pytest.mark.parametrize("value", [True, np.bool_(True), "3", None, 1j])
def test_what_is_not_a_number(value):
    assert not whole(value) and not real(value) and math.isnan(as_float(value))


def test_floats():
    assert not whole(3.0) and real(3.0) and real(Fraction(1, 2))
    assert as_float(Fraction(1, 2)) == 0.5 and as_float(np.float32(0.25)) == 0.25
    assert as_float(10**5000) == math.inf and as_float(-(10**5000)) == -math.inf


def test_values_are_shown_in_one_short_line():
    assert shown(np.eye(2)) == "array([[1., 0.], [0., 1.]])"
    assert len(shown("x" * 500)) == 60 and shown("x" * 500).endswith("...")
    assert shown(10**5000) == "a int too large to show"


def test_a_librarys_message_is_one_short_line():
    assert one_line(ValueError("a\n  b")) == "a b" and len(one_line(ValueError("x" * 500))) == 200
    assert one_line(KeyError()) == "KeyError"


class Shape(BaseModel):
    count: Annotated[int, Field(ge=1)] = 1


@pytest.mark.parametrize(
    ("value", "said"),
    [
        ("x", "input should be a valid integer"),
        (0, "input should be greater than or equal to 1"),
    ],
)
def test_an_invalid_value_is_described_in_a_line(value: Any, said: str) -> None:
    with pytest.raises(ValidationError) as caught:
        Shape.model_validate({"count": value})
    assert mismatch(dict(caught.value.errors()[0])) == said
