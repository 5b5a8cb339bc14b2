"""Earlier occurrences of a text's end, also in earlier texts."""

from __future__ import annotations

import pytest

from foretoken.text.automaton import (
    MAX_COUNTED_SUFFIXES,
    ROOT_STATE,
    EarlierOutputs,
    SuffixAutomaton,
)


def automaton(tokens) -> SuffixAutomaton:
    index = SuffixAutomaton()
    for token in tokens:
        index.append(token)
    return index


def following(made: SuffixAutomaton, run: list[int]) -> dict[int, int]:
    """How often each token followed `run`."""
    state, found = made.find(run)
    assert found == len(run)
    return {token: made.count[to] for token, to in made.iter_continuations(state)}


def test_the_empty_text():
    index = SuffixAutomaton()
    assert (
        index.match == ROOT_STATE
        and not list(index.iter_continuations(ROOT_STATE))
        and index.find([1]) == (ROOT_STATE, 0)
    )
    with pytest.raises(IndexError):
        index.pop()


def test_nothing_crosses_a_barrier():
    index = automaton([7, 1])
    index.append_barrier()
    for token in (7, 1):
        index.append(token)
    index.append_barrier()
    assert index.match == ROOT_STATE
    assert following(index, [7, 1]) == {} and index.count_continuations(index.find([7, 1])[0]) == 2


REPETITIONS = {
    "a token": ([5] * 3000, 2999),
    "a period": (list(range(7)) * 430, 3003),
    "two runs": ([*[1] * 1500, 2, *[1] * 1500], 1500),
}


def test_barriers_of_two_texts_are_not_alike():
    one, other = automaton([1]), automaton([2])
    for made in (one, other):
        made.append_barrier()
        made.append(3)
    assert one.ids[1] == other.ids[1] and one.find(other.ids[1:])[1] == 1


@pytest.mark.parametrize("kind", REPETITIONS)
def test_repetitions_stay_small(kind):
    """Their ends have about as many states as tokens; only the longest of them count."""
    text, match = REPETITIONS[kind]
    index = automaton(text)
    assert index.length[index.match] == match
    assert len(index.length) <= 2 * len(text) and len(
        index._previous_recent
    ) <= MAX_COUNTED_SUFFIXES * len(text)
    for _ in text:
        index.pop()
    assert len(index) == 0 and not index._previous_recent


def known(store: EarlierOutputs, salt: str, run: list[int]) -> bool:
    return any(texts.find(run)[1] == len(run) for texts in store.list_automata(salt))


def test_a_salt_sees_its_own_texts_only():
    store = EarlierOutputs()
    store.add("a", [1, 2, 3])
    store.add("b", [4, 5, 6])
    assert known(store, "a", [1, 2, 3]) and known(store, "b", [4, 5, 6])
    assert not known(store, "a", [4]) and not known(store, "b", [1]) and not known(store, "", [1])


def test_no_run_goes_on_from_one_text_to_the_next():
    store = EarlierOutputs()
    store.add("", [1, 2])
    store.add("", [3, 4])
    assert known(store, "", [1, 2]) and known(store, "", [3, 4]) and not known(store, "", [2, 3])


def test_what_came_first_is_forgotten(monkeypatch):
    monkeypatch.setattr("foretoken.text.automaton.MAX_VOLUME_TOKENS", 10)
    monkeypatch.setattr("foretoken.text.automaton.MAX_EARLIER_TOKENS", 30)
    store = EarlierOutputs()
    for i in range(12):
        store.add("ab"[i % 2], [i] * 4)
    assert sum(len(texts) for salt in "ab" for texts in store.list_automata(salt)) <= 30
    assert known(store, "a", [10] * 4) and known(store, "b", [11] * 4)
    assert not known(store, "a", [0]) and not known(store, "b", [1])
    assert [texts.find([10])[1] for texts in store.list_automata("a")][0] == 1  # the latest first


def test_of_a_long_text_its_end_is_kept(monkeypatch):
    monkeypatch.setattr("foretoken.text.automaton.MAX_VOLUME_TOKENS", 10)
    store = EarlierOutputs()
    store.add("", list(range(25)))
    assert known(store, "", list(range(15, 25))) and not known(store, "", [14])


def test_a_crowd_of_salts_is_bounded(monkeypatch):
    monkeypatch.setattr("foretoken.text.automaton.MAX_EARLIER_TOKENS", 100)
    store = EarlierOutputs()
    for i in range(500):
        store.add(str(i), [])
    assert len(store._volumes) <= 100
