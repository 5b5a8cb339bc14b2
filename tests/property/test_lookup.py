"""The draft tokens of `LookupDrafter` against a search through the whole text."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from foretoken.drafters.base import Draw
from foretoken.drafters.lookup import MIN_ACCEPTED_CHANCE, LookupDrafter
from foretoken.sampling.distributions import SamplingParams
from foretoken.sampling.keys import SequenceKey

IDS = st.integers(0, 2)  # few, so that there is much to find
TEXT = st.lists(IDS, max_size=25)
BARRIER = -1


def ends(text: list[int], run: list[int]) -> list[int]:
    """Where `run` ends in `text` and something follows."""
    return [i for i in range(len(run), len(text)) if text[i - len(run) : i] == run]


def naive(source: list[int], text: list[int], gamma: int) -> list[int]:
    """What most often followed the longest match of the text's end, then the longest match and
    that, and so on, while it is likely to be kept; O(L^3)."""
    whole = [*source, BARRIER, *text] if source else text
    lengths = (n for n in range(len(text), 0, -1) if ends(whole, text[len(text) - n :]))
    matched = next(lengths, 0)
    run, draft_tokens, chance = text[len(text) - matched :] if matched else [], list[int](), 1.0
    while run and len(draft_tokens) < gamma:
        places = ends(whole, run)
        if not places:  # the text's end: it goes on as behind the match
            run = text[len(text) - matched :]
            places = ends(whole, run)
        after = [(whole[i], i) for i in places if whole[i] != BARRIER]
        if not after:
            break
        tokens = [token for token, _ in after]
        token = max(after, key=lambda found: (tokens.count(found[0]), found[1]))[0]
        chance *= tokens.count(token) / (len(places) + 1 / (matched + len(draft_tokens)))
        if chance < MIN_ACCEPTED_CHANCE:
            break
        draft_tokens.append(token)
        run = [*run, token]
    return draft_tokens


def draft_tokens(drafter: LookupDrafter, gamma: list[int], greedy: bool = False) -> list[list[int]]:
    keys, params = (
        [SequenceKey(0, b) for b in range(len(gamma))],
        SamplingParams(0.0 if greedy else 1.0),
    )
    draft = drafter.propose(gamma, Draw(keys, [0] * len(gamma), [params] * len(gamma)))
    assert draft.q is None and draft.calls == 0
    pairs = zip(draft.tokens.tolist(), draft.lengths.tolist(), strict=True)
    return [ids[:n] for ids, n in pairs]


@settings(deadline=None)
@given(st.lists(st.tuples(TEXT, TEXT), min_size=1, max_size=3), st.data())
def test_draft_tokens_are_those_of_a_full_search(rows, data):
    """Sources, growth by commits of any size, rows that leave: always the naive answer."""
    drafter = LookupDrafter()
    sources, texts = [list(s) for s, _ in rows], [list(t) for _, t in rows]
    drafter.start(list(range(len(rows))), [list(t) for t in texts], [list(s) for s in sources])
    for _ in range(4):
        gamma = [data.draw(st.integers(0, 6)) for _ in texts]
        assert draft_tokens(drafter, gamma) == list(map(naive, sources, texts, gamma))
        commits = [data.draw(st.lists(IDS, max_size=4)) for _ in texts]
        drafter.commit(commits)
        for text, tokens in zip(texts, commits, strict=True):
            text.extend(tokens)
        gone = data.draw(st.sets(st.integers(0, len(texts) - 1)) if texts else st.just(set()))
        drafter.leave(sorted(gone))
        sources = [s for b, s in enumerate(sources) if b not in gone]
        texts = [t for b, t in enumerate(texts) if b not in gone]


@settings(deadline=None)
@given(st.lists(IDS, max_size=40), st.integers(0, 40))
def test_how_the_text_arrived_does_not_matter(text, cut):
    whole, parts = LookupDrafter(), LookupDrafter()
    whole.start([0], [text], None)
    parts.start([0], [text[:cut]], None)
    parts.commit([text[cut:]])
    assert draft_tokens(whole, [5]) == draft_tokens(parts, [5])


@settings(deadline=None)
@given(st.lists(st.tuples(st.sampled_from("ab"), TEXT), max_size=6), TEXT, st.sampled_from("ab"))
def test_only_outputs_of_the_same_salt_are_read(before, text, salt):
    """A row guesses as if the others' outputs had never been."""
    every, own = LookupDrafter(), LookupDrafter()
    for drafter, salts in ((every, "ab"), (own, salt)):
        drafter.set_prefix_caching(True)
        for whose, output in before:
            if whose in salts:
                drafter.set_salt(whose)
                drafter.start([0], [[]], None)
                drafter.commit([output])
                drafter.leave([0])
        drafter.set_salt(salt)
        drafter.start([0], [text], None)
    assert draft_tokens(every, [5], greedy=True) == draft_tokens(own, [5], greedy=True)
