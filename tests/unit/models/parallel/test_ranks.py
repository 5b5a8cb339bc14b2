"""Ranks that are not started, or not again. Calls, and ranks that end: `test_model`."""

from __future__ import annotations

import pytest
import torch.distributed as dist

from foretoken.errors import RefusedError
from foretoken.models.parallel import ranks as module
from foretoken.models.parallel.ranks import start


def test_a_process_that_is_distributed_already_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "STARTED", [])
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    with pytest.raises(RefusedError, match="uses torch.distributed already; .* another process"):
        start(2)


def test_a_process_has_one_number_of_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    class Running:
        ranks, lost, gone = 2, None, ()
        part = type("Part", (), {"models": {0: "a model"}})

    running = Running()
    monkeypatch.setattr(module, "STARTED", [running])
    assert start(2) is running
    with pytest.raises(RefusedError, match="is 4, but .* on 2 ranks; give 2"):
        start(4)
