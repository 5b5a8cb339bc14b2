"""Blocks of formulas become MathML within the page."""

from __future__ import annotations

from markdown import Markdown
from mkdocs.config.defaults import MkDocsConfig

from scripts import hook


def test_a_block_becomes_mathml():
    config = MkDocsConfig()
    config.mdx_configs = {}
    hook("formulas").on_config(config)
    extension = "pymdownx.superfences"
    page = Markdown(extensions=[extension], extension_configs=config.mdx_configs)
    html = page.convert("```math\n\\frac{1}{1 - \\alpha}\n```\n\n```python\nx\n```\n")
    assert '<div class="formula"><math' in html and 'display="block"' in html
    assert "<mfrac>" in html and "&#x003B1;" in html and "\\frac" not in html
    assert html.count("<math") == 1
