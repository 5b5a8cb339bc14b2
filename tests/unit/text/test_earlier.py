"""Texts of before: whose they are, and when they are forgotten."""

from foretoken.text import automaton
from foretoken.text.automaton import Earlier


def known(store: Earlier, salt: str, run: list[int]) -> bool:
    return any(texts.find(run)[1] == len(run) for texts in store.of(salt))


def test_a_salt_sees_its_own_texts_only():
    store = Earlier()
    store.add("a", [1, 2, 3])
    store.add("b", [4, 5, 6])
    assert known(store, "a", [1, 2, 3]) and known(store, "b", [4, 5, 6])
    assert not known(store, "a", [4]) and not known(store, "b", [1]) and not known(store, "", [1])


def test_no_run_goes_on_from_one_text_to_the_next():
    store = Earlier()
    store.add("", [1, 2])
    store.add("", [3, 4])
    assert known(store, "", [1, 2]) and known(store, "", [3, 4]) and not known(store, "", [2, 3])


def test_what_came_first_is_forgotten(monkeypatch):
    monkeypatch.setattr(automaton, "VOLUME", 10)
    monkeypatch.setattr(automaton, "MOST", 30)
    store = Earlier()
    for i in range(12):
        store.add("ab"[i % 2], [i] * 4)
    assert sum(len(texts) for salt in "ab" for texts in store.of(salt)) <= 30
    assert known(store, "a", [10] * 4) and known(store, "b", [11] * 4)
    assert not known(store, "a", [0]) and not known(store, "b", [1])
    assert [texts.find([10])[1] for texts in store.of("a")][0] == 1  # the latest first


def test_of_a_long_text_its_end_is_kept(monkeypatch):
    monkeypatch.setattr(automaton, "VOLUME", 10)
    store = Earlier()
    store.add("", list(range(25)))
    assert known(store, "", list(range(15, 25))) and not known(store, "", [14])


def test_a_crowd_of_salts_is_bounded(monkeypatch):
    monkeypatch.setattr(automaton, "MOST", 100)
    store = Earlier()
    for i in range(500):
        store.add(str(i), [])
    assert len(store._volumes) <= 100
