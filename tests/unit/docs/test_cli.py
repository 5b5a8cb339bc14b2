"""The pages of the command line, docs/cli/, are built from the commands' own help."""

from __future__ import annotations

from typer.cli import app
from typer.testing import CliRunner


def test_the_page_is_built(monkeypatch, tmp_path):
    monkeypatch.delenv("COLUMNS", raising=False)
    page = tmp_path / "cli.md"
    title = ["--name", "foretoken", "--title", "Command line", "--output", str(page)]
    result = CliRunner().invoke(app, ["foretoken.cli", "utils", "docs", *title])
    assert result.exit_code == 0, result.output
    text = page.read_text()
    for name in ("generate", "chat", "bench", "serve", "train eagle"):
        assert f"## `foretoken {name}`" in text
