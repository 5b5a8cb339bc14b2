"""An Event that several processes share. Knows files only."""

from __future__ import annotations

import os
from time import perf_counter, sleep


class Flag:
    """Set, for all processes, once its file exists."""

    def __init__(self, path: str) -> None:
        self._path = path

    def set(self) -> None:
        with open(self._path, "w"):
            pass

    def is_set(self) -> bool:
        return os.path.exists(self._path)

    def wait(self, timeout: float | None = None) -> bool:
        end = None if timeout is None else perf_counter() + timeout
        while not self.is_set() and (end is None or perf_counter() < end):
            sleep(0.002)
        return self.is_set()
