"""The package itself: its names and its version."""

from __future__ import annotations

import importlib
from importlib.metadata import version

import pytest

import foretoken


def test_names_that_are_imported_late_are_listed():
    """For tab completion."""
    fresh = importlib.import_module("foretoken")
    assert {*foretoken.__all__, "__version__", "__doc__"} <= set(dir(fresh))
    assert dir(fresh) == sorted(set(dir(fresh)))


def test_version():
    assert foretoken.__version__ == version("foretoken")
    with pytest.raises(AttributeError, match="module 'foretoken' has no attribute '__author__'"):
        _ = foretoken.__author__
