"""An interrupted row is no result."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from foretoken.lab.uninterrupted import uninterrupted


def test_interrupted_rows_raise():
    whole: Any = [SimpleNamespace(finish_reason="length"), SimpleNamespace(finish_reason="eos")]
    assert uninterrupted(whole) is whole and uninterrupted([]) == []
    with pytest.raises(KeyboardInterrupt):
        uninterrupted([*whole, SimpleNamespace(finish_reason="interrupted")])
