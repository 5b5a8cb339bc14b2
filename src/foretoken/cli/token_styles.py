"""Format an output with its tokens in colour, as in figure 1 of the paper: accepted and rejected
draft tokens, and the target's own tokens.

On terminals without colours, marks around the tokens replace the colours.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from rich.text import Text

from foretoken.text import decoding

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from foretoken.records import StepRecord

ACCEPTED_STYLE, REJECTED_STYLE, CORRECTED_STYLE = "green", "red strike", "bold blue"
STYLE_MARKS = {
    ACCEPTED_STYLE: "",
    REJECTED_STYLE: "~~",
    CORRECTED_STYLE: "[]",
}  # a character before a token, and one after it
STYLE_NAMES = {
    "accepted draft token": ACCEPTED_STYLE,
    "rejected draft token": REJECTED_STYLE,
    "target's own": CORRECTED_STYLE,
}
# Number of preceding tokens that are needed to decode a token: its leading space, or a character
# that it completes, depends on these tokens
CONTEXT_TOKENS = 8


def format_steps(
    prompt: list[int],
    steps: list[StepRecord],
    tokenizer: PreTrainedTokenizerBase | None,
    *,
    marks: bool = False,
) -> list[Text]:
    """Return a line for each step: accepted draft tokens, the first rejected draft token, and the
    target's own tokens.

    Args:
        marks: Put marks around the tokens, for a terminal without colours.
    """
    lines: list[Text] = []
    for number, tokens in enumerate(spell_steps(prompt, steps, tokenizer), 1):
        line = Text(f"{number:4d} ", style="dim")
        for spelled, fate in tokens:
            line.append(add_marks(spelled, fate) if marks else spelled, style=fate)
        lines.append(line)
    return lines


def format_completion(
    prompt: list[int], steps: list[StepRecord], tokenizer: PreTrainedTokenizerBase | None
) -> Text:
    """Return the whole output: accepted draft tokens and the target's own tokens."""
    text, style = Text(), ACCEPTED_STYLE
    stream = decoding.IncrementalDetokenizer(tokenizer, prompt) if tokenizer else None
    for step in steps:
        for i, token in enumerate(step.new_tokens):
            style = ACCEPTED_STYLE if i < step.accepted else CORRECTED_STYLE
            text.append(stream.add([token]) if stream else f"{token} ", style=style)
    return text.append(stream.add([], last=True) if stream else "", style=style)


def format_legend(*, marks: bool = False, rejected: bool = True) -> Text:
    """Return a legend of the colours.

    Args:
        marks: Put marks around the labels, for a terminal without colours.
        rejected: Include rejected draft tokens.
    """
    names = [
        (name, fate) for name, fate in STYLE_NAMES.items() if rejected or fate != REJECTED_STYLE
    ]
    labels = [(add_marks(name, fate) if marks else name, fate) for name, fate in names]
    return Text("  ").join(Text(name, style) for name, style in labels)


def add_marks(spelled: str, fate: str) -> str:
    """Return a token's text with the marks of its style, between its leading and trailing
    blanks."""
    marks = STYLE_MARKS[fate]
    before, word, after = split_blanks(spelled)
    return f"{before}{marks[:1]}{word}{marks[1:]}{after}"


def split_blanks(spelled: str) -> tuple[str, str, str]:
    """Split a token's text into leading blanks, word and trailing blanks. If the text has only
    blanks, the blanks are the word."""
    word = spelled.strip()
    return spelled.partition(word) if word else ("", spelled, "")


def spell_steps(
    prompt: list[int], steps: list[StepRecord], tokenizer: PreTrainedTokenizerBase | None
) -> Iterator[list[tuple[str, str]]]:
    """Yield for each step its tokens as (text, style): accepted draft tokens, the first rejected
    draft token, and the target's own tokens."""
    sequence = list(prompt)
    for step in steps:
        tokens = step.new_tokens[step.accepted :]
        fates = [(token, ACCEPTED_STYLE) for token in step.new_tokens[: step.accepted]]
        if tokens and step.accepted < step.drafted:
            fates.append((step.draft_tokens[step.accepted], REJECTED_STYLE))
        fates += [(token, CORRECTED_STYLE) for token in tokens]
        line: list[tuple[str, str]] = []
        for token, fate in fates:
            line.append((_spell_token(tokenizer, sequence, token), fate))
            if fate != REJECTED_STYLE:
                sequence.append(token)
        yield line


def _spell_token(tokenizer: PreTrainedTokenizerBase | None, before: list[int], token: int) -> str:
    """Return the text that a token adds after the tokens `before`, with a sign for a newline.
    Without a tokenizer, return the token's id.

    If the token adds no text, or only a part of a character, return a dot.
    """
    if tokenizer is None:
        return f"{token} "
    stream = decoding.IncrementalDetokenizer(tokenizer, before[-CONTEXT_TOKENS:])
    spelled = stream.add([token]) or stream.pending_text.rstrip(decoding.REPLACEMENT_CHARACTER)
    return spelled.replace("\n", "⏎") or "·"
