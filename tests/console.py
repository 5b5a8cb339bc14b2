"""The command line, called in this process as the console script does; the fixture is `console`;
in the laboratory's tests it is `python -m reproduction`."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import NamedTuple

import pytest

from foretoken.cli import main as foretoken

TEMPLATE = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}assistant:"


class Result(NamedTuple):
    code: int
    out: str
    err: str


Run = Callable[..., Result]


def script(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    main: Callable[[], None] = foretoken,
) -> Run:
    """A console script with arguments."""

    def call(*args: object) -> Result:
        monkeypatch.setattr(sys, "argv", ["foretoken", *map(str, args)])
        capsys.readouterr()
        try:
            main()
            code = 0
        except SystemExit as end:
            code = int(end.code or 0)
        return Result(code, *capsys.readouterr())

    return call


def mistake(result: Result, says: str) -> None:
    """Exit code 2, one line on standard error, nothing on standard output."""
    assert result.code == 2 and result.out == ""
    assert result.err.startswith("error: ") and says in result.err
    assert result.err.count("\n") == 1 and result.err.endswith("\n")
