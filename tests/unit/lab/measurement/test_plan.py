"""Plans from measurements written by hand: gammas and speed-ups worked out without the code."""

from __future__ import annotations

import shlex
from dataclasses import asdict
from typing import Any

import pytest

from foretoken import theory
from foretoken.errors import InputError
from foretoken.lab.estimate import Estimate
from foretoken.lab.measurement.plan import Plan, plan, speculative_config
from foretoken.lab.measurement.prediction import best, formula, predictions
from foretoken.lab.measurement.result import Measurement, parse
from measurements import document


def measured(*args: Any, **settings: Any) -> Measurement:
    return parse(document(*args, **settings), Measurement, "by hand")


def planned(*found: Measurement) -> Plan:
    return plan([(f"{i}.json", one) for i, one in enumerate(found)])


def test_by_hand():
    """Three tokens, guesses kept with 1/2, c = 0.1, v = 1: cost(1) = 1, cost(2) = 1.1 + 1/2.

    gamma 1: cost(3) = 1.1 + cost(2)/2 + cost(1)/2 = 2.4; gamma 2: 1.2 + cost(2)/2 + cost(1)/4 =
    2.25, so 3 / 2.25 = 4/3.
    """
    found = planned(measured([0.5, 0.5], 0.1, tokens=3, speedup=4 / 3))
    table = predictions(found.first.measurement)
    assert [one.speedup.value for one in table[:3]] == pytest.approx([1, 3 / 2.4, 4 / 3])
    assert found.gamma == 2 and found.first.best.speedup.value == pytest.approx(4 / 3)
    assert [one.tokens_per_call for one in table[:3]] == pytest.approx([1, 1.5, 1.75])


@pytest.mark.parametrize("alpha, c", [(0.8, 0.02), (0.6, 0.1), (0.3, 0.05)])
def test_guesses_kept_alike_give_the_papers_formula(alpha, c):
    """Three positions measured, the others extrapolated: all are alpha^i."""
    v = [1 + 0.03 * n for n in range(16)]
    clock = theory.walltime_factor(alpha, 3, c, v=[0, *v], tokens=50)
    found = measured([alpha] * 3, c, alpha=alpha, passes=v, tokens=50, speedup=clock)
    expected = theory.optimal_gamma(alpha, c, v=[0, *v], max_gamma=15, tokens=50)
    assert planned(found).gamma == expected
    for one in predictions(found):
        factor = theory.walltime_factor(alpha, one.gamma, c, v=[0, *v], tokens=50)
        assert one.speedup.value == pytest.approx(factor, rel=1e-5)
        assert one.tokens_per_call == pytest.approx(
            theory.expected_tokens(alpha, one.gamma), rel=1e-5
        )


def test_do_not_speculate():
    found = planned(measured([0.1], 0.5, speedup=0.73))
    assert found.gamma == 0 and found.vllm is None
    assert found.first.best.gamma == 1 and found.first.best.speedup.value < 1
    assert shlex.split(found.command)[-2:] == ["--gamma", "0"]


def test_other_work_counts():
    """Two tokens, gamma 1, always kept: 2 (1 + 0.5) / (1 + 0.25 + 0.75)."""
    found = measured([1.0], 0.25, tokens=2, overhead=(0.5, 0.75))
    assert formula(found) == pytest.approx(1.5)


def test_a_silent_draft_costs_what_it_drafts():
    """Offered in half of the steps: (pass(1) + pass(2)) / 2 and half a guess, for 1.5 tokens.

    Two tokens: cost(2) = 1.5 + 0.05 + cost(1) / 2 = 2.05.
    """
    found = measured([0.5], 0.1, tokens=2, passes=[1.0, 2.0], offered=0.5)
    assert formula(found) == pytest.approx(2 / 2.05)


