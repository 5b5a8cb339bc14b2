"""What became of one text's draft tokens: lines, the paragraph, and marks without colours."""

from __future__ import annotations

from foretoken.cli.token_styles import (
    ACCEPTED_STYLE,
    CORRECTED_STYLE,
    REJECTED_STYLE,
    format_completion,
    format_legend,
    format_steps,
)
from foretoken.drafters.lm import LMDrafter
from foretoken.models.stock.model import CausalModel
from foretoken.records import StepRecord
from foretoken.speculator import Speculator
from tiny import byte_level, llama


def record(draft_tokens: list[int], accepted: int, kept: list[int]) -> StepRecord:
    return StepRecord(
        len(draft_tokens), tuple(draft_tokens), accepted, tuple(kept), (), 0, 0.0, 0.0, 0.0, rows=1
    )


def spans(line) -> list[tuple[str, str]]:
    """Text and colour of all that follows the number of a line."""
    return [(line.plain[span.start : span.end], span.style) for span in line.spans]


def test_a_rejection_an_acceptance_and_an_end():
    steps = [record([5, 6, 7], 1, [5, 9]), record([1, 2], 2, [1, 2, 3]), record([4, 8], 1, [4])]
    first, second, third = format_steps([0], steps, None)
    assert spans(first) == [("5 ", ACCEPTED_STYLE), ("6 ", REJECTED_STYLE), ("9 ", CORRECTED_STYLE)]
    assert spans(second) == [
        ("1 ", ACCEPTED_STYLE),
        ("2 ", ACCEPTED_STYLE),
        ("3 ", CORRECTED_STYLE),
    ]
    assert spans(third) == [("4 ", ACCEPTED_STYLE)]  # the text ended within the draft tokens
    assert first.plain.startswith("   1 ") and third.plain.startswith("   3 ")


def test_the_prompt_decides_how_the_first_token_is_spelled():
    ids = byte_level()("It was\nthe sea", add_special_tokens=False).input_ids
    shown = format_steps(ids[:2], [record([], 0, [token]) for token in ids[2:]], byte_level())
    assert "".join(spans(line)[0][0] for line in shown).replace("⏎", "\n") == byte_level().decode(
        ids
    ).removeprefix(byte_level().decode(ids[:2]))
    assert any("⏎" in line.plain for line in shown)
    assert not any("\n" in line.plain for line in shown)


def test_the_tokens_in_green_and_blue_are_the_completions():
    target, draft = CausalModel(llama(64)), CausalModel(llama(64, seed=1))
    spec = Speculator(target, LMDrafter(draft, 64))
    (completion,) = spec.generate([1, 2], temperature=1.0, gamma=3, max_new_tokens=40)
    shown = format_steps([1, 2], completion.steps, None)
    assert len(shown) == completion.stats.target_calls
    fates = [fate for line in shown for fate in spans(line)]
    tokens = [int(text) for text, style in fates if style != REJECTED_STYLE]
    assert tokens == completion.tokens
    assert sum(style == ACCEPTED_STYLE for _, style in fates) == completion.stats.accepted
    rejected = sum(step.accepted < step.drafted for step in completion.steps)
    assert sum(style == REJECTED_STYLE for _, style in fates) == rejected > 0


def test_parts_of_a_character_are_not_lost():
    whale = byte_level()("\U0001f40b", add_special_tokens=False).input_ids
    shown = format_steps([0], [record([], 0, [token]) for token in whale], byte_level())
    assert [spans(line)[0][0] for line in shown] == ["·"] * (len(whale) - 1) + ["\U0001f40b"]
    shown = format_completion([0], [record([], 0, whale[:-1])], byte_level())
    assert shown.plain == "\ufffd"  # as the text that ends so


def test_marks_where_there_is_no_colour():
    steps = [record([5, 6, 7], 1, [5, 9]), record([1], 1, [1, 3])]
    shown = format_steps([0], steps, None, marks=True)
    assert [line.plain for line in shown] == ["   1 5 ~6~ [9] ", "   2 1 [3] "]
    assert (
        format_legend(marks=True).plain
        == "accepted draft token  ~rejected draft token~  [target's own]"
    )
    ids = byte_level()(" sea  ", add_special_tokens=False).input_ids
    (line,) = format_steps([0], [record([], 0, ids)], byte_level(), marks=True)
    assert (
        "".join(c for c in line.plain[5:] if c not in "[]") == " sea  " and "[]" not in line.plain
    )


def test_the_paragraph_is_the_text_in_the_colours_of_its_tokens():
    steps = [record([5, 6], 1, [5, 7]), record([8], 1, [8, 9])]
    shown = format_completion([1, 2], steps, None)
    assert spans(shown) == [
        ("5 ", ACCEPTED_STYLE),
        ("7 ", CORRECTED_STYLE),
        ("8 ", ACCEPTED_STYLE),
        ("9 ", CORRECTED_STYLE),
    ]


def test_the_paragraph_has_characters_of_several_tokens():
    ids = byte_level()("It was 海!", add_special_tokens=False).input_ids
    shown = format_completion(ids[:2], [record([], 0, [token]) for token in ids[2:]], byte_level())
    assert shown.plain == byte_level().decode(ids).removeprefix(byte_level().decode(ids[:2]))
