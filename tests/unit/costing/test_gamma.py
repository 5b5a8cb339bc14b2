"""Policies: what they ask for, from a row's own past; and automatic gamma on replayed texts."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import product
from statistics import fmean, stdev

import pytest

from foretoken.costing.costs import Costs, LongContextCosts
from foretoken.costing.gamma import (
    MAX_GAMMA,
    NO_OTHER_WORK,
    AcceptanceEstimate,
    AdaptiveGamma,
    FixedGamma,
    OtherWork,
    PredictionHistory,
    allot_gammas,
    choose_single_gamma,
    count_forced_tokens,
    make_cost_table,
)
from foretoken.records import StepRecord
from foretoken.request import Request, SequenceState
from foretoken.sampling.keys import SequenceKey
from foretoken.sampling.params import SamplingParams
from foretoken.theory import optimal_gamma
from scripts import benchmark

pytestmark = pytest.mark.daily

_script = benchmark("replay")
Oracle, Text, replay = _script.Oracle, _script.Text, _script.replay
_automatic = benchmark("automatic_gamma")
TOKENS, PRIOR = 256, (3.0, 0.8)
GAMMAS = (0, 1, 2, 3, 4, 6, 10, 16)


def costs(c: float, slope: float, hump: float = 0.0) -> Costs:
    """In passes of the target: a draft token, each further token, and the step from one to two."""
    score = ((1, 1.0), (2, 1 + slope + hump), (17, 1 + 16 * slope + hump))
    return Costs(((0, 0.0), (16, 16 * c)), score, ((1, 0.0),))


CHEAP, SMALL, DEAR, STOCK = (
    costs(0.01, 0.02),
    costs(0.12, 0.06),
    costs(0.3, 0.08),
    costs(0.03, 0.005, 0.6),
)


def record(asked: int, overlaps=(), drafted: int | None = None) -> StepRecord:
    drafted = asked if drafted is None else drafted
    accepted = sum(overlap == 1 for overlap in overlaps)
    kept = (1,) * (accepted + 1)
    return StepRecord(
        asked, (0,) * drafted, accepted, kept, tuple(overlaps), drafted, 0.0, 0.0, 0.0, 1
    )


def row(records: list[StepRecord], limit: int = 10**6) -> SequenceState:
    return SequenceState(Request([0], limit, SequenceKey(0, 0)), [0], records)


def judged(alpha: float, asked: int) -> StepRecord:
    return record(asked, [alpha] * max(1, round(asked * alpha)))


def text(alphas: list[float], span: int, seed: int, greedy: bool, decay: float = 1.0) -> Text:
    """Betas spread around an alpha that changes every `span` tokens."""
    dice, betas = random.Random(seed), []
    for i in range(TOKENS + 20):
        alpha = alphas[i // span % len(alphas)]
        betas.append(dice.betavariate(2 * alpha, 2 - 2 * alpha) if 0 < alpha < 1 else alpha)
    return Text(TOKENS, betas, [dice.random() for _ in betas], greedy, decay)


def past(records: list[StepRecord]) -> AcceptanceEstimate:
    estimate = AcceptanceEstimate(PRIOR)
    for step in records:
        estimate.add_step(step)
    return estimate


def seconds(policy, texts: list[Text], known: Costs) -> float:
    return fmean(replay(policy(t) if callable(policy) else policy, t, known)[0] for t in texts)


# The choice


def test_acceptance_is_learned_grade_by_grade():
    """A row whose short matches were wrong still copies behind long ones."""
    wrong, right = record(4, [0.0]), replace(judged(1.0, 4), grade=1)
    one = row([wrong, right] * 20)
    policy = AdaptiveGamma(SMALL, priors=((6.0, 0.5), (6.0, 0.5)))
    for grade, drafts in ((0, False), (1, True), (0, False)):
        one.grade = grade
        assert (policy.choose_gammas([one])[0] > 1) == drafts
        one.records.append(replace(right if drafts else record(0), grade=grade))


@pytest.mark.parametrize("alpha", [0.5, 0.7, 0.8, 0.9])
@pytest.mark.parametrize(("c", "slope"), [(0.01, 0.0), (0.05, 0.04), (0.2, 0.1)])
def test_after_much_of_the_same_it_is_the_theorems_optimum(alpha, c, slope):
    priced = costs(c, slope)
    past = [judged(alpha, MAX_GAMMA)] * 100
    wanted = optimal_gamma(alpha, c, v=lambda n: 1 + slope * (n - 1), max_gamma=MAX_GAMMA)
    assert AdaptiveGamma(priced).choose_gammas([row(past)]) == [wanted]


def test_it_stays_with_a_size_that_another_gains_less_on_than_the_change_costs():
    priced = costs(0.05, 0.04)
    wanted = {
        AdaptiveGamma(priced).choose_gammas([row([judged(alpha, 8)] * 60)])[0]
        for alpha in (0.7, 0.74)
    }
    assert len(wanted) == 2
    steps = [judged(0.7, min(wanted))] * 60 + [judged(0.74, min(wanted))] * 60
    for change, gamma in ((0.0, max(wanted)), (1.0, min(wanted))):
        sticky = AdaptiveGamma(replace(priced, change=change))
        assert sticky.choose_gammas([row(steps[:60])]) == [min(wanted)]
        assert sticky.choose_gammas([row(steps)]) == [gamma]
        assert sticky.choose_gammas([row([judged(1.0, 8)] * 60)]) == [MAX_GAMMA]  # worth any change


def test_never_more_than_there_is_room_for():
    for room in range(1, 8):
        (gamma,) = AdaptiveGamma(CHEAP).choose_gammas([row([judged(1.0, 16)] * 9, limit=room)])
        assert gamma == room - 1


def test_what_lies_behind_a_rejection_does_not_count():
    """Censored: a draft of 8 rejected at once says of the first place what a draft of 1 says."""
    long, short = [record(8, [0.3])] * 20, [record(1, [0.3])] * 20
    assert past(long).survival == past(short).survival


def test_places_in_a_draft_are_told_apart():
    falling = [record(4, [0.9, 0.6, 0.3, 0.1])] * 60
    survival = past(falling).survival
    chances = [b / a for a, b in zip([1.0, *survival], survival, strict=False)]
    for chance, seen in zip(chances, (0.9, 0.6, 0.3, 0.1), strict=False):
        assert chance == pytest.approx(seen, abs=0.2)  # each leans on the place before it
    assert chances[:5] == sorted(chances[:5], reverse=True)


def test_a_draft_that_stays_silent_costs_nothing_and_is_asked_again():
    silent = [record(8, drafted=0)] * 60
    assert past(silent).answer_rate < 0.1
    assert AdaptiveGamma(SMALL).choose_gammas([row(silent)])[0] > 0


def test_only_the_recent_past_counts():
    """So a step's work does not grow with the text, and is the same whatever came before."""
    recent = [judged(0.7, 4)] * 256
    for before in (0.0, 1.0):
        old = [judged(before, 4)] * 300
        assert AdaptiveGamma(SMALL).choose_gammas([row(old + recent)]) == AdaptiveGamma(
            SMALL
        ).choose_gammas([row(recent)])


