"""Figure 5 of the paper: when target and draft ran for one text, a block a call; as a picture (SVG)
and as a Chrome trace.

Times are those that the completion's own records hold. Only the picture needs matplotlib (the extra
`plot`).
"""

from __future__ import annotations

from io import StringIO
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from foretoken.storage import files

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from foretoken.records import Stats
    from foretoken.request import Completion

Part = Literal[
    "target encoder", "target prefill", "draft encoder", "draft prefill", "draft", "target"
]
COLOURS: dict[Part, str] = {  # the paper's; a prefill is its model's, paler
    "target encoder": "#d9a514",
    "target prefill": "#a98fc7",
    "draft encoder": "#d9661f",
    "draft prefill": "#93bbe3",
    "draft": "#3d7fc4",
    "target": "#6b4596",
}
HEIGHTS = {"target": 0.7, "draft": 0.45}  # so that colours are not all that tells the models apart
THREADS = {"target": 1, "draft": 2}  # a Chrome trace's


class ModelCall(NamedTuple):
    """A block. A prefill is the reading of the prompt before the first step, by a decoder."""

    part: Part
    at: float  # seconds from the beginning
    seconds: float
    step: int  # from 1; 0 is before the first


def timeline(completion: Completion) -> list[ModelCall]:
    """The calls in order. A step's calls of the drafter share its time equally; the gaps are the
    verdict and the rest of a step."""
    calls, now = _prefill(completion.stats), completion.stats.prefill_seconds
    for number, step in enumerate(completion.steps, 1):
        each = step.draft_seconds / max(1, step.draft_calls)
        calls += [ModelCall("draft", now + i * each, each, number) for i in range(step.draft_calls)]
        calls.append(ModelCall("target", now + step.draft_seconds, step.score_seconds, number))
        now += step.draft_seconds + step.score_seconds + step.verify_seconds
    return calls


def _prefill(stats: Stats) -> list[ModelCall]:
    """Each model's encoder, where one ran, then the rest of its reading. A drafter that made no
    call is left out."""
    drafts, target, draft = (
        stats.draft_prefill_seconds,
        stats.encoder_seconds,
        stats.draft_encoder_seconds,
    )
    seconds = stats.prefill_seconds - drafts
    calls = [ModelCall("target encoder", 0.0, target, 0)] if target else []
    calls.append(ModelCall("target prefill", target, seconds - target, 0))
    if stats.draft_calls:
        calls += [ModelCall("draft encoder", seconds, draft, 0)] if draft else []
        calls.append(ModelCall("draft prefill", seconds + draft, drafts - draft, 0))
    return calls


def chrome(completion: Completion) -> dict[str, Any]:
    """The same as a document of Chrome's Trace Event Format, for Perfetto or chrome://tracing: a
    thread for each model, microseconds."""
    headers: list[dict[str, Any]] = [
        {"ph": "M", "name": "thread_name", "pid": 1, "tid": tid, "args": {"name": model}}
        for model, tid in THREADS.items()
    ]
    events = [
        {
            "ph": "X",
            "name": call.part,
            "pid": 1,
            "tid": THREADS[call.part.split()[0]],
            "ts": call.at * 1e6,
            "dur": call.seconds * 1e6,
            "args": _facts(completion, call),
        }
        for call in timeline(completion)
    ]
    return {"displayTimeUnit": "ms", "traceEvents": headers + events}


def _facts(completion: Completion, call: ModelCall) -> dict[str, int]:
    """What is known of a call's step."""
    if not call.step:
        return {}
    step = completion.steps[call.step - 1]
    counts = {"drafted": step.drafted, "accepted": step.accepted, "tokens": len(step.kept)}
    return {"step": call.step} | counts


def svg(rows: dict[str, Completion]) -> str:
    """The picture: a row for each completion under its name, on one axis of time."""
    from matplotlib import rc_context  # late: a second; what is no picture does without
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 0.9 + 0.6 * len(rows)), layout="constrained")
    blocks(figure, {name: timeline(completion) for name, completion in rows.items()})
    file = StringIO()
    with rc_context({"svg.hashsalt": "foretoken"}):  # else two pictures of the same differ
        figure.savefig(file, format="svg", metadata={"Date": None})
    return file.getvalue()


def blocks(figure: Figure, rows: dict[str, list[ModelCall]]) -> None:
    """Draw the calls of each row in a figure."""
    from matplotlib.patches import Patch  # late: as above

    axes = figure.add_subplot()
    for place, calls in enumerate(rows.values()):
        for part, colour in COLOURS.items():
            spans = [(call.at * 1e3, call.seconds * 1e3) for call in calls if call.part == part]
            high = HEIGHTS[part.split()[0]]
            edge: dict[str, Any] = {"facecolors": colour, "edgecolor": "white", "linewidth": 0.4}
            axes.broken_barh(spans, (place + 0.35 - high, high), **edge)
    axes.set_yticks(range(len(rows)), list(rows))
    axes.invert_yaxis()
    axes.set_xlabel("ms")
    axes.spines[["top", "right"]].set_visible(False)
    parts = {call.part for calls in rows.values() for call in calls}
    names = [Patch(color=colour, label=part) for part, colour in COLOURS.items() if part in parts]
    figure.legend(handles=names, loc="outside upper center", ncols=len(names), frameon=False)


def draw(rows: dict[str, Completion], path: Path) -> None:
    """Write the picture; OSError, naming the file, where that fails."""
    files.write(path, svg(rows).encode())
