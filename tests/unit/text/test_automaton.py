"""A suffix automaton by hand, and what it takes on the worst texts."""

import sys

import pytest

from foretoken.text.automaton import DEEP, ROOT, Automaton


def automaton(tokens) -> Automaton:
    made = Automaton()
    for token in tokens:
        made.append(token)
    return made


def following(made: Automaton, run: list[int]) -> dict[int, int]:
    """How often each token followed `run`."""
    state, found = made.find(run)
    assert found == len(run)
    return {token: made.count[to] for token, to in made.following(state)}


def test_what_followed_is_counted():
    made = automaton([1, 2, 3, 1, 2, 4, 1, 2, 3, 1, 2])
    assert made.length[made.match] == 5
    assert following(made, [1, 2]) == {3: 2, 4: 1} and following(made, [2, 4, 1]) == {2: 1}
    assert made.continued(made.find([1, 2])[0]) == 3


def test_the_empty_text():
    made = Automaton()
    assert made.match == ROOT and not list(made.following(ROOT)) and made.find([1]) == (ROOT, 0)
    with pytest.raises(IndexError):
        made.pop()


def test_nothing_crosses_a_barrier():
    made = automaton([7, 1])
    made.bar()
    for token in (7, 1):
        made.append(token)
    made.bar()
    assert made.match == ROOT
    assert following(made, [7, 1]) == {} and made.continued(made.find([7, 1])[0]) == 2


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
    made = automaton(text)
    assert made.length[made.match] == match
    assert len(made.length) <= 2 * len(text) and len(made._before) <= DEEP * len(text)
    for _ in text:
        made.pop()
    assert len(made) == 0 and not made._before


def test_a_text_takes_some_hundred_bytes_a_token():
    """What is not in the arrays: dictionaries, most of which hold two or three tokens."""
    text = [(i * i + i // 7) % 601 for i in range(20_000)]
    made = automaton(text)
    columns = (made.ids, made.length, made.link, made.count, made.recent, made._at, made._split)
    taken = sum(sys.getsizeof(part) for part in (*columns, made._before, made._next))
    for ways in filter(None, made._next):
        taken += sys.getsizeof(ways) + 2 * 28 * len(ways)
    assert taken < 400 * len(text)