def test_what_was_learned_is_the_rows_alone():
    """A policy that went on with its row, one that meets the row late, and one that was lent to
    another in between ask for the same."""
    records = [judged(0.9, 6)] * 3 + [record(5, [0.2])] * 4 + [judged(0.6, 3)] * 3
    grown, went_on = row([]), AdaptiveGamma(SMALL)
    for step in records:
        went_on.choose_gammas([grown])
        grown.records.append(step)
    lent = AdaptiveGamma(SMALL)
    lent.choose_gammas([row(records[:5])])
    lent.choose_gammas([row([judged(0.1, 3)] * 9), row([])])
    asked = went_on.choose_gammas([grown])
    assert (
        asked
        == AdaptiveGamma(SMALL).choose_gammas([row(records)])
        == lent.choose_gammas([row(records)])
    )


def expected(kept: list[list[float]], gamma: tuple[int, ...], known: Costs) -> float:
    """Tokens a second of rows whose first i draft tokens are kept with these chances."""
    rows, depth = len(gamma), max(gamma)
    tokens = rows + sum(sum(row[:g]) for row, g in zip(kept, gamma, strict=True))
    n = rows + sum(gamma)
    return tokens / float(known.draft_seconds(depth, sum(gamma), rows) + known.target_seconds(n, n))


