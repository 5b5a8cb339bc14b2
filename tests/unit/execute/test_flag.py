"""An Event that is a file."""

from __future__ import annotations

import threading

from foretoken.execute import Flag

LONG = 30.0  # seconds that no test waits for


def test_flag(tmp_path) -> None:
    flag = Flag(str(tmp_path / "flag"))
    assert not flag.is_set() and not flag.wait(0.001)
    flag.set()
    flag.set()
    assert flag.is_set() and flag.wait() and flag.wait(LONG)


def test_two_flags_of_one_file_are_one(tmp_path) -> None:
    ours, theirs = Flag(str(tmp_path / "flag")), Flag(str(tmp_path / "flag"))
    threading.Timer(0.05, theirs.set).start()
    assert ours.wait(LONG)
