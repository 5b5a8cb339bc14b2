"""Figure 5 of the paper: when the target and the drafter ran, one block a call.

Read from a completion's StepRecords alone, so its times are those of the very generation. Needs
matplotlib (the extra `plot`) to draw.
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal, NamedTuple

from matplotlib.figure import Figure
from matplotlib.patches import Patch

from foretoken.request import Completion

COLOURS = {"start": "#f6ae2d", "draft": "#4c9f70", "target": "#33658a"}


class Call(NamedTuple):
    """A block. `start` is both models' reading of source and prompt, encoders included."""

    what: Literal["start", "draft", "target"]
    at: float  # seconds from the beginning
    seconds: float


def timeline(done: Completion) -> list[Call]:
    """The calls in order. A step's calls of the drafter share its time equally; the gaps are the
    verdict and what a step costs besides."""
    calls = [Call("start", 0.0, done.stats.prefill_seconds)]
    now = done.stats.prefill_seconds
    for step in done.steps:
        each = step.draft_seconds / max(1, step.draft_calls)
        calls += [Call("draft", now + i * each, each) for i in range(step.draft_calls)]
        calls.append(Call("target", now + step.draft_seconds, step.score_seconds))
        now += step.draft_seconds + step.score_seconds + step.verify_seconds
    return calls


def draw(rows: dict[str, Completion], path: Path) -> None:
    """Write the picture (SVG): a row for each completion under its name, on one axis of time."""
    figure = Figure(figsize=(9, 0.9 + 0.6 * len(rows)), layout="constrained")
    axes = figure.add_subplot()
    for place, done in enumerate(rows.values()):
        for what, colour in COLOURS.items():
            spans = [(c.at * 1e3, c.seconds * 1e3) for c in timeline(done) if c.what == what]
            edge = {"facecolors": colour, "edgecolor": "white", "linewidth": 0.4}
            axes.broken_barh(spans, (place - 0.35, 0.7), **edge)
    axes.set_yticks(range(len(rows)), list(rows))
    axes.invert_yaxis()
    axes.set_xlabel("ms")
    axes.spines[["top", "right"]].set_visible(False)
    names = [Patch(color=colour, label=what) for what, colour in COLOURS.items()]
    figure.legend(handles=names, loc="outside upper center", ncols=3, frameon=False)
    figure.savefig(path, format="svg", metadata={"Date": None})
