"""An Event that several processes share. Knows files only."""

from __future__ import annotations

import os
from time import perf_counter, sleep


class Flag:
    """An Event that several processes share: set, for all of them, once its file exists.

    Args:
        path: The file.

    Examples:
        >>> import tempfile
        >>> folder = tempfile.TemporaryDirectory()
        >>> flag = Flag(folder.name + "/stop")
        >>> flag.is_set()
        False
        >>> flag.set()
        >>> flag.wait()
        True
        >>> folder.cleanup()
    """

    def __init__(self, path: str) -> None:
        self._path = path

    def set(self) -> None:
        """Set it, for all processes."""
        with open(self._path, "w"):
            pass

    def is_set(self) -> bool:
        """Tell whether it is set.

        Returns:
            True where it is.
        """
        return os.path.exists(self._path)

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until it is set.

        Args:
            timeout: Seconds at most; None is without a limit.

        Returns:
            True where it is set.
        """
        end = None if timeout is None else perf_counter() + timeout
        while not self.is_set() and (end is None or perf_counter() < end):
            sleep(0.002)
        return self.is_set()