@pytest.mark.parametrize("seed", range(12))
def test_no_other_allotment_gains_more(seed):
    """Of all for three rows of up to four guesses, at random costs."""
    dice = random.Random(seed)
    steps = sorted(dice.uniform(1, 4) for _ in range(5))
    score = tuple(zip((1, 3, 5, 9, 15), steps, strict=True))
    draft = ((0, 0.0), (4, dice.uniform(0, 1)))
    priced = Costs(draft, score, ((1, 0.0), (15, 0.1)), ((1, 1.0), (4, dice.uniform(1, 3))))
    pasts = [past([judged(dice.random(), 4)] * 30) for _ in range(3)]
    chosen = allot_gammas(pasts, [4] * 3, make_cost_table(priced, 3))
    kept = [each.survival for each in pasts]
    rates = {g: expected(kept, g, priced) for g in product(range(5), repeat=3)}
    assert rates[tuple(chosen)] == pytest.approx(max(rates.values()), rel=1e-12)


def test_a_row_alone_gets_what_it_would_get_among_others():
    for seed in range(20):
        dice = random.Random(seed)
        rising = sorted(1 + dice.random() for _ in range(17))
        score, change = tuple(enumerate(rising, 1)), dice.random()
        priced = Costs(((0, 0.0), (16, dice.uniform(0, 3))), score, ((1, 0.1),), change=change)
        own = past([judged(dice.random(), 4) for _ in range(9)] + [record(3, drafted=0)] * 2)
        for last, most in product((0, 1, 4, 8), (0, 3, 16)):
            together = allot_gammas([own], [most], make_cost_table(priced, 1), last)
            assert together == [choose_single_gamma(own, most, make_cost_table(priced, 1), last)]


def test_a_pass_that_reads_prompts_has_room_for_fewer_draft_tokens():
    priced = Costs(((0, 0.0), (16, 0.2)), ((1, 1.0), (16, 1.1), (32, 9.0)), ((1, 0.0),))
    good = row([judged(0.95, 8)] * 30)
    assert AdaptiveGamma(priced).choose_gammas([good], OtherWork(positions=12)) == [3]
    assert AdaptiveGamma(priced).choose_gammas([good]) == [15]


def test_reading_prompts_makes_no_draft_token_cheap():
    """Beside what reading takes, any would: but it has to be done with and without them."""
    steady = Costs(((0, 0.0), (16, 0.0)), ((1, 10.0), (2, 11.0), (200, 209.0)), ((1, 0.0),))
    bad = row([record(2, [0.05])] * 30)
    assert AdaptiveGamma(steady).choose_gammas([bad]) == [0]
    assert AdaptiveGamma(steady).choose_gammas(
        [bad], OtherWork(positions=100, prefill_positions=100)
    ) == [0]
    assert AdaptiveGamma(steady).choose_gammas(
        [bad, bad], OtherWork(positions=100, prefill_positions=100)
    ) == [0, 0]
    assert AdaptiveGamma(steady).choose_gammas([bad], OtherWork(positions=100)) != [
        0
    ]  # as if part of every step
    good = row([judged(0.95, 8)] * 30)
    assert AdaptiveGamma(steady).choose_gammas(
        [good], OtherWork(positions=100, prefill_positions=100)
    ) > [4]


