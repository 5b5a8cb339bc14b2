"""A report as one HTML page that loads nothing else: light and dark, wide and narrow."""

from __future__ import annotations

from pathlib import Path

from jinja2 import Environment, StrictUndefined
from markupsafe import Markup

from foretoken.lab import view
from foretoken_lab.experiments.experiment import Plot, Trace
from foretoken_lab.report import plots
from foretoken_lab.report.chapter import Report

TEMPLATE = Path(__file__).with_name("page.html")


def html(report: Report) -> str:
    """The page."""
    environment = Environment(
        autoescape=True, trim_blocks=True, lstrip_blocks=True, undefined=StrictUndefined
    )
    return environment.from_string(TEMPLATE.read_text("utf-8")).render(
        report=report,
        picture=_picture,
        coloured=_coloured,
        legend=Markup(view.html_legend()),
        style=Markup(view.STYLE),
        minutes=f"{report.seconds / 60:.0f}" if report.seconds >= 90 else "1",
        failures=sum(len(chapter.failed) for chapter in report.chapters),
        missing=sum(chapter.missing for chapter in report.chapters),
    )


def _picture(plot: Plot) -> Markup:
    return Markup(plots.svg(plot))  # ours, no text of a model in it that is not escaped


def _coloured(trace: Trace) -> Markup:
    return Markup(trace.html)  # escaped by view.html
