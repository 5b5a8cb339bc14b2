"""Which options go together, and which source they name."""

from __future__ import annotations

import pytest

from foretoken.cli.chat import ChatOptions, ServerAddress, opened
from foretoken.cli.option import PairLoading
from foretoken.errors import ForetokenError

SERVER = ("url", "api_key", "model")
HERE = "http://127.0.0.1:9"


@pytest.mark.parametrize(
    ("asked", "where", "says"),
    [
        ({"gamma": -1}, {}, "gamma is -1"),
        ({"seed": -1}, {}, "seed is -1"),
        ({"rule": "x"}, {}, "rule is 'x'"),
        ({"lenience": 2.0}, {"url": HERE}, "lenience is 2.0"),
        ({"target": "no-such-folder"}, {}, "there is no folder 'no-such-folder'"),
        ({}, {"dtype": "float31"}, "dtype is 'float31'"),
        ({}, {"api_key": "k"}, "--api-key is for a server; add --url"),
        ({}, {"model": "m"}, "--model is for a server; add --url"),
        ({"target": "t"}, {"url": HERE}, "--target is for models in this process; leave it or"),
        ({"draft": "t"}, {"url": HERE}, "--draft is for models"),
        ({}, {"url": HERE, "dtype": "int8"}, "--dtype is for models"),
        ({}, {"url": HERE, "trust_remote_code": True}, "--trust-remote-code is for models"),
        ({}, {"url": HERE}, f"{HERE} cannot be reached"),
    ],
)
def test_mistakes_are_told_before_models_load(asked, where, says):
    with pytest.raises(ForetokenError, match="^" + says):
        server = ServerAddress(**{n: v for n, v in where.items() if n in SERVER})
        loading = PairLoading(**{n: v for n, v in where.items() if n not in SERVER})
        with opened(ChatOptions(**asked), server, loading, None, {}):
            raise AssertionError("nothing should be opened")


def test_options_are_checked_before_models_load():
    with pytest.raises(ForetokenError, match="top_p is 2"):
        with opened(ChatOptions(), ServerAddress(), PairLoading(), None, {"top_p": 2}):
            raise AssertionError("nothing should be opened")
