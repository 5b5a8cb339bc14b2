"""One text's draft tokens in colour, by what became of them: figure 1 of the paper.

Where a terminal has no colours, marks stand around the tokens instead.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from rich.text import Text

from foretoken.text import decoding

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from foretoken.records import StepRecord

ACCEPTED, REJECTED, CORRECTED = "green", "red strike", "bold blue"
MARKS = {ACCEPTED: "", REJECTED: "~~", CORRECTED: "[]"}  # one before a token, one after it
NAMES = {
    "accepted draft token": ACCEPTED,
    "rejected draft token": REJECTED,
    "target's own": CORRECTED,
}
CONTEXT_TOKENS = 8  # that decide how the next one is spelled: spaces, parts of a character


def lines(
    prompt: list[int],
    steps: list[StepRecord],
    tokenizer: PreTrainedTokenizerBase | None,
    *,
    marks: bool = False,
) -> list[Text]:
    """Return a line per step: accepted draft tokens, the first rejected one, then the target's own.

    Args:
        marks: For a terminal without colours.
    """
    shown: list[Text] = []
    for number, tokens in enumerate(spell_steps(prompt, steps, tokenizer), 1):
        line = Text(f"{number:4d} ", style="dim")
        for spelled, fate in tokens:
            line.append(mark(spelled, fate) if marks else spelled, style=fate)
        shown.append(line)
    return shown


def paragraph(
    prompt: list[int], steps: list[StepRecord], tokenizer: PreTrainedTokenizerBase | None
) -> Text:
    """Return the whole continuation: accepted draft tokens and the target's own tokens."""
    text, style = Text(), ACCEPTED
    stream = decoding.Stream(tokenizer, prompt) if tokenizer else None
    for step in steps:
        for i, token in enumerate(step.kept):
            style = ACCEPTED if i < step.accepted else CORRECTED
            text.append(stream.add([token]) if stream else f"{token} ", style=style)
    return text.append(stream.add([], last=True) if stream else "", style=style)


def legend(*, marks: bool = False, rejected: bool = True) -> Text:
    """Return the meaning of the colours, or of the marks.

    Args:
        rejected: False where no rejected draft tokens are shown.
    """
    names = [(name, fate) for name, fate in NAMES.items() if rejected or fate != REJECTED]
    labels = [(mark(name, fate) if marks else name, fate) for name, fate in names]
    return Text("  ").join(Text(name, style) for name, style in labels)


def mark(spelled: str, fate: str) -> str:
    """Put a token between its marks: inside its blanks, so that words stay apart."""
    marks = MARKS[fate]
    before, word, after = split_blanks(spelled)
    return f"{before}{marks[:1]}{word}{marks[1:]}{after}"


def split_blanks(spelled: str) -> tuple[str, str, str]:
    """Split a token into the blanks before it, itself and the blanks after; one of blanks is all
    word."""
    word = spelled.strip()
    return spelled.partition(word) if word else ("", spelled, "")


def spell_steps(
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
            line.append((_spell(tokenizer, so_far, token), fate))
            if fate != REJECTED:
                so_far.append(token)
        yield line


def _spell(tokenizer: PreTrainedTokenizerBase | None, before: list[int], token: int) -> str:
    """Return on one line the text that a token adds or completes; its id without a tokenizer.

    A dot stands for a token without text, or with a part of a character.
    """
    if tokenizer is None:
        return f"{token} "
    stream = decoding.Stream(tokenizer, before[-CONTEXT_TOKENS:])
    spelled = stream.add([token]) or stream.held.rstrip(decoding.REPLACEMENT)
    return spelled.replace("\n", "⏎") or "·"
