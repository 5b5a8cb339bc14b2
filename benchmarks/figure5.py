"""Figure 5 of the paper: when the target and the draft of an encoder-decoder ran, a block a call,
with gamma 7, gamma 3 and plainly.

Times are those that the completion's own StepRecords hold. The target is T5-like, of random
weights; the draft has a hundredth of its size and nearly its law.

    python benchmarks/figure5.py    # writes docs/timeline.svg; half a minute
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal, NamedTuple

import torch
from matplotlib.figure import Figure
from matplotlib.patches import Patch

import foretoken
from foretoken.request import Completion
from networks import FAMILIES, network

OUT = Path(__file__).parents[1] / "docs" / "timeline.svg"
VOCAB, SOURCE, TOKENS = 4000, 24, 40
COLOURS = {"start": "#f6ae2d", "draft": "#4c9f70", "target": "#33658a"}


class Call(NamedTuple):
    """A block. `start`: both models read source and prompt, encoders included."""

    model: Literal["start", "draft", "target"]
    at: float  # seconds from the beginning
    seconds: float


def main() -> None:
    family = FAMILIES["t5"]
    sizes = {"target": (1024, 6, 0.003), "draft": (128, 2, 0.03)}  # width, layers, eps
    models = {
        name: network(family, torch.float32, 0, family.config(width, layers, VOCAB, 512), i, eps)
        for i, (name, (width, layers, eps)) in enumerate(sizes.items())
    }
    spec = foretoken.load(**models, runtime="transformers")
    source = torch.randint(2, VOCAB, (SOURCE,), generator=torch.Generator().manual_seed(0)).tolist()
    rows = {}
    for gamma in (7, 3, 0):
        for _ in range(2):  # the first warms up
            (done,) = spec.generate([source], gamma=gamma, max_new_tokens=TOKENS)
        rows[f"gamma {gamma}" if gamma else "plain"] = done
        calls = len(timeline(done))
        print(f"gamma {gamma}: {done.stats.target_calls} target calls, {calls} blocks")
    draw(rows, OUT)
    print(OUT)


def timeline(done: Completion) -> list[Call]:
    """The calls in order. A step's calls of the drafter share its time equally; the gaps are the
    verdict and the rest of a step."""
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
        for model, colour in COLOURS.items():
            spans = [(c.at * 1e3, c.seconds * 1e3) for c in timeline(done) if c.model == model]
            edge = {"facecolors": colour, "edgecolor": "white", "linewidth": 0.4}
            axes.broken_barh(spans, (place - 0.35, 0.7), **edge)
    axes.set_yticks(range(len(rows)), list(rows))
    axes.invert_yaxis()
    axes.set_xlabel("ms")
    axes.spines[["top", "right"]].set_visible(False)
    names = [Patch(color=colour, label=model) for model, colour in COLOURS.items()]
    figure.legend(handles=names, loc="outside upper center", ncols=3, frameon=False)
    figure.savefig(path, format="svg", metadata={"Date": None})


if __name__ == "__main__":
    main()
