"""Figure 1 of the paper: one line per target run, each token coloured by its fate. In the terminal,
or between marks where there are no colours; and as HTML."""

from __future__ import annotations

from collections.abc import Iterator
from html import escape
from typing import TYPE_CHECKING

from rich.text import Text

from foretoken.text import decoding

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from foretoken.records import StepRecord

ACCEPTED, REJECTED, CORRECTED = "green", "red strike", "bold blue"
MARKS = {ACCEPTED: "", REJECTED: "~~", CORRECTED: "[]"}  # before and behind a token
NAMES = {"accepted guess": ACCEPTED, "rejected guess": REJECTED, "target's own": CORRECTED}
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
    """A line per step: accepted guesses, the first rejected one, then the target's own token.
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
    """The whole continuation: accepted guesses and the target's own tokens."""
    text, stream = Text(), decoding.Stream(tokenizer) if tokenizer else None
    if stream:
        stream.add(prompt, last=True)  # the text before a token decides how it is spelled
    for step in steps:
        for i, token in enumerate(step.kept):
            style = ACCEPTED if i < step.accepted else CORRECTED
            text.append(stream.add([token]) if stream else f"{token} ", style=style)
    return text


def legend(*, marks: bool = False, rejected: bool = True) -> Text:
    """The meaning of the colours, or of the marks; `rejected`: whether such guesses are shown."""
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
    """What a token adds to the text of those before it; its id where there is no tokenizer."""
    if tokenizer is None:
        return f"{token} "
    head = before[-LOOK_BACK:]
    return decoding.decode(tokenizer, [*head, token])[len(decoding.decode(tokenizer, head)) :]


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
    """Of every step the tokens of its line, as they are spelled, and their fates."""
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
