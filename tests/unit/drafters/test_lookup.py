"""Copy from context: what is found, how far it is copied, and which row it belongs to."""

from foretoken.drafters.base import Draw
from foretoken.drafters.lookup import MAX_CONTINUATIONS, LookupDrafter, RepeatPrediction
from foretoken.request import Request
from foretoken.sampling.acceptance_rules import block
from foretoken.sampling.distributions import SamplingParams
from foretoken.sampling.draw import LenientDraw, SharedDraw
from foretoken.sampling.keys import SequenceKey
from foretoken.sampling.verifier import make_verifier


def propose(drafter, gamma, temperature=1.0, coupled=False):
    keys = [SequenceKey(0, b) for b in range(len(gamma))]
    kind = SharedDraw if coupled else Draw
    draw = kind(keys, [9] * len(gamma), [SamplingParams(temperature)] * len(gamma))
    draft = drafter.propose(gamma, draw)
    assert draft.q is None and draft.calls == 0
    pairs = zip(draft.tokens.tolist(), draft.lengths.tolist(), strict=True)
    return [ids[:n] for ids, n in pairs]


def draft_tokens(prompt, gamma, source=None):
    drafter = LookupDrafter()
    drafter.start([0], [prompt], None if source is None else [source])
    return propose(drafter, [gamma])[0]


def test_of_very_many_ways_those_that_came_first_are_weighed():
    """So that a call stays quick behind a word that everything follows."""
    hub = [x for token in range(1, MAX_CONTINUATIONS + 1) for x in (0, token)]
    late, early = [0, MAX_CONTINUATIONS + 1] * 2, [0, MAX_CONTINUATIONS] * 80
    assert draft_tokens([*hub, *late * 40, 999, 0], 1) == []
    assert draft_tokens([*hub, *early, 999, 0], 1) == [MAX_CONTINUATIONS]


def test_draft_tokens_end_where_they_are_unlikely():
    """Behind a match of n tokens that was seen once, so far that n/(n + guesses) is a tenth; of
    thirteen tokens that followed as often, none is guessed."""
    assert len(draft_tokens([50, *range(1, 30), 50], 20)) in (8, 9)
    assert len(draft_tokens([50, 51, *range(1, 30), 50, 51], 20)) in (17, 18)
    several = [x for token in range(1, 14) for x in (50, token)]
    assert draft_tokens([*several, 50], 20) == []


def repeats(prompt: list[int], source: list[int] | None = None) -> RepeatPrediction:
    return RepeatPrediction(Request(prompt, 50, SequenceKey(0, 0), source=source))


def test_repeats_say_what_followed_the_last_tokens_and_how_many_agreed():
    four = [5, 6, 7, 8]
    for agree, grade in ((1, 0), (2, 0), (3, 1), (4, 1)):
        text = repeats([*four, 9, 3, *four[4 - agree :]])
        assert text.predict_next([], 2) == [9, 3] and text.grade == grade
    assert repeats([5], [*four, 1]).predict_next(four[1:], 4) == [1]
    text = repeats([*four, 9, 3])
    for new, guesses_expected in (
        ([], []),
        (four, [9, 3]),
        ([*four, 9], [3, 5]),
        ([4], []),
        (four, [9, 3]),
    ):
        assert text.predict_next(new, 2) == guesses_expected  # a function of the text alone


def said(drafter, salt, tokens):
    """A row says this and leaves."""
    drafter.set_salt(salt)
    drafter.start([0], [[]], None)
    drafter.commit([tokens])
    drafter.leave([0])


def asked(drafter, salt, prompt, **options):
    """What follows a prompt of this salt."""
    drafter.set_salt(salt)
    drafter.start([0], [prompt], None)
    found = propose(drafter, [3], **options)[0]
    drafter.seqs.clear()
    return found


def test_earlier_outputs_of_the_same_salt_are_searched():
    drafter = LookupDrafter()
    drafter.set_prefix_caching(True)
    said(drafter, "a", [1, 2, 3, 4])
    said(drafter, "b", [1, 2, 5])
    assert asked(drafter, "a", [9, 1, 2], temperature=0.0) == [3, 4]
    assert asked(drafter, "b", [9, 1, 2], temperature=0.0) == [5]
    assert asked(drafter, "", [9, 1, 2], temperature=0.0) == []
    drafter.set_prefix_caching(False)
    assert asked(drafter, "a", [9, 1, 2], temperature=0.0) == []


def test_the_grade_says_how_long_the_match_is():
    texts = {0: [1, 2, 3], 1: [8, 1, 2, 9, 1, 2], 2: [1, 2, 3, 9, 1, 2, 3]}
    drafter = LookupDrafter()
    drafter.start([*texts], [*texts.values()], None)
    assert drafter.predict_grades() == [*texts]
    drafter.commit([[1], [7], []])
    assert drafter.predict_grades() == [1, 0, 2] and len(drafter.priors) == 3


def test_only_rows_that_may_copy_from_earlier_outputs_are_graded_by_them():
    drafter = LookupDrafter()
    drafter.set_prefix_caching(True)
    drafter.start([0], [[1]], None)
    drafter.commit([[5, 6, 7, 8]])
    drafter.leave([0])
    drafter.start([0], [[4, 5, 6, 7]], None)
    for temperature, grade in ((1.0, 0), (0.0, 2)):
        propose(drafter, [0], temperature)
        assert drafter.predict_grades() == [grade]


def test_a_lenient_greedy_text_depends_on_draft_tokens_so_nothing_earlier_is_searched():
    drafter = LookupDrafter()
    drafter.set_prefix_caching(True)
    said(drafter, "", [1, 2, 3, 4])
    drafter.start([0], [[9, 1, 2]], None)
    for draws, drafted in ((LenientDraw, []), (Draw, [3, 4])):
        draw = draws([SequenceKey(0, 0)], [3], [SamplingParams()])
        draft = drafter.propose([2], draw)
        assert draft.tokens[0, : int(draft.lengths[0])].tolist() == drafted
    assert (
        make_verifier(block, lenience=0.5).draw_class is LenientDraw
        and make_verifier(block).draw_class is Draw
    )


def test_prompts_of_others_are_not_searched():
    drafter = LookupDrafter()
    drafter.set_prefix_caching(True)
    drafter.start([0], [[1, 2, 3]], None)
    drafter.commit([[7, 8]])
    drafter.leave([0])
    assert asked(drafter, "", [1, 2], temperature=0.0) == []
    assert asked(drafter, "", [7], temperature=0.0) == [8]


def test_what_is_likelier_wins_and_the_text_itself_where_they_are_alike():
    drafter = LookupDrafter()
    drafter.set_prefix_caching(True)
    said(drafter, "", [1, 2, 3, 4, 5])
    assert asked(drafter, "", [1, 2, 6, 7, 8, 1, 2], temperature=0.0) == [6, 7, 8]
    assert asked(drafter, "", [2, 6, 7, 8, 1, 2], temperature=0.0) == [3, 4, 5]


def test_a_text_that_depends_on_its_draft_tokens_gets_none_of_others():
    """Else a seed would give another text after other requests."""
    drafter = LookupDrafter()
    drafter.set_prefix_caching(True)
    said(drafter, "", [1, 2, 3, 4])
    assert asked(drafter, "", [1, 2], temperature=1.0) == []
    assert asked(drafter, "", [1, 2], temperature=1.0, coupled=True) == [3, 4]
