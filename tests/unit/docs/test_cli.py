"""docs/cli.md is what the commands' own help says; `make docs` writes it."""

from __future__ import annotations

from typer.cli import app
from typer.testing import CliRunner

from scripts import ROOT


def test_the_page_is_up_to_date(monkeypatch, tmp_path):
    monkeypatch.delenv("COLUMNS", raising=False)
    page = tmp_path / "cli.md"
    title = ["--name", "foretoken", "--title", "Command line", "--output", str(page)]
    result = CliRunner().invoke(app, ["foretoken.cli", "utils", "docs", *title])
    assert result.exit_code == 0, result.output
    assert page.read_text() == (ROOT / "docs" / "cli.md").read_text(), "run `make docs`"
