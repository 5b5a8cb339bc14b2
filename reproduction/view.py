"""Figures 1 and 5 of one text: its draft tokens as HTML, and a block for each call of a model.

Times are those that the completion's own records hold.
"""

from __future__ import annotations

from html import escape
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from foretoken.cli.token_styles import (
    ACCEPTED_STYLE,
    CORRECTED_STYLE,
    REJECTED_STYLE,
    STYLE_NAMES,
    spell_steps,
    split_blanks,
)

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from transformers import PreTrainedTokenizerBase

    from foretoken.records import StepRecord
    from foretoken.request import Completion

TAGS = {  # without colours the lines, strokes and weights that browsers give them tell them apart
    ACCEPTED_STYLE: '<span class="accepted">{}</span>',
    REJECTED_STYLE: '<del class="rejected">{}</del>',
    CORRECTED_STYLE: '<strong class="corrected">{}</strong>',
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


def html(
    prompt: list[int], steps: list[StepRecord], tokenizer: PreTrainedTokenizerBase | None
) -> str:
    """Return an ordered list of HTML, a line per step, escaped; `STYLE` is for the page's head."""
    lines = [
        "".join(_tag(spelled, fate) for spelled, fate in tokens)
        for tokens in spell_steps(prompt, steps, tokenizer)
    ]
    return "\n".join(['<ol class="trace">', *(f"<li>{line}</li>" for line in lines), "</ol>"])


def html_legend() -> str:
    """Return the meaning of the colours of `html`."""
    labels = " · ".join(TAGS[fate].format(escape(name)) for name, fate in STYLE_NAMES.items())
    return f'<p class="fates">{labels}</p>'


def _tag(spelled: str, fate: str) -> str:
    """Return a token as HTML: a stroke through blanks would join words."""
    before, word, after = split_blanks(spelled)
    return f"{before}{TAGS[fate].format(escape(word))}{after}"


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


def blocks(figure: Figure, rows: dict[str, list[ModelCall]]) -> None:
    """Draw the calls of each row in a figure."""
    from matplotlib.patches import Patch  # late: a second; what is no picture does without

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
