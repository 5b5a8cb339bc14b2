"""A line's own options over the command line's."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from foretoken.cli.prompts import Line, require, tasks
from foretoken.errors import InputError, RefusedError
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


def test_what_the_model_cannot_honour_says_so_too():
    spec = SimpleNamespace(
        tokenizer=None, target=SimpleNamespace(vocab_size=8, encoder_decoder=False)
    )
    line = Line([1], sampling={"suppress_tokens": [8]}, place="f, line 2")
    with pytest.raises(InputError, match=r"^f, line 2: suppress_tokens names the id 8; .* 0\.\.7$"):
        require(tasks([line], {}), spec)
    require(tasks([Line([1])], {"suppress_tokens": [8]}), spec)  # told with the requests
