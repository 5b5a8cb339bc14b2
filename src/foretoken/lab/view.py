"""One text's trace: the fate of each draft token, and when target and draft ran.

Figure 1 of the paper is one line per target run, each token coloured by its fate: in the terminal,
between marks where there are no colours, and as HTML. Figure 5 is a block for each call, as a
picture (SVG, which needs matplotlib: the extra `plot`) and as a Chrome trace. Times are those that
the completion's own records hold.
"""

from __future__ import annotations

from collections.abc import Iterator
from html import escape
from io import StringIO
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from rich.text import Text

from foretoken.text import decoding

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from transformers import PreTrainedTokenizerBase

    from foretoken.records import StepRecord
    from foretoken.request import Completion


ACCEPTED, REJECTED, CORRECTED = "green", "red strike", "bold blue"
MARKS = {ACCEPTED: "", REJECTED: "~~", CORRECTED: "[]"}  # before and behind a token
NAMES = {
    "accepted draft token": ACCEPTED,
    "rejected draft token": REJECTED,
    "target's own": CORRECTED,
}
TAGS = {  # without colours the lines, strokes and weights that browsers give them tell them apart
    ACCEPTED: '<span class="accepted">{}</span>',
    REJECTED: '<del class="rejected">{}</del>',
    CORRECTED: '<strong class="corrected">{}</strong>',
}
STYLE = """\
.trace, .fates { color-scheme: light dark; --accepted: light-dark(#007a1e, #79cf88);
  --rejected: light-dark(#c21a12, #ff8d84); --corrected: light-dark(#1f3fe0, #91adff) }
.trace { font-family: ui-monospace, Menlo, Consolas, monospace; overflow-wrap: anywhere }
.trace li { white-space: pre-wrap }
.accepted { color: var(--accepted) }
.rejected { color: var(--rejected); text-decoration: line-through }
.corrected { color: var(--corrected); font-weight: 700 }
"""
LOOK_BACK = 8  # tokens that decide how the next one is spelled: spaces, parts of a character


def trace(
    prompt: list[int],
    steps: list[StepRecord],
    tokenizer: PreTrainedTokenizerBase | None,
    *,
    marks: bool = False,
) -> list[Text]:
    """A line per step: accepted draft tokens, the first rejected one, then the target's own token.
    `marks`: for terminals without colours."""
    lines: list[Text] = []
    for number, pieces in enumerate(_pieces(prompt, steps, tokenizer), 1):
        line = Text(f"{number:4d} ", style="dim")
        for spelled, fate in pieces:
            line.append(marked(spelled, fate) if marks else spelled, style=fate)
        lines.append(line)
    return lines


def html(
    prompt: list[int], steps: list[StepRecord], tokenizer: PreTrainedTokenizerBase | None
) -> str:
    """The same lines as an ordered list of HTML, escaped; `STYLE` is for the page's head."""
    lines = [
        "".join(_tagged(spelled, fate) for spelled, fate in pieces)
        for pieces in _pieces(prompt, steps, tokenizer)
    ]
    return "\n".join(['<ol class="trace">', *(f"<li>{line}</li>" for line in lines), "</ol>"])


def paragraph(
    prompt: list[int], steps: list[StepRecord], tokenizer: PreTrainedTokenizerBase | None
) -> Text:
    """The whole continuation: accepted draft tokens and the target's own tokens."""
    text, style = Text(), ACCEPTED
    stream = decoding.Stream(tokenizer, prompt) if tokenizer else None
    for step in steps:
        for i, token in enumerate(step.kept):
            style = ACCEPTED if i < step.accepted else CORRECTED
            text.append(stream.add([token]) if stream else f"{token} ", style=style)
    return text.append(stream.add([], last=True) if stream else "", style=style)


def legend(*, marks: bool = False, rejected: bool = True) -> Text:
    """The meaning of the colours, or of the marks; `rejected`: whether such draft tokens are
    shown."""
    names = [(name, fate) for name, fate in NAMES.items() if rejected or fate != REJECTED]
    labels = [(marked(name, fate) if marks else name, fate) for name, fate in names]
    return Text("  ").join(Text(name, style) for name, style in labels)


def html_legend() -> str:
    """The same for `html`."""
    labels = " · ".join(TAGS[fate].format(escape(name)) for name, fate in NAMES.items())
    return f'<p class="fates">{labels}</p>'


def marked(spelled: str, fate: str) -> str:
    """A token between the marks of its fate: inside its blanks, so that words stay apart."""
    mark = MARKS[fate]
    before, word, behind = _apart(spelled)
    return f"{before}{mark[:1]}{word}{mark[1:]}{behind}"


def spell(tokenizer: PreTrainedTokenizerBase | None, before: list[int], token: int) -> str:
    """Return the text that a token adds to those before it, or completes; its id where there is no
    tokenizer."""
    if tokenizer is None:
        return f"{token} "
    stream = decoding.Stream(tokenizer, before[-LOOK_BACK:])
    return stream.add([token]) or stream.held.rstrip(decoding.REPLACEMENT)


def _tagged(spelled: str, fate: str) -> str:
    """The same as HTML: a stroke through blanks would join words."""
    before, word, behind = _apart(spelled)
    return f"{before}{TAGS[fate].format(escape(word))}{behind}"


def _apart(spelled: str) -> tuple[str, str, str]:
    """A token without the blanks before and behind it, and these; one of blanks is all word."""
    word = spelled.strip()
    return spelled.partition(word) if word else ("", spelled, "")


def _on_one_line(spelled: str) -> str:
    """A dot stands for a token without text, or with a part of a character."""
    return spelled.replace("\n", "⏎") or "·"


def _pieces(
    prompt: list[int], steps: list[StepRecord], tokenizer: PreTrainedTokenizerBase | None
) -> Iterator[list[tuple[str, str]]]:
    """Yield for every step the tokens of its line, as they are spelled, and their fates."""
    so_far = list(prompt)
    for step in steps:
        tokens = step.kept[step.accepted :]
        fates = [(token, ACCEPTED) for token in step.kept[: step.accepted]]
        if tokens and step.accepted < step.drafted:
            fates.append((step.guesses[step.accepted], REJECTED))
        fates += [(token, CORRECTED) for token in tokens]
        line: list[tuple[str, str]] = []
        for token, fate in fates:
            line.append((_on_one_line(spell(tokenizer, so_far, token)), fate))
            if fate != REJECTED:
                so_far.append(token)
        yield line


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
    stats = completion.stats
    now = stats.prefill_seconds
    calls = _prefill("target encoder", "target prefill", 0.0, now, stats.encoder_seconds)
    for number, step in enumerate(completion.steps, 1):
        each = step.draft_seconds / max(1, step.draft_calls)
        calls += [ModelCall("draft", now + i * each, each, number) for i in range(step.draft_calls)]
        calls.append(ModelCall("target", now + step.draft_seconds, step.score_seconds, number))
        now += step.draft_seconds + step.score_seconds + step.verify_seconds
        if number == 1 and stats.draft_calls:  # a drafter that made no call is left out
            drafts = stats.draft_prefill_seconds
            encoder = stats.draft_encoder_seconds
            calls += _prefill("draft encoder", "draft prefill", now, drafts, encoder)
            now += drafts
    return calls


def _prefill(
    encodes: Part, reads: Part, at: float, seconds: float, encoder: float
) -> list[ModelCall]:
    """A model's encoder, where one ran, then the rest of its reading."""
    calls = [ModelCall(encodes, at, encoder, 0)] if encoder else []
    return [*calls, ModelCall(reads, at + encoder, seconds - encoder, 0)]


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
    """Return the counts of a call's step."""
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
