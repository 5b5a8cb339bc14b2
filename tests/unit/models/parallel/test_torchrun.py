"""What torchrun tells a process. A run of it: `tests/e2e/test_tensor_parallel.py`."""

from __future__ import annotations

import pytest

from foretoken.errors import InputError
from foretoken.models.parallel.torchrun import Launched, launched, rank


def test_it_is_known_by_its_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
    assert not launched()
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert launched() and rank() == 1
    assert Launched(2).ranks == 2 and Launched(2).ended() == []
    with pytest.raises(InputError, match="is 4, but torchrun has started 2 processes"):
        Launched(4)
