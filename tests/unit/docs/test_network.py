"""A page that would load something from the network breaks the build; links may lead there."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from mkdocs.exceptions import PluginError

from scripts import hook

network = hook("network")
PAGE = SimpleNamespace(file=SimpleNamespace(src_uri="a.md"))


@pytest.mark.parametrize(
    "html",
    [
        '<script src="https://unpkg.com/x"></script>',
        "<img alt=a src=//example.com/a.png>",
        '<link href="https://fonts.example/css" rel="stylesheet">',
        "<style>@import 'http://example.com/a.css'</style>",
        '<p style="background: url(https://example.com/a.png)">',
    ],
)
def test_a_page_that_loads(html):
    with pytest.raises(PluginError, match="a.md would load from the network"):
        network.on_post_page(html, PAGE, None)


def test_a_page_that_links():
    html = '<a href="https://arxiv.org/abs/2211.17192">paper</a><script src="a.js"></script>'
    html += '<link rel="canonical" href="https://example.com/"><img src="data:image/png;base64,a">'
    assert network.on_post_page(html, PAGE, None) == html
