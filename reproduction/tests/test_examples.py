"""The examples run, in a short form, and print what they promise."""

from __future__ import annotations

import re
from importlib import import_module
from types import SimpleNamespace

import pytest

from reproduction.execute import Seconds


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]):
    """main() of an example, by name; what it printed."""

    def run(name: str, *arguments: str) -> str:
        import_module(f"reproduction.examples.{name}").main(list(arguments))
        return capsys.readouterr().out

    return run


def factors(text: str) -> list[float]:
    return [float(factor) for factor in re.findall(r"(?:formula|measured): +x ([0-9.]+)", text)]


@pytest.mark.parametrize(
    ("name", "option", "value", "says"),
    [
        ("policy_and_simulator", "--steps", "0", "argument --steps: 0 is less than 1"),
        ("policy_and_simulator", "--guesses", "-1", "argument --guesses: -1 is less than 0"),
        ("agent_tool_call", "--guesses", "-1", "argument --guesses: -1 is less than 0"),
        ("agent_tool_call", "--requests", "0", "argument --requests: 0 is less than 1"),
        ("agent_tool_call", "--network", "-0.5", "argument --network: -0.5 is less than 0"),
        ("agent_tool_call", "--width", "x", "argument --width: invalid int value: 'x'"),
    ],
)
def test_invalid_numbers(run, capsys, name: str, option: str, value: str, says: str) -> None:
    with pytest.raises(SystemExit, match="2"):
        run(name, option, value)
    assert capsys.readouterr().err.splitlines()[-1].endswith(says)


@pytest.mark.parametrize(("total", "seen"), [(1.0, "x 2.00"), (4.0, "x 0.50")])
def test_what_was_predicted_and_what_was_seen(total: float, seen: str) -> None:
    """The formula's gain is never told as one that was seen."""
    plain, run = (
        SimpleNamespace(beta=0.9, kept=0, seconds=Seconds(0.0, 1.0, 1.0, total))
        for total in (2.0, total)
    )
    printed = import_module("reproduction.examples.measured").report([plain], [run])
    verification = "a gain" if total < 2 else "no gain"
    assert "formula:  x 1.82, a gain where cores are free, as q <" in printed
    assert re.search(rf"measured: {seen} on \d+ cores?, {verification}$", printed)


@pytest.mark.parametrize("extra", [[], ["--guesses", "2"], ["--processes"]])
def test_policy_and_simulator(run, extra: list[str]) -> None:
    printed = run("policy_and_simulator", "--steps", "6", *extra)
    formula, measured = factors(printed)
    assert 0 < formula <= 2 and measured > 0
    degrees = re.search(r"the pole is ([-+0-9.]+) degrees", printed)
    assert degrees and abs(float(degrees[1])) < 12
    assert "of 6 calls began with the right guess" in printed


@pytest.mark.parametrize("draft_tokens", ["1", "2"])
def test_agent_tool_call(run, draft_tokens: str) -> None:
    printed = run(
        "agent_tool_call", "--requests", "8", "--width", "1024", "--guesses", draft_tokens
    )
    formula, measured = factors(printed)
    assert 0 < formula <= 2 and measured > 0
    answers = re.findall(r"\? (?:calculate|search|count) \(.*had begun\): (\d+)", printed)
    assert len(answers) == 3
