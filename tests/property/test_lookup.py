"""The index of `LookupDrafter` against a search through the whole text."""

from hypothesis import given, settings
from hypothesis import strategies as st

from foretoken.drafters.base import Draw
from foretoken.drafters.lookup import LookupDrafter
from foretoken.sampling.distributions import SamplingParams
from foretoken.sampling.keys import RowKey

IDS = st.integers(0, 2)  # few, so that there is much to find
TEXT = st.lists(IDS, max_size=25)


def naive(source: list[int], text: list[int], longest: int, gamma: int) -> list[int]:
    """The longest, then the latest match of the text's end, text before source; O(L^2)."""
    for n in range(min(longest, len(text)), 0, -1):
        for place in range(len(text) - 1, n - 1, -1):
            if text[place - n : place] == text[-n:]:
                grown = list(text)
                for i in range(gamma):
                    grown.append(grown[place + i])
                return grown[len(text) :]
        for place in range(len(source) - 1, n - 1, -1):
            if source[place - n : place] == text[-n:]:
                return source[place : place + gamma]
    return []


def guesses(drafter: LookupDrafter, gamma: list[int]) -> list[list[int]]:
    keys = [RowKey(0, b) for b in range(len(gamma))]
    draft = drafter.propose(gamma, Draw(keys, [0] * len(gamma), [SamplingParams()] * len(gamma)))
    assert draft.q is None and draft.calls == 0
    pairs = zip(draft.tokens.tolist(), draft.lengths.tolist(), strict=True)
    return [ids[:n] for ids, n in pairs]


@settings(deadline=None)
@given(st.lists(st.tuples(TEXT, TEXT), min_size=1, max_size=3), st.integers(1, 5), st.data())
def test_guesses_are_those_of_a_full_search(rows, longest, data):
    """Sources, growth by commits of any size, rows that leave: always the naive answer."""
    drafter = LookupDrafter(longest)
    sources, texts = [list(s) for s, _ in rows], [list(t) for _, t in rows]
    drafter.start(list(range(len(rows))), [list(t) for t in texts], [list(s) for s in sources])
    for _ in range(4):
        gamma = [data.draw(st.integers(0, 6)) for _ in texts]
        expected = map(naive, sources, texts, [longest] * len(texts), gamma)
        assert guesses(drafter, gamma) == list(expected)
        kept = [data.draw(st.lists(IDS, max_size=4)) for _ in texts]
        drafter.commit(kept)
        for text, tokens in zip(texts, kept, strict=True):
            text.extend(tokens)
        gone = data.draw(st.sets(st.integers(0, len(texts) - 1)) if texts else st.just(set()))
        drafter.leave(sorted(gone))
        sources = [s for b, s in enumerate(sources) if b not in gone]
        texts = [t for b, t in enumerate(texts) if b not in gone]


@settings(deadline=None)
@given(st.lists(IDS, max_size=40), st.integers(1, 8), st.integers(0, 40))
def test_how_the_text_arrived_does_not_matter(text, longest, cut):
    whole, parts = LookupDrafter(longest), LookupDrafter(longest)
    whole.start([0], [text], None)
    parts.start([0], [text[:cut]], None)
    parts.commit([text[cut:]])
    assert guesses(whole, [5]) == guesses(parts, [5])
