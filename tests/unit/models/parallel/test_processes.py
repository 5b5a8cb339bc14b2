"""Processes that do not come up, and what they may be reached by. Those that do: `test_model`."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import pytest

from foretoken.errors import LostError, RefusedError
from foretoken.models.parallel import processes, ranks
from foretoken.models.parallel.processes import INTERFACE, Processes, loopback
from foretoken.models.parallel.ranks import Ranks


def test_they_talk_over_the_loopback_interface(monkeypatch: pytest.MonkeyPatch) -> None:
    assert loopback().startswith("lo")
    seen: list[str | None] = []
    monkeypatch.setattr(Processes, "_started", lambda *args: None)
    monkeypatch.setattr(processes, "join", lambda *args: seen.append(os.environ.get(INTERFACE)))
    monkeypatch.setenv(INTERFACE, "eth7")
    made = Processes(1, 1)
    made.join()
    made.close()
    assert seen == [loopback()] and os.environ[INTERFACE] == "eth7"


def test_without_such_an_interface_there_are_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes.socket, "if_nameindex", lambda: [(1, "eth0")])
    with pytest.raises(RefusedError, match="needs a loopback interface"):
        Processes(2, 1)


@pytest.mark.parametrize(
    ("script", "says"),
    [
        ("echo begins; echo no memory >&2; echo >&2; exit 3", "no memory"),
        ("exit 3", "status 3"),
        ("kill -9 $$", "SIGKILL"),
    ],
)
def test_one_that_does_not_come_up_is_told(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, script: str, says: str
) -> None:
    """In one line, and nothing of it is left."""
    python = tmp_path / "python"
    python.write_text(f"#!/bin/sh\n{script}\n")
    python.chmod(0o700)
    monkeypatch.setattr(sys, "executable", str(python))
    monkeypatch.setattr(ranks, "GRACE", 0.1)
    monkeypatch.setattr(processes, "join", lambda *args: time.sleep(1))  # it never comes
    made = Processes(2, 1)
    with pytest.raises(LostError, match=rf"^rank 1 of 2 has ended \({says}\)$"):
        Ranks(made, 1)
    assert not Path(made._folder.name).exists()
