"""A suffix automaton by hand, and what it takes on the worst texts."""

import sys

import pytest

from foretoken.text.automaton import DEEP, ROOT, Automaton


def automaton(tokens) -> Automaton:
    index = Automaton()
    for token in tokens:
        index.append(token)
    return index


def following(made: Automaton, run: list[int]) -> dict[int, int]:
    """How often each token followed `run`."""
    state, found = made.find(run)
    assert found == len(run)
    return {token: made.count[to] for token, to in made.following(state)}


def test_what_followed_is_counted():
    index = automaton([1, 2, 3, 1, 2, 4, 1, 2, 3, 1, 2])
    assert index.length[index.match] == 5
    assert following(index, [1, 2]) == {3: 2, 4: 1} and following(index, [2, 4, 1]) == {2: 1}
    assert index.continued(index.find([1, 2])[0]) == 3


def test_the_empty_text():
    index = Automaton()
    assert index.match == ROOT and not list(index.following(ROOT)) and index.find([1]) == (ROOT, 0)
    with pytest.raises(IndexError):
        index.pop()


def test_nothing_crosses_a_barrier():
    index = automaton([7, 1])
    index.bar()
    for token in (7, 1):
        index.append(token)
    index.bar()
    assert index.match == ROOT
    assert following(index, [7, 1]) == {} and index.continued(index.find([7, 1])[0]) == 2


REPETITIONS = {
    "a token": ([5] * 3000, 2999),
    "a period": (list(range(7)) * 430, 3003),
    "two runs": ([*[1] * 1500, 2, *[1] * 1500], 1500),
}


def test_barriers_of_two_texts_are_not_alike():
    one, other = automaton([1]), automaton([2])
    for made in (one, other):
        made.bar()
        made.append(3)
    assert one.ids[1] == other.ids[1] and one.find(other.ids[1:])[1] == 1


@pytest.mark.parametrize("kind", REPETITIONS)
def test_repetitions_stay_small(kind):
    """Their ends have about as many states as tokens; only the longest of them count."""
    text, match = REPETITIONS[kind]
    index = automaton(text)
    assert index.length[index.match] == match
    assert len(index.length) <= 2 * len(text) and len(index._before) <= DEEP * len(text)
    for _ in text:
        index.pop()
    assert len(index) == 0 and not index._before


def test_a_text_takes_some_hundred_bytes_a_token():
    """What is not in the arrays: dictionaries, most of which hold two or three tokens."""
    text = [(i * i + i // 7) % 601 for i in range(20_000)]
    index = automaton(text)
    columns = (
        index.ids,
        index.length,
        index.link,
        index.count,
        index.recent,
        index._at,
        index._split,
    )
    taken = sum(sys.getsizeof(part) for part in (*columns, index._before, index._next))
    for ways in filter(None, index._next):
        taken += sys.getsizeof(ways) + 2 * 28 * len(ways)
    assert taken < 400 * len(text)
