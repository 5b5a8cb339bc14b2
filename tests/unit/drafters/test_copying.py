"""The copy of the input: where it starts, where it waits, and where it goes on."""

from __future__ import annotations

from foretoken.drafters.base import Draw
from foretoken.drafters.copying import CopyDrafter
from foretoken.drafters.none import NoDrafter
from foretoken.sampling.keys import SequenceKey
from foretoken.speculator import Speculator
from table import TableModel

NO_DRAW: Draw = None  # type: ignore  # draft tokens are certain


def draft_tokens(source: list[int], *outputs: list[int], count: int = 3) -> list[int]:
    drafter = CopyDrafter()
    drafter.start([0], [[9]], [source])
    for output in outputs:
        drafter.commit([output])
    draft = drafter.propose([count], NO_DRAW)
    assert draft.q is None
    return draft.tokens[0, : draft.lengths[0]].tolist()


def test_it_starts_at_the_beginning_and_follows():
    assert draft_tokens([1, 2, 3, 4, 5]) == [1, 2, 3]
    assert draft_tokens([1, 2, 3, 4, 5], [1, 2], [3]) == [4, 5]
    assert draft_tokens([1, 2, 3], [1, 2, 3]) == []
    assert draft_tokens([1, 2, 3], count=0) == []


def test_after_a_difference_it_waits_for_a_place_that_is_sure():
    source = [1, 2, 3, 2, 4, 5]
    assert draft_tokens(source, [1, 7]) == []  # 7 is nowhere
    assert draft_tokens(source, [1, 7, 2]) == []  # 2 is twice, and 7 2 nowhere
    assert draft_tokens(source, [1, 7, 2, 4]) == [5]  # 4 is there once
    assert draft_tokens(source, [7, 3]) == [2, 4, 5]
    assert draft_tokens(source, [7, 3, 2, 4]) == [5]  # a longer way


def test_a_sequence_that_joins_again_copies_its_input_only():
    """Its output is behind its prompt then, and is not copied."""
    prompt = [4, 1, 2, 3]
    for again, sources in (([0], [prompt]), (prompt, None)):
        drafter = CopyDrafter()
        drafter.set_output_lengths([3])
        drafter.start([0], [[*again, 4, 1, 7]], sources)
        assert drafter.propose([3], NO_DRAW).lengths.tolist() == [0]  # 7 is nowhere
        drafter.commit([[1]])
        assert drafter.propose([3], NO_DRAW).tokens.tolist() == [[2, 3]]


def test_a_longer_end_decides_between_two_places():
    assert draft_tokens([1, 2, 3, 5, 2, 4], [9, 5], [2]) == [4]
    assert draft_tokens([1, 2, 3, 5, 2, 4], [9, 1], [2]) == [3, 5, 2]


def test_a_target_that_copies_is_followed_in_few_calls():
    """It gives its prompt again, but for one token: the text is that of plain decoding."""
    prompt = [1, 2, 3, 4, 5, 6, 1]

    def copier(text):
        place = len(text) - len(prompt)
        token = 7 if place == 3 else prompt[min(place, len(prompt) - 1)]
        return [0.9 if i == token else 0.0125 for i in range(9)]

    def generate(drafter):
        spec = Speculator(TableModel(copier, 9), drafter)
        return spec.generate(prompt, max_new_tokens=7, gamma=4)[0]

    plain, fast = generate(NoDrafter()), generate(CopyDrafter())
    assert fast.tokens == plain.tokens == [1, 2, 3, 7, 5, 6, 1]
    assert fast.stats.target_calls == 4  # nothing is drafted for the first token
    assert SequenceKey(*fast.seed) == SequenceKey(0, 0)