def test_what_the_clock_said_is_what_is_predicted():
    """For the measured gamma, interval and all; for others in proportion to the formula."""
    clock = {"value": 1.2, "low": 1.05, "high": 1.4}
    by_formula = predictions(measured([0.5, 0.5], 0.1, tokens=3, speedup=4 / 3))
    found = document([0.5, 0.5], 0.1, tokens=3) | {"speedup": clock}
    table = predictions(parse(found, Measurement, "by hand"))
    plain, one, two, *_ = (prediction.speedup for prediction in table)
    assert asdict(two) == pytest.approx(clock)
    assert (plain.low, plain.value, plain.high) == (1, 1, 1)
    share = (3 / 2.4) / (4 / 3)  # as in the first test
    assert one.value == pytest.approx(1.2 * share)
    assert (one.low, one.high) == pytest.approx((1.05 * share, 1.4 * share))
    for before, after in zip(by_formula[1:], table[1:], strict=True):
        assert after.speedup.value == pytest.approx(before.speedup.value * 1.2 / (4 / 3))
        assert after.tokens_per_call == before.tokens_per_call


def test_a_plan_promises_no_more_than_was_measured():
    found = planned(measured([0.5, 0.5], 0.1, tokens=3, speedup=0.9))
    assert found.gamma == 0 and found.first.best.gamma == 2
    assert found.first.best.speedup.value == pytest.approx(0.9)
    slow = measured([0.8], 0.1, draft="slow", speedup=1.1)  # the same costs, another clock
    fast = measured([0.8], 0.1, draft="fast", speedup=1.2)
    assert planned(slow, fast).first.draft == "fast"


def test_passes_cost_what_they_did_in_the_runs():
    """Beside drafts a pass is slower than alone: pass(2) = 1.5 x 1.2 in the loop, pass(1) = 1.

    Two tokens, gamma 1: 2 / (0.1 + 1.8 + 0.5); gamma 2 has the same pass at its end, as gamma is
    cut to what is wanted less one."""
    found = measured([0.5], 0.1, passes=[1.0, 1.2, 1.4], tokens=2, beside=1.5)
    assert formula(found) == pytest.approx(2 / 2.4)
    one, two = (prediction.speedup.value for prediction in predictions(found)[1:])
    assert one == pytest.approx(found.speedup.value) and two == pytest.approx(one)


