"""The hooks of the site: links out of docs/, nothing from the network, and formulas as MathML."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
from markdown import Markdown
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

from scripts import hook

links = hook("links")
PAGES = {
    "a.md": "[x](../results/x.json#y), [b](b/c.md), ![p](p.svg), [w](https://example.com/../a)",
    "b/c.md": "[x](../../results/x.json), [a](../a.md)",
}


@pytest.fixture
def site(tmp_path: Path) -> tuple[MkDocsConfig, Files]:
    """A repository with two pages and a result."""
    for name, text in {
        **{f"docs/{n}": t for n, t in PAGES.items()},
        "results/x.json": "{}",
    }.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    config = MkDocsConfig()
    config.load_dict(
        {"site_name": "s", "docs_dir": str(tmp_path / "docs"), "site_dir": str(tmp_path / "site")}
    )
    config.validate()
    config.plugins._current_plugin = "links"  # as in a build
    return config, Files([File(n, config.docs_dir, config.site_dir, False) for n in PAGES])


def test_what_is_linked_goes_along(site):
    config, files = site
    links.on_files(files, config)
    assert {*files.src_uris} == {*PAGES, "repository/results/x.json"}
    assert files.src_uris["repository/results/x.json"].content_string == "{}"


def test_links_lead_there(site):
    config, files = site
    pages = {name: Page(None, files.src_uris[name], config) for name in PAGES}
    pages_out = {n: links.on_page_markdown(PAGES[n], p, config, files) for n, p in pages.items()}
    assert pages_out["a.md"] == PAGES["a.md"].replace("../results", "repository/results")
    assert pages_out["b/c.md"] == PAGES["b/c.md"].replace("../../results", "../repository/results")


def test_a_link_that_leads_nowhere_breaks_the_build(site):
    config, files = site
    Path(config.docs_dir, "a.md").write_text("[x](../results/none.json)")
    with pytest.raises(PluginError, match="a.md links to ../results/none.json, which is no file"):
        links.on_files(files, config)


def test_a_page_from_outside_brings_what_it_links_to(site):
    config, files = site
    root = Path(config.docs_dir).parent
    Path(config.docs_dir, "a.md").write_text("[card](../models/card.md)")
    (root / "models").mkdir()
    (root / "models/card.md").write_text("[log](../results/log.json), [a](../docs/a.md)")
    (root / "results/log.json").write_text("{}")
    links.on_files(files, config)
    assert "repository/results/log.json" in files.src_uris
    card = Page(None, files.src_uris["repository/models/card.md"], config)
    text = links.on_page_markdown((root / "models/card.md").read_text(), card, config, files)
    assert text == "[log](../results/log.json), [a](../../a.md)"


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
