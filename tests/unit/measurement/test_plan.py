"""Plans from measurements written by hand: the draft and gamma chosen, and the command for them."""

from __future__ import annotations

import shlex
from typing import Any

import pytest

from foretoken.errors import InputError
from foretoken.measurement.plan import (
    Plan,
    best,
    plan,
    predictions,
)
from foretoken.measurement.result import Measurement, parse
from measurements import document


def measured(*args: Any, **settings: Any) -> Measurement:
    return parse(document(*args, **settings), Measurement, "by hand")


def planned(*found: Measurement) -> Plan:
    return plan([(f"{i}.json", one) for i, one in enumerate(found)])


def test_do_not_speculate():
    chosen = planned(measured([0.1], 0.5, speedup=0.73))
    assert chosen.gamma == 0
    assert chosen.first.best.gamma == 1 and chosen.first.best.speedup.value < 1
    assert shlex.split(chosen.command)[-2:] == ["--gamma", "0"]


def test_a_plan_promises_no_more_than_was_measured():
    chosen = planned(measured([0.5, 0.5], 0.1, tokens=3, speedup=0.9))
    assert chosen.gamma == 0 and chosen.first.best.gamma == 2
    assert chosen.first.best.speedup.value == pytest.approx(0.9)
    slow = measured([0.8], 0.1, draft="slow", speedup=1.1)  # the same costs, another clock
    fast = measured([0.8], 0.1, draft="fast", speedup=1.2)
    assert planned(slow, fast).first.draft == "fast"


def test_the_fastest_draft_comes_first():
    slow = measured([0.8], 0.4, draft="slow", speedup=1.1)
    fast = measured([0.7], 0.05, draft="fast", speedup=1.4)
    chosen = planned(slow, fast)
    assert [one.draft for one in chosen.candidates] == ["fast", "slow"]
    assert chosen.gamma == best(predictions(fast)).gamma
    arguments = shlex.split(chosen.command)
    assert arguments[:2] == ["foretoken", "generate"]
    assert arguments[arguments.index("--draft") + 1] == "fast"
    assert arguments[arguments.index("--gamma") + 1] == str(chosen.gamma)


def test_a_command_says_what_is_not_the_default():
    measurement = measured(
        [0.8], 0.1, draft="my draft", temperature=0.7, top_k=40, dtype="bfloat16"
    )
    arguments = shlex.split(planned(measurement).command)
    for option, value in (
        ("--target", "target"),
        ("--draft", "my draft"),
        ("--prompt-file", "p.txt"),
        ("--temperature", "0.7"),
        ("--top-k", "40"),
        ("--dtype", "bfloat16"),
    ):
        assert arguments[arguments.index(option) + 1] == value
    assert (
        "--top-p" not in arguments
        and "--seed" not in arguments
        and "--max-new-tokens" not in arguments
    )


def test_a_command_loads_as_was_measured():
    loaded = {
        "revision": "v1",
        "draft_revision": "v2",
        "tokenizer": "my tokenizer",
        "device": "cuda",
    }
    on = ("trust_remote_code", "ignore_generation_config")
    measurement = measured([0.8], 0.1, **loaded, **dict.fromkeys(on, True))
    arguments = shlex.split(planned(measurement).command)
    for name, value in loaded.items():
        assert arguments[arguments.index(f"--{name.replace('_', '-')}") + 1] == value
    assert {f"--{name.replace('_', '-')}" for name in on} <= {*arguments}
    assert "True" not in arguments and arguments.count("--gamma") == 1


def test_how_drafts_were_read_may_differ_and_how_the_target_was_may_not():
    planned(measured([0.8], 0.1), measured([0.8], 0.1, draft_revision="v2"))
    for name, value in (("revision", "v1"), ("tokenizer", "w"), ("ignore_generation_config", True)):
        with pytest.raises(InputError, match=f"differ in options: {name} is"):
            planned(measured([0.8], 0.1), measured([0.8], 0.1, **{name: value}))


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


def test_files_of_versions_that_did_not_know_bytes_compare():
    older = document([0.8], 0.1)
    for name in ("weight_bytes", "pass_bytes", "cache_bytes"):
        del older["target"][name]
    for name in ("read_bytes", "read", "peak_bytes"):
        del older[name]
    older = parse(older, Measurement, "")
    assert older.bandwidth is None and older.floor_seconds is None
    assert planned(measured([0.8], 0.1), older).gamma > 0


def test_drafts_and_their_gammas_may_differ():
    assert planned(measured([0.8], 0.1), measured([0.8] * 7, 0.1, draft="b", seed=4)).gamma > 0
