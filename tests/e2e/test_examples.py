"""The examples run, in a short form, and print what they promise."""

import importlib
import re
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    """main() of an example, by name; what it printed."""
    monkeypatch.syspath_prepend(str(EXAMPLES))

    def run(name: str, *arguments: str) -> str:
        importlib.import_module(name).main(list(arguments))
        return capsys.readouterr().out

    return run


def factors(text: str) -> list[float]:
    return [float(factor) for factor in re.findall(r"(?:formula|measured): +x ([0-9.]+)", text)]


@pytest.mark.parametrize("extra", [[], ["--guesses", "2"], ["--processes"]])
def test_policy_and_simulator(run, extra: list[str]) -> None:
    printed = run("policy_and_simulator", "--steps", "6", *extra)
    formula, measured = factors(printed)
    assert 0 < formula <= 2 and measured > 0
    degrees = re.search(r"the pole is ([-+0-9.]+) degrees", printed)
    assert degrees and abs(float(degrees[1])) < 12
    assert "of 6 calls began with the right guess" in printed


@pytest.mark.parametrize("guesses", ["1", "2"])
def test_agent_tool_call(run, guesses: str) -> None:
    printed = run("agent_tool_call", "--requests", "8", "--width", "1024", "--guesses", guesses)
    formula, measured = factors(printed)
    assert 0 < formula <= 2 and measured > 0
    answers = re.findall(r"\? (?:calculate|search|count) \(.*had begun\): (\d+)", printed)
    assert len(answers) == 3