def test_rows_of_fixed_draft_tokens_have_paid_for_the_drafts_passes():
    priced = Costs(((0, 0.0), (16, 16.0)), ((1, 1.0),), ((1, 0.0),))
    keen = row([judged(0.9, 8)] * 30)
    assert AdaptiveGamma(priced).choose_gammas([keen], OtherWork(1, 5, 0)) == [0]
    assert AdaptiveGamma(priced).choose_gammas([keen], OtherWork(1, 5, 4)) == [4]


# Replays: nothing here is left to chance, the dice are seeded


@pytest.mark.daily("small")
@pytest.mark.parametrize("known", [CHEAP, SMALL, DEAR, STOCK], ids=["cheap", "small", "dear", "v2"])
def test_useless_draft_tokens_cost_at_most_2_percent(known):
    for alpha, greedy in product((0.0, 0.02), (False, True)):
        texts = [text([alpha], 1, seed, greedy) for seed in range(4)]
        plain = seconds(FixedGamma(0), texts, known)
        assert plain / seconds(AdaptiveGamma(known), texts, known) >= 0.98


@pytest.mark.prove
@pytest.mark.parametrize("greedy", [False, True], ids=["overlaps", "outcomes"])
@pytest.mark.parametrize(
    ("alphas", "span", "decay"),
    [
        ([0.2], 1, 1.0),
        ([0.5], 1, 1.0),
        ([0.8], 1, 1.0),
        ([0.95], 1, 1.0),
        ([0.9, 0.1], 30, 1.0),
        ([0.85], 1, 0.94),
    ],
    ids=["0.2", "0.5", "0.8", "0.95", "switching", "decaying"],
)
def test_as_good_as_the_best_fixed_gamma_from_a_cold_start(alphas, span, decay, greedy):
    """Averages over four kinds of costs, each 0.94 or more: fewer texts than the benchmark has."""
    ratios = []
    for priced in (CHEAP, SMALL, DEAR, STOCK):
        texts = [text(alphas, span, seed, greedy, decay) for seed in range(6)]
        fixed = min(seconds(FixedGamma(g), texts, priced) for g in GAMMAS)
        ratios.append(fixed / seconds(AdaptiveGamma(priced), texts, priced))
    assert fmean(ratios) >= 0.97 and min(ratios) >= 0.94


