"""How the sheet of `foretoken measure` shortens names and breaks a command; the whole is in
test_measure.py."""

from __future__ import annotations

import shlex

import pytest

from foretoken.cli.sheet import _broken, _short


@pytest.mark.parametrize("width", [12, 30, 200])
def test_the_shell_reads_a_broken_command_as_one(width: int):
    arguments = ["foretoken", "generate", "--target", "a folder", "--gamma", "5"]
    lines = _broken(arguments, width)
    assert shlex.split("\n".join(lines).replace("\\\n", "")) == arguments
    assert (len(lines) == 1) == (width == 200)
    assert width < 30 or all(len(line) <= width for line in lines)


def test_names_are_shortened_as_far_as_they_differ():
    assert _short(["/a/b/draft", "lookup"]) == ["draft", "lookup"]
    assert _short(["/a/b/draft", "/a/c/draft"]) == ["b/draft", "c/draft"]
    assert _short(["draft", "draft"]) == ["draft", "draft"]
