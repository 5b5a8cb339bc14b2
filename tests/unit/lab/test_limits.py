"""What cannot be measured is refused before models are loaded."""

from __future__ import annotations

import pytest

from foretoken.errors import InputError
from foretoken.lab.limits import require


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ((0, 8, 2, None), "gamma is 0; give 1 or more"),
        ((4, 1, 2, None), "max_new_tokens is 1; give 2 or more"),
        ((4, 8, 1, None), "1 prompt; give 2 or more"),
        ((4, 8, 2, "none"), "draft is none; give one that guesses"),
    ],
)
def test_what_cannot_be_measured(options, message):
    with pytest.raises(InputError, match=message):
        require(*options)


def test_what_can_be():
    require(1, 2, 2, None)
