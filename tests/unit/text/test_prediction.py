"""Where a text stands in what was foretold of it: a function of the text alone."""

from __future__ import annotations

import random

import pytest

from foretoken.text.prediction import MAX_NEARBY_POSITIONS, PredictedOutput

ABC = [ord(letter) for letter in "the cat sat on the mat; the dog sat on the log."]


def ids(text: str) -> list[int]:
    return [ord(letter) for letter in text]


def after(prediction: str, text: str, most: int = 4) -> str:
    return "".join(map(chr, PredictedOutput(ids(prediction)).predict_next(ids(text), most)))


def test_a_text_begins_as_predicted_and_goes_on_so() -> None:
    expected = PredictedOutput(ABC)
    for n in range(len(ABC) + 1):
        assert expected.predict_next(ABC[:n], 5) == ABC[n : n + 5]
    assert expected.predict_next([], 0) == []


@pytest.mark.parametrize(
    ("prediction", "text", "next_"),
    [
        ("name: str; age", "title:", " str"),  # goes on behind what was replaced
        ("ab1ab2ab3", "ab1xab", "2ab3"),  # the next place behind the last one that was certain
        ("1ab2ab3", "1ab2ab3xab", "3"),  # behind which there is none: the last one before
        ("xyab1zzab2", "zzab", "2"),  # the longest end decides
        ("abc", "abcd", ""),
        ("abc", "xyz", ""),
        ("", "abc", ""),
    ],
)
def test_where_it_goes_on(prediction: str, text: str, next_: str) -> None:
    assert after(prediction, text) == next_


def followed(expected: list[int], text: list[int]) -> tuple[int, int]:
    """Guesses of one token before each of the text: made and right."""
    prediction, made, right = PredictedOutput(expected), 0, 0
    for n, token in enumerate(text):
        draft_token = prediction.predict_next(text[:n], 1)
        made, right = made + len(draft_token), right + (draft_token == [token])
    return made, right


def test_an_edited_text_is_followed_between_its_edits() -> None:
    dice = random.Random(1)
    expected = [dice.randrange(50) for _ in range(600)]
    text = [*expected[:100], *range(100, 120), *expected[100:300], *expected[350:], 7, 7]
    text[400] = 999
    count, right = followed(expected, text)
    assert right > len(text) - 20 - 15 and count - right < 15


def test_it_is_a_function_of_the_text_whatever_was_asked_before() -> None:
    dice = random.Random(3)
    expected = [dice.randrange(3) for _ in range(60)]
    shared = PredictedOutput(expected)
    for _ in range(300):
        text = [dice.randrange(3) for _ in range(dice.randrange(12))]
        start = dice.randrange(50)
        text = [*text, *expected[start : start + dice.randrange(9)]]
        cut = dice.randrange(len(text) + 1)
        for each in (text, text[:cut], text):
            assert shared.predict_next(each, 9) == PredictedOutput(expected).predict_next(each, 9)


def test_a_token_that_is_everywhere_costs_no_more_than_a_few_places() -> None:
    """Whoever sends such a prediction must not stall the texts of others."""
    wide = PredictedOutput([1, 2] * 50_000)
    looked = 0

    def agreement(place: int) -> int:
        nonlocal looked
        looked += 1
        return PredictedOutput._count_matching_tokens(wide, place)

    wide._count_matching_tokens = agreement  # pyright: ignore[reportAttributeAccessIssue]
    wide.predict_next([3] + [1] * 40, 4)
    assert 0 < looked <= 40 * (2 * MAX_NEARBY_POSITIONS + 1)
