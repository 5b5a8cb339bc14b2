"""Predictions from measurements written by hand: speed-ups worked out without the code."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import pytest

from foretoken import theory
from foretoken.measurement.estimate import Estimate
from foretoken.measurement.plan import Plan, formula, plan, predictions
from foretoken.measurement.result import Measurement, parse
from measurements import document


def measured(*args: Any, **settings: Any) -> Measurement:
    return parse(document(*args, **settings), Measurement, "by hand")


def planned(*found: Measurement) -> Plan:
    return plan([(f"{i}.json", one) for i, one in enumerate(found)])


def test_by_hand():
    """Three tokens, draft tokens accepted with 1/2, c = 0.1, v = 1: cost(1) = 1, cost(2) = 1.1 +
    1/2.

    gamma 1: cost(3) = 1.1 + cost(2)/2 + cost(1)/2 = 2.4; gamma 2: 1.2 + cost(2)/2 + cost(1)/4 =
    2.25, so 3 / 2.25 = 4/3.
    """
    chosen = planned(measured([0.5, 0.5], 0.1, tokens=3, speedup=4 / 3))
    table = predictions(chosen.first.measurement)
    assert [one.speedup.value for one in table[:3]] == pytest.approx([1, 3 / 2.4, 4 / 3])
    assert chosen.gamma == 2 and chosen.first.best.speedup.value == pytest.approx(4 / 3)
    assert [one.tokens_per_call for one in table[:3]] == pytest.approx([1, 1.5, 1.75])


@pytest.mark.parametrize("alpha, c", [(0.8, 0.02), (0.6, 0.1), (0.3, 0.05)])
def test_draft_tokens_kept_alike_give_the_papers_formula(alpha, c):
    """Three positions measured, the others extrapolated: all are alpha^i."""
    v = [1 + 0.03 * n for n in range(16)]
    clock = theory.walltime_factor(alpha, 3, c, v=[0, *v], tokens=50)
    measurement = measured([alpha] * 3, c, alpha=alpha, passes=v, tokens=50, speedup=clock)
    expected = theory.optimal_gamma(alpha, c, v=[0, *v], max_gamma=15, tokens=50)
    assert planned(measurement).gamma == expected
    for one in predictions(measurement):
        factor = theory.walltime_factor(alpha, one.gamma, c, v=[0, *v], tokens=50)
        assert one.speedup.value == pytest.approx(factor, rel=1e-5)
        assert one.tokens_per_call == pytest.approx(
            theory.expected_tokens(alpha, one.gamma), rel=1e-5
        )


def test_other_work_counts():
    """Two tokens, gamma 1, always kept: 2 (1 + 0.5) / (1 + 0.25 + 0.75)."""
    measurement = measured([1.0], 0.25, tokens=2, overhead=(0.5, 0.75))
    assert formula(measurement) == pytest.approx(1.5)


def test_a_silent_draft_costs_what_it_drafts():
    """Offered in half of the steps: (pass(1) + pass(2)) / 2 and half a draft token, for 1.5 tokens.

    Two tokens: cost(2) = 1.5 + 0.05 + cost(1) / 2 = 2.05.
    """
    measurement = measured([0.5], 0.1, tokens=2, passes=[1.0, 2.0], offered=0.5)
    assert formula(measurement) == pytest.approx(2 / 2.05)


def test_beyond_the_measured_draft_tokens_a_silent_draft_stays_silent():
    """Two draft tokens at half of the steps, each kept with 1/2 where it is made: a third, made
    where the second is, gives 1/2 (1/2)^3 tokens more. alpha, which counts silence as 0, is 1/4."""
    content = document([0.25, 0.5], 0.0, alpha=0.25, tokens=50, offered=0.5) | {"silent": 0.5}
    two, three = predictions(parse(content, Measurement, "by hand"))[2:4]
    assert two.tokens_per_call == pytest.approx(1 + 1 / 4 + 1 / 8)
    assert three.tokens_per_call == pytest.approx(1 + 1 / 4 + 1 / 8 + 1 / 16)


def test_what_the_clock_said_is_what_is_predicted():
    """For the measured gamma, interval and all; for others in proportion to the formula."""
    clock = {"value": 1.2, "low": 1.05, "high": 1.4}
    by_formula = predictions(measured([0.5, 0.5], 0.1, tokens=3, speedup=4 / 3))
    content = document([0.5, 0.5], 0.1, tokens=3) | {"speedup": clock}
    table = predictions(parse(content, Measurement, "by hand"))
    plain, one, two, *_ = (prediction.speedup for prediction in table)
    assert asdict(two) == pytest.approx(clock)
    assert (plain.low, plain.value, plain.high) == (1, 1, 1)
    share = (3 / 2.4) / (4 / 3)  # as in the first test
    assert one.value == pytest.approx(1.2 * share)
    assert (one.low, one.high) == pytest.approx((1.05 * share, 1.4 * share))
    for before, after in zip(by_formula[1:], table[1:], strict=True):
        assert after.speedup.value == pytest.approx(before.speedup.value * 1.2 / (4 / 3))
        assert after.tokens_per_call == before.tokens_per_call


def test_passes_cost_what_they_did_in_the_runs():
    """Beside drafts a pass is slower than alone: pass(2) = 1.5 x 1.2 in the loop, pass(1) = 1.

    Two tokens, gamma 1: 2 / (0.1 + 1.8 + 0.5); gamma 2 has the same pass at its end, as gamma is
    cut to what is wanted less one."""
    measurement = measured([0.5], 0.1, passes=[1.0, 1.2, 1.4], tokens=2, beside=1.5)
    assert formula(measurement) == pytest.approx(2 / 2.4)
    one, two = (prediction.speedup.value for prediction in predictions(measurement)[1:])
    assert one == pytest.approx(measurement.speedup.value) and two == pytest.approx(one)


def test_errors_come_from_alpha_draft_time_and_the_clock():
    """Three tokens, against gamma 1 as measured: at gamma 2 each interval's ends by hand.

    With draft tokens accepted with s: cost(2) = 2 + g - s; cost(3) = (1 + g) + (1 - s) cost(2) + s
    at gamma 1, and (1 + 2 g) + (1 - s) cost(2) + s (1 - s) at gamma 2.
    """

    def share(s: float, g: float) -> float:
        two = 2 + g - s
        return ((1 + g) + (1 - s) * two + s) / ((1 + 2 * g) + (1 - s) * two + s * (1 - s))

    def predicted(found: dict[str, Any]) -> Estimate:
        return predictions(parse(found, Measurement, "by hand"))[2].speedup

    exact = predicted(document([0.8], 0.1, tokens=3))
    assert exact.error == pytest.approx(0) and exact.value == pytest.approx(1.5 * share(0.8, 0.1))
    by_alpha = predicted(document([0.8], 0.1, tokens=3, error=0.05))
    half = 1.5 * (share(0.85, 0.1) - share(0.75, 0.1)) / 2
    assert by_alpha.error == pytest.approx(half) and by_alpha.value == exact.value
    timed = document([0.8], 0.1, tokens=3, error=0.05)
    timed["draft_seconds"] |= {"q1": 0.08, "q3": 0.12}
    moved = 1.57 * 0.04 / 3
    also = 1.5 * (share(0.8, 0.1 - moved) - share(0.8, 0.1 + moved)) / 2
    assert predicted(timed).error == pytest.approx((half**2 + also**2) ** 0.5)
    timed["speedup"] = {"value": 1.5, "low": 1.4, "high": 1.6}
    clock = 0.1 * share(0.8, 0.1)
    assert predicted(timed).error == pytest.approx((half**2 + also**2 + clock**2) ** 0.5)


def test_errors_come_from_how_passes_grow():
    """Three tokens, draft tokens always accepted: cost(3) is pass(3) at gamma 2; at gamma 1, which
    was run, pass(2) + pass(1). If pass(2) alone was timed wrongly, pass(3) beside drafts is too,
    inversely.
    """
    content = document([1.0], 0.0, passes=[1.0, 1.2, 1.5], tokens=3)
    exact = predictions(parse(content, Measurement, "by hand"))[2].speedup
    assert exact.value == pytest.approx(1.5 * 2.2 / 1.5) and exact.error == pytest.approx(0)
    error = 1.57 * 0.3 / 3
    content["passes"][1] |= {"q1": 1.05, "q3": 1.35}
    two = predictions(parse(content, Measurement, "by hand"))[2].speedup
    ends = [1.5 * 2.2 / (1.5 * 1.2 / (1.2 + sign * error)) for sign in (1, -1)]
    assert two.value == exact.value and two.error == pytest.approx((ends[0] - ends[1]) / 2)


def test_errors_come_from_the_plain_pass():
    """As before, where the plain runs' pass(1) was 0.8 to 1.2: at gamma 1 it ends the text."""
    content = document([1.0], 0.0, passes=[1.0, 1.2, 1.5], tokens=3)
    step = content["prompts"][0]["plain"]["steps"][0]
    content["prompts"][0]["plain"]["steps"] = [[*step[:7], each] for each in (0.8, 1.0, 1.2)]
    two = predictions(parse(content, Measurement, "by hand"))[2].speedup
    error = 1.57 * 0.2 / 3**0.5
    assert two.error == pytest.approx(1.5 * 2 * error / 1.5 / 2)
