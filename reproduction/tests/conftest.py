from __future__ import annotations

import pytest

from console import Run, script
from reproduction.cli import main


@pytest.fixture
def console(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """Call `python -m reproduction` in this process."""
    return script(monkeypatch, capsys, main)


@pytest.fixture
def product(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """Call `foretoken` in this process."""
    return script(monkeypatch, capsys)
