"""Which options of `foretoken chat` go together: told before models load."""

from __future__ import annotations

import pytest

from console import Run, mistake

THERE = ("--url", "http://127.0.0.1:9")


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (("--gamma", -1), "gamma is -1"),
        (("--seed", -1), "seed is -1"),
        (("--lenience", 2.0, *THERE), "lenience is 2.0"),
        (("--top-p", 2), "top_p is 2"),
        (("--dtype", "float31"), "dtype is 'float31'"),
        (("--api-key", "k"), "--api-key is for a server; add --url"),
        (("--target", "t", *THERE), "--target is for models in this process; leave it or"),
        (("--draft", "t", *THERE), "--draft is for models"),
        (("--dtype", "int8", *THERE), "--dtype is for models"),
        (("--trust-remote-code", *THERE), "--trust-remote-code is for models"),
        (THERE, "http://127.0.0.1:9 cannot be reached"),
    ],
)
def test_mistakes_are_told_before_models_load(console: Run, options, says) -> None:
    mistake(console("chat", "-q", "x", *options), says)
