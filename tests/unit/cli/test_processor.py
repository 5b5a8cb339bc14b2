"""`foretoken doctor` of the processor."""

from __future__ import annotations

import json
from typing import Any

import pytest

from console import Run
from foretoken.measurement import machine
from foretoken.models import families


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, console: Run) -> Run:
    monkeypatch.setattr(machine, "READ_BYTES", 2**20)
    monkeypatch.setattr(families, "FAMILIES", {})
    return console


def test_what_the_processor_can_do_and_how_fast_it_reads(run: Run) -> None:
    document: dict[str, Any] = json.loads(run("doctor", "--json").out)["processor"]
    assert document["name"] and document["threads"] >= 1 and document["bytes_per_second"] > 0
    shown = run("doctor").out
    assert f"processor: {document['name']}, {document['threads']} threads" in shown
    assert " GB/s, reading 1 MiB" in shown
    assert all(name in shown for name in document["abilities"] or ())
