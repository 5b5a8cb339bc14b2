"""What follows a text can go back: after any pushes and pops it is what a fresh one would be."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from foretoken.controls.history import History, Stack, TokenCounts

CPU = torch.device("cpu")
WALKS = st.lists(st.integers(-3, 5), max_size=60)  # negative: so many pops


def walked(memory, walk: list[int], text: list[int]) -> list[int]:
    """Push and pop; what is left of the text, which starts as given and never goes below it."""
    left = list(text)
    for token in walk:
        if token >= 0:
            left.append(token)
            memory.push(token)
        for _ in range(min(max(0, -token), len(left) - len(text))):
            left.pop()
            memory.pop()
    return left


def facts(history: History) -> list:
    tallies = history.every, history.new
    return [
        history.tokens,
        history.done,
        history.ids(CPU).tolist(),
        *(tally.ids(CPU).tolist() for tally in tallies),
        *(tally.counts(torch.zeros(1)).tolist() for tally in tallies),
    ]


@given(st.lists(st.integers(0, 5), max_size=9), WALKS)
def test_a_history_is_what_its_text_makes_of_a_fresh_one(prompt, walk):
    history, fresh = History(prompt), History(prompt)
    text = walked(history, walk, prompt)
    for token in text[len(prompt) :]:
        fresh.push(token)
    assert facts(history) == facts(fresh)
    assert history.tokens == text and history.done == len(text) - len(prompt)
    assert history.every.ids(CPU).tolist() == list(dict.fromkeys(text))
    new = text[len(prompt) :]
    counts = [float(new.count(token)) for token in dict.fromkeys(new)]
    assert history.new.counts(torch.zeros(1)).tolist() == counts


def test_its_ids_are_a_copy():
    history = History([1, 2])
    history.ids(CPU).zero_()
    assert history.ids(CPU).tolist() == [1, 2]


def test_a_tally_forgets_an_id_with_its_last_occurrence():
    tally = TokenCounts()
    for token in (3, 1, 3):
        tally.push(token)
    tally.pop(3)
    assert tally.ids(CPU).tolist() == [3, 1]
    assert tally.counts(torch.zeros(1)).tolist() == [1.0, 1.0]
    tally.pop(1)
    tally.push(2)
    assert tally.ids(CPU).tolist() == [3, 2]


@pytest.mark.parametrize("count", [0, 63, 64, 65, 1000])
def test_a_stack_grows(count):
    stack = Stack(int)
    for i in range(count):
        stack.push(i)
    assert stack.values.tolist() == list(range(count)) and len(stack) == count
    for _ in range(count):
        stack.pop()
    assert not len(stack.values)