def test_errors_come_from_alpha_guess_and_passes():
    """Three tokens, against gamma 1 as measured: at gamma 2 each interval's ends by hand.

    With guesses kept with s: cost(2) = 2 + g - s; cost(3) = (1 + g) + (1 - s) cost(2) + s at
    gamma 1, and (1 + 2 g) + (1 - s) cost(2) + s (1 - s) at gamma 2.
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
    spread = document([0.8], 0.1, tokens=3, error=0.05)
    spread["draft_seconds"] |= {"q1": 0.08, "q3": 0.12}
    moved = 1.57 * 0.04 / 3
    also = 1.5 * (share(0.8, 0.1 - moved) - share(0.8, 0.1 + moved)) / 2
    assert predicted(spread).error == pytest.approx((half**2 + also**2) ** 0.5)
    spread["speedup"] = {"value": 1.5, "low": 1.4, "high": 1.6}
    clock = 0.1 * share(0.8, 0.1)
    assert predicted(spread).error == pytest.approx((half**2 + also**2 + clock**2) ** 0.5)


def test_errors_come_from_how_passes_grow():
    """Three tokens, guesses always kept: cost(3) is pass(3) at gamma 2; at gamma 1, which was run,
    pass(2) + pass(1). If pass(2) alone was timed wrongly, pass(3) beside drafts is too, inversely.
    """
    found = document([1.0], 0.0, passes=[1.0, 1.2, 1.5], tokens=3)
    exact = predictions(parse(found, Measurement, "by hand"))[2].speedup
    assert exact.value == pytest.approx(1.5 * 2.2 / 1.5) and exact.error == pytest.approx(0)
    error = 1.57 * 0.3 / 3
    found["passes"][1] |= {"q1": 1.05, "q3": 1.35}
    two = predictions(parse(found, Measurement, "by hand"))[2].speedup
    ends = [1.5 * 2.2 / (1.5 * 1.2 / (1.2 + sign * error)) for sign in (1, -1)]
    assert two.value == exact.value and two.error == pytest.approx((ends[0] - ends[1]) / 2)


def test_the_fastest_draft_comes_first():
    slow = measured([0.8], 0.4, draft="slow", speedup=1.1)
    fast = measured([0.7], 0.05, draft="fast", speedup=1.4)
    found = planned(slow, fast)
    assert [one.draft for one in found.candidates] == ["fast", "slow"]
    assert found.gamma == best(predictions(fast)).gamma
    words = shlex.split(found.command)
    assert words[:2] == ["foretoken", "generate"]
    assert words[words.index("--draft") + 1] == "fast"
    assert words[words.index("--gamma") + 1] == str(found.gamma)


def test_a_command_says_what_is_not_the_default():
    found = measured([0.8], 0.1, draft="my draft", temperature=0.7, top_k=40, dtype="bfloat16")
    words = shlex.split(planned(found).command)
    for option, value in (
        ("--target", "target"),
        ("--draft", "my draft"),
        ("--prompt-file", "p.txt"),
        ("--temperature", "0.7"),
        ("--top-k", "40"),
        ("--dtype", "bfloat16"),
    ):
        assert words[words.index(option) + 1] == value
    assert "--top-p" not in words and "--seed" not in words and "--max-new-tokens" not in words


def test_a_command_loads_as_was_measured():
    loaded = {"revision": "v1", "draft_revision": "v2", "tokenizer": "my words", "device": "cuda"}
    on = ("trust_remote_code", "exact_shapes", "ignore_generation_config")
    found = measured([0.8], 0.1, **loaded, **dict.fromkeys(on, True))
    words = shlex.split(planned(found).command)
    for name, value in loaded.items():
        assert words[words.index(f"--{name.replace('_', '-')}") + 1] == value
    assert {f"--{name.replace('_', '-')}" for name in on} <= {*words}
    assert "True" not in words and words.count("--gamma") == 1
    assert speculative_config(found, 3)["revision"] == "v2"


def test_how_drafts_were_read_may_differ_and_how_the_target_was_may_not():
    planned(measured([0.8], 0.1), measured([0.8], 0.1, draft_revision="v2"))
    for name, value in (("revision", "v1"), ("tokenizer", "w"), ("ignore_generation_config", True)):
        with pytest.raises(InputError, match=f"differ in options: {name} is"):
            planned(measured([0.8], 0.1), measured([0.8], 0.1, **{name: value}))


def test_vllm():
    assert speculative_config(measured([0.8], 0.1, draft="a/b"), 3) == {
        "method": "draft_model",
        "model": "a/b",
        "num_speculative_tokens": 3,
    }
    assert speculative_config(measured([0.8], 0.1, draft="lookup"), 5) == {
        "method": "ngram",
        "num_speculative_tokens": 5,
        "prompt_lookup_max": 8,
        "prompt_lookup_min": 1,
    }
    table = document([0.8], 0.1, draft="ngram:file")
    table["draft"]["runtime"] = "python"
    assert speculative_config(parse(table, Measurement, ""), 3) is None
    translator = document([0.8], 0.1)
    translator["target"]["encoder_decoder"] = True
    assert speculative_config(parse(translator, Measurement, ""), 3) is None


@pytest.mark.parametrize(
    "where, key, value",
    [
        ("target", "name", "another"),
        ("target", "dtype", "bfloat16"),
        ("machine", "cpu", "another"),
        ("options", "temperature", 1.0),
        ("options", "prompts_sha256", "1"),
    ],
)
def test_what_is_not_alike_is_refused(where, key, value):
    other = document([0.8], 0.1)
    other[where][key] = value
    one, other = measured([0.8], 0.1), parse(other, Measurement, "")
    with pytest.raises(InputError, match=f"0.json and 1.json differ in {where}: {key} is .*and "):
        planned(one, other)


def test_drafts_and_their_gammas_may_differ():
    assert planned(measured([0.8], 0.1), measured([0.8] * 7, 0.1, draft="b", seed=4)).gamma > 0
