"""A line's own options over the command line's."""

from __future__ import annotations

import pytest

from foretoken.cli.prompts import Line, tasks
from foretoken.errors import RefusedError
from foretoken.sampling.params import SamplingParams


def test_a_line_wins():
    lines = [Line("a"), Line("b", sampling={"top_k": 3, "stop_strings": None})]
    first, second = tasks(lines, {"top_k": 5, "temperature": 1.0, "stop_strings": ["x"]})
    assert first.params == SamplingParams(1.0, 5, stop_strings=["x"])
    assert second.params == SamplingParams(1.0, 3) and second.number == 1
    assert second.given == {"top_k": 3, "temperature": 1.0, "stop_strings": None}


def test_errors_of_a_line_say_where_it_stands():
    line = Line("b", sampling={"num_return_sequences": 2}, place="f, line 7")
    with pytest.raises(RefusedError, match="^f, line 7: num_return_sequences=2 at temperature 0"):
        tasks([Line("a"), line], {})
    with pytest.raises(RefusedError, match="^num_return_sequences=2"):
        tasks([Line("a", place="f, line 1")], {"num_return_sequences": 2})
