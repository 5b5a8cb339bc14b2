"""The automaton of a text, which grows and shrinks, against a search through all of it."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from foretoken.text.automaton import SuffixAutomaton

IDS = st.integers(0, 2)  # few, so that there is much to find
CHANGES = st.lists(  # tokens that come, a barrier, or how many go
    st.one_of(st.lists(IDS, min_size=1, max_size=6), st.none(), st.integers(1, 8)), max_size=10
)


def ends(text: list[int], run: list[int]) -> list[int]:
    """Where `run` ends in `text`."""
    return [i for i in range(len(run), len(text) + 1) if text[i - len(run) : i] == run]


def grown(changes: list[list[int] | int | None]) -> tuple[SuffixAutomaton, list[int]]:
    automaton, text = SuffixAutomaton(), list[int]()
    for change in changes:
        if isinstance(change, int):
            for _ in range(min(change, len(text))):
                assert automaton.pop() == text.pop()
        elif change is None:
            text.append(-1 - len(text))
            automaton.append_barrier()
        else:
            for token in change:
                text.append(token)
                automaton.append(token)
    return automaton, text


@settings(deadline=None)
@given(CHANGES)
def test_the_match_is_the_longest_end_that_occurred_before(changes):
    automaton, text = grown(changes)
    lengths = (n for n in range(len(text), 0, -1) if len(ends(text, text[-n:])) > 1)
    assert automaton.length[automaton.match] == next(lengths, 0)
    assert list(automaton.ids) == text


@settings(deadline=None, max_examples=50)
@given(CHANGES)
def test_every_run_is_counted_with_what_followed(changes):
    automaton, text = grown(changes)
    runs = {tuple(text[i:j]) for j in range(len(text) + 1) for i in range(max(0, j - 7), j)}
    for run in (list(run) for run in runs if min(run) >= 0):
        state, length = automaton.find(run)
        places = ends(text, run)
        assert length == len(run)
        assert (automaton.count[state], automaton.recent[state]) == (len(places), places[-1])
        after = [text[i] for i in places if i < len(text)]
        assert automaton.count_continuations(state) == len(after)
        following = dict(automaton.iter_continuations(state))
        assert following.keys() == {token for token in after if token >= 0}
        for token, to in following.items():
            assert to == automaton.find([*run, token])[0]
            assert automaton.count[to] == after.count(token)


@settings(deadline=None)
@given(CHANGES, st.lists(IDS, max_size=9))
def test_the_longest_end_of_another_text_is_found(changes, tokens):
    automaton, text = grown(changes)
    lengths = (n for n in range(len(tokens), 0, -1) if ends(text, tokens[-n:]))
    assert automaton.find(tokens)[1] == next(lengths, 0)


@settings(deadline=None)
@given(CHANGES)
def test_tokens_taken_back_leave_nothing(changes):
    automaton, text = grown(changes)
    while text:
        assert automaton.pop() == text.pop()
    assert len(automaton) == 0 and automaton.match == automaton.find([0, 1])[0] == 0
    columns = automaton.length, automaton.link, automaton.count, automaton.recent
    assert [list(column) for column in columns] == [[0], [-1], [0], [0]]