@pytest.mark.daily("small")
@pytest.mark.parametrize("known", [CHEAP, SMALL, DEAR, STOCK], ids=["cheap", "small", "dear", "v2"])
def test_text_that_becomes_predictable_is_found(known):
    texts = [text([0.02, 0.9], TOKENS // 2, seed, greedy=True) for seed in range(4)]
    fixed = min(seconds(FixedGamma(g), texts, known) for g in GAMMAS)
    assert fixed / seconds(AdaptiveGamma(known), texts, known) > 1.05


@pytest.mark.parametrize("greedy", [False, True], ids=["overlaps", "outcomes"])
@pytest.mark.parametrize("alpha", [0.3, 0.8])
def test_a_batch_whose_passes_are_padded_is_nearly_as_fast_as_with_the_best_fixed_gamma(
    alpha, greedy
):
    """By the costs of passes without padding, it has 0.82 and 0.91 of that speed."""
    raced = _automatic.replay_padded(16, alpha, greedy, slope=0.01, c=0.15)
    assert raced["against_best"] >= 0.94


def test_a_draft_token_is_free_up_to_the_longest_draft_of_a_padded_pass() -> None:
    def padded(batch_size: int, width: int) -> int:
        return batch_size * (5 if 2 < width < 6 else width)

    good, poor = past([judged(0.9, 8)] * 30), past([record(1, [0.2])] * 30)
    priced = Costs(((0, 0.0), (16, 0.0)), ((2, 1.0), (10, 1.8), (12, 9.0)), ((1, 0.0),))
    assert allot_gammas([good, poor], [9, 9], make_cost_table(priced, 2))[1] == 0
    table = make_cost_table(priced, 2, NO_OTHER_WORK, padded)
    assert allot_gammas([good, poor], [9, 9], table) == [4, 4]


def test_a_deterministic_row_knows_no_others() -> None:
    """Its gamma is what it would be alone, by the costs of one row."""
    alone, shared = CHEAP, replace(CHEAP, score=((1, 1.0), (100, 100.0)))
    params = SamplingParams(1.0, deterministic=True)
    rows = [
        SequenceState.from_request(Request([1], 99, SequenceKey(0, b), params=params))
        for b in range(3)
    ]
    (expected,) = AdaptiveGamma(alone).choose_gammas(rows[:1])
    assert expected > 0
    assert AdaptiveGamma(shared, alone).choose_gammas(rows) == [expected] * 3
    free = [SequenceState.from_request(Request([1], 99, SequenceKey(0, b))) for b in range(3)]
    assert AdaptiveGamma(shared, alone).choose_gammas(free) != [expected] * 3


# What requests predict


def expecting(records: list[StepRecord], limit: int = 10**6) -> SequenceState:
    """A row whose prediction goes on behind its text, which is empty."""
    state = SequenceState.from_request(Request([0], limit, SequenceKey(0, 0), prediction=(1,) * 40))
    state.records = records
    return state


def test_what_is_predicted_costs_no_draft_and_is_expected_to_be_right():
    useless = [record(4, [0.0])] * 50  # of the draft
    dear = costs(2.0, 0.02)
    assert AdaptiveGamma(dear).choose_gammas([row(useless), expecting(useless)])[0] == 0
    assert AdaptiveGamma(dear).choose_gammas([row(useless), expecting(useless)])[1] > 4
    assert AdaptiveGamma(CHEAP).choose_gammas([expecting([])]) == AdaptiveGamma(
        CHEAP.without_draft_seconds
    ).choose_gammas([expecting([])])


class Ones:
    """Predicts that every next token is 1, with the confidence `grade` of two."""

    priors = ((4.0, 0.5), (4.0, 0.5))

    def __init__(self, grade: int = 1) -> None:
        self.grade = grade

    def predict_next(self, new_tokens: list[int], max_tokens: int) -> list[int]:
        return [1] * max_tokens


def steps_of(*new_tokens: list[int]) -> list[StepRecord]:
    """Plain steps or not, of these new tokens."""
    return [replace(record(0), new_tokens=tuple(tokens)) for tokens in new_tokens]


def predicting(new_tokens: list[int], records: list[StepRecord], grade: int = 1) -> SequenceState:
    """A row whose predictions were compared with `new_tokens`, before the steps in `records`."""
    before = [replace(step, grade=9) for step in steps_of(*([token] for token in new_tokens))]
    one = row(before + [replace(step, new_tokens=()) for step in records])
    one.tokens, one.output_predictor = [0, *new_tokens], Ones(grade)
    return one


RIGHT, WRONG = [1] * 40, [2] * 40
GOOD, BAD = [judged(0.95, 8)] * 40, [record(8, [0.0])] * 40


def test_the_better_of_prediction_and_draft_guesses_whichever_guessed_before():
    for tokens, records, trusts in ((WRONG, GOOD, False), (RIGHT, BAD, True), (RIGHT, GOOD, True)):
        one = predicting(tokens, records)
        asked = AdaptiveGamma(SMALL).choose_gammas([one])
        assert one.uses_prediction == trusts
        assert trusts or asked == AdaptiveGamma(SMALL).choose_gammas([row(records)])
    one = predicting(WRONG, BAD)  # without a drafter there is nothing else to trust
    assert AdaptiveGamma(SMALL, drafts=False).choose_gammas([one]) == [0] and one.uses_prediction


def test_a_prediction_of_low_grade_replaces_only_a_draft_that_does_not_pay():
    for grade, records, trusts in ((0, GOOD, False), (1, GOOD, True), (0, BAD, True)):
        one = predicting(RIGHT, records, grade)
        AdaptiveGamma(SMALL).choose_gammas([one])
        assert one.uses_prediction == trusts


def compared(*new_tokens: list[int]) -> list[float]:
    """P(the first i predicted tokens are right), after steps of these new tokens."""
    history, tokens = PredictionHistory(Ones()), [token for each in new_tokens for token in each]
    history.add_new_steps(steps_of(*new_tokens), tokens)
    return history.next_estimate.survival


def test_predictions_are_compared_with_every_token_up_to_the_first_that_differs():
    one, two, three = compared(*[[1, 1, 2]] * 60)[:3]
    assert one > 0.8 and two > 0.8 and three < 0.4
    assert compared(*[[1], [1], [2]] * 60)[0] == pytest.approx(2 / 3, abs=0.1)
    assert compared([1, 1, 2] * 60) == pytest.approx(compared(*[[1, 1, 2]] * 60))
    late, tokens = PredictionHistory(Ones()), [1, 1, 2, 1]
    for n in range(4):  # a policy that is asked in every step, and one that is asked at the end
        late.add_new_steps(steps_of([1], [1], [2], [1])[: n + 1], tokens[: n + 1])
    assert late.next_estimate.survival == compared([1], [1], [2], [1])


@pytest.mark.parametrize("alpha", [0.3, 0.8])
def test_what_predictions_are_worth_does_not_depend_on_the_steps(alpha):
    """Right with chance alpha, whatever the steps' lengths: the mean of many estimates is off by
    five standard errors for one seed in two million."""
    dice, found = random.Random(0), list[float]()
    for _ in range(400):
        steps = [[int(dice.random() < alpha)] for _ in range(60)]
        for step in steps:
            step += [int(dice.random() < alpha) for _ in range(dice.choice((0, 1, 4)))]
        found.append(compared(*steps)[0])
    prior = 0.02  # a share of its weight never decays
    assert fmean(found) == pytest.approx(alpha, abs=5 * stdev(found) / len(found) ** 0.5 + prior)


def test_predictions_are_never_tried_only_to_see_them():
    plain = [record(0)] * 2000
    one = predicting([2] * 200, plain)
    assert AdaptiveGamma(SMALL, drafts=False).choose_gammas([one]) == [0]
    assert AdaptiveGamma(SMALL).choose_gammas([one])[0] > 0  # the drafter is
    assert not one.uses_prediction


# Several drafters

TWO = ((replace(SMALL, prior=(10.0, 0.8)),) * 2, (replace(DEAR, prior=(10.0, 0.9)),) * 2)


def of(grade: int, step: StepRecord) -> StepRecord:
    return replace(step, grade=grade)


def test_the_drafter_that_is_the_fastest_drafts():
    for records, best in (
        ([], 0),
        ([of(0, record(4, [0.0]))] * 30, 1),
        ([of(0, record(4, [0.0]))] * 30 + [of(1, record(4, [0.0]))] * 30, 0),
        ([of(1, judged(1.0, 8))] * 30 + [of(0, judged(0.3, 3))] * 30, 1),
    ):
        one = row(records)
        policy = AdaptiveGamma(SMALL, alternatives=TWO)
        (gamma,) = policy.choose_gammas([one])
        costs_of_best = TWO[best][0]
        own = AdaptiveGamma(costs_of_best, priors=(TWO[0][0].prior, TWO[1][0].prior))
        assert one.grade == best and [gamma] == own.choose_gammas([one])


def test_sequences_of_several_drafters_share_a_pass():
    one, other = row([of(1, record(4, [0.0]))] * 30), row([of(0, record(4, [0.0]))] * 30)
    gammas = AdaptiveGamma(SMALL, alternatives=TWO).choose_gammas([one, other])
    assert (one.grade, other.grade) == (0, 1) and min(gammas) > 0


def test_another_drafter_is_tried_for_little_of_the_time():
    """First one is right in four steps of five and the other never, then the other way round."""
    policy, one = AdaptiveGamma(SMALL, alternatives=TWO), row([])
    for good in (0, 1):
        for i in range(2000):
            (gamma,) = policy.choose_gammas([one])
            right = one.grade == good and i % 5 > 0
            one.records.append(of(one.grade, record(gamma, [float(right)] * max(1, gamma * right))))
        taken, made = [0.0, 0.0], [0, 0]
        for step in one.records[-1000:]:
            taken[step.grade] += TWO[step.grade][0].step_seconds(step.gamma)
            made[step.grade] += 1 + step.accepted
        lost = taken[1 - good] - made[1 - good] * taken[good] / made[good]
        assert 0 < lost < 0.02 * sum(taken)


def test_several_drafters_that_do_not_pay_cost_a_hundredth():
    policy, one, seconds_taken = AdaptiveGamma(DEAR, alternatives=TWO), row([]), 0.0
    for _ in range(4000):
        (gamma,) = policy.choose_gammas([one])
        one.records.append(of(one.grade, record(gamma, [0.0] * (gamma > 0))))
        seconds_taken += TWO[one.grade][0].step_seconds(gamma)
    assert {step.grade for step in one.records[-1000:] if step.drafted} == {0, 1}
    assert 4000 / seconds_taken > 0.98


def test_predictions_know_no_room_beyond_the_rows_end_and_deterministic_rows_no_others():
    right = [replace(judged(1.0, 8), predicted=True)] * 40
    assert AdaptiveGamma(CHEAP).choose_gammas([expecting(right, limit=5)]) == [4]
    sure = expecting(right)
    sampling = SamplingParams(deterministic=True)
    sure.request = replace(sure.request, params=sampling)
    crowd = [row([judged(0.9, 8)] * 40) for _ in range(9)]
    assert (
        AdaptiveGamma(STOCK).choose_gammas([*crowd, sure])[-1]
        == AdaptiveGamma(STOCK).choose_gammas([sure])[0]
    )


def test_a_policy_asked_before_answers_as_a_new_one():
    """What it keeps of the last answer is asked for by all that a price depends on."""
    far = LongContextCosts(1024, ((0, 0.0), (16, 8.0)), ((1, 3.0), (17, 40.0)))
    priced, alone = replace(SMALL, far=far), costs(0.3, 0.05)
    old = AdaptiveGamma(priced, alone)
    near, long = row([judged(0.9, 8)] * 20), row([judged(0.9, 8)] * 20)
    long.tokens *= 900
    own = SequenceState(
        replace(near.request, params=SamplingParams(deterministic=True)), [0], near.records
    )
    asked = [[near], [long], [near, long], [own], [near]]
    for beside in (NO_OTHER_WORK, OtherWork(3, 40, 2)):
        answers = [AdaptiveGamma(priced, alone).choose_gammas(rows, beside) for rows in asked]
        assert [old.choose_gammas(rows, beside) for rows in asked] == answers
        assert len({str(answer) for answer in answers}) > 2


def test_forced_tokens_are_free_while_the_target_spells_them_so(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(SequenceState, "find_forced_tokens", lambda row, most: [7] * min(most, 5))
    params = SamplingParams(structured={"regex": "a"})
    state = SequenceState.from_request(Request([0], 99, SequenceKey(0, 0), params=params))
    assert (
        count_forced_tokens(state) == 5 and count_forced_tokens(row([])) == 0
    )  # the other has no grammar
    alike = replace(record(5, [1.0] * 5), predicted=True)
    otherwise = replace(record(5, [0.0]), predicted=True)
    state.records[:] = [alike] * 3
    assert count_forced_tokens(state) == 5
    state.records[:] = [otherwise] * 3
    assert count_forced_tokens(state) == 0
    state.records += [record(0)] * 32  # it is tried again
    assert count_forced_tokens(state) == 5
    state.tokens += [1] * 97
    assert state.num_remaining == 2 and count_forced_tokens(state) == 1
