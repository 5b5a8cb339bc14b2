"""Figure 1 of the paper in the terminal: one line per target run, each token coloured by its fate,
or between marks where there are no colours."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.text import Text

from foretoken.text import decoding

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from foretoken.request import StepRecord

ACCEPTED, REJECTED, CORRECTED = "green", "red strike", "bold blue"
MARKS = {ACCEPTED: "", REJECTED: "~~", CORRECTED: "[]"}  # before and behind a token
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
    so_far, lines = list(prompt), []
    for number, step in enumerate(steps, 1):
        line = Text(f"{number:4d} ", style="dim")

        def add(token: int, fate: str, line: Text = line) -> None:
            spelled = _on_one_line(spell(tokenizer, so_far, token))
            line.append(marked(spelled, fate) if marks else spelled, style=fate)

        for token in step.kept[: step.accepted]:
            add(token, ACCEPTED)
            so_far.append(token)
        own = step.kept[step.accepted :]
        if own and step.accepted < step.drafted:
            add(step.guesses[step.accepted], REJECTED)
        for token in own:
            add(token, CORRECTED)
            so_far.append(token)
        lines.append(line)
    return lines


def paragraph(
    prompt: list[int], steps: list[StepRecord], tokenizer: PreTrainedTokenizerBase | None
) -> Text:
    """The whole continuation: accepted guesses and the target's own tokens."""
    shown, stream = Text(), decoding.Stream(tokenizer) if tokenizer else None
    if stream:
        stream.add(prompt, last=True)  # the text before a token decides how it is spelled
    for step in steps:
        for i, token in enumerate(step.kept):
            style = ACCEPTED if i < step.accepted else CORRECTED
            shown.append(stream.add([token]) if stream else f"{token} ", style=style)
    return shown


def legend(*, marks: bool = False, rejected: bool = True) -> Text:
    """The meaning of the colours, or of the marks; `rejected`: whether such guesses are shown."""
    fates = {"accepted guess": ACCEPTED, "rejected guess": REJECTED, "target's own": CORRECTED}
    shown = [(name, fate) for name, fate in fates.items() if rejected or fate != REJECTED]
    named = [(marked(name, fate) if marks else name, fate) for name, fate in shown]
    return Text("  ").join(Text(name, style) for name, style in named)


def marked(spelled: str, fate: str) -> str:
    """A token between the marks of its fate: inside its blanks, so that words stay apart."""
    mark, word = MARKS[fate], spelled.strip()
    if not mark or not word:
        return f"{mark[:1]}{spelled}{mark[1:]}"
    before, _, behind = spelled.partition(word)
    return f"{before}{mark[0]}{word}{mark[1]}{behind}"


def spell(tokenizer: PreTrainedTokenizerBase | None, before: list[int], token: int) -> str:
    """What a token adds to the text of those before it; its id where there is no tokenizer."""
    if tokenizer is None:
        return f"{token} "
    head = before[-LOOK_BACK:]
    return decoding.decode(tokenizer, [*head, token])[len(decoding.decode(tokenizer, head)) :]


def _on_one_line(spelled: str) -> str:
    """A dot stands for a token without text, or with a part of a character."""
    return spelled.replace("\n", "⏎") or "·"
