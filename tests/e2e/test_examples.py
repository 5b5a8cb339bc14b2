"""The examples run, in a short form, and print what they promise."""

import importlib
import re
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from scipy.stats import chisquare

import tiny
from foretoken.execute import Seconds
from pairs import relative, stock

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
def test_what_was_predicted_and_what_was_seen(monkeypatch, total: float, seen: str) -> None:
    """The formula's gain is never told as one that was seen."""
    monkeypatch.syspath_prepend(str(EXAMPLES))
    plain, run = (
        SimpleNamespace(beta=0.9, kept=0, seconds=Seconds(0.0, 1.0, 1.0, total))
        for total in (2.0, total)
    )
    printed = importlib.import_module("measured").report([plain], [run])
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


@pytest.fixture
def algorithm(run):
    """The 40 lines, and a small target with a draft that is like it."""
    module = importlib.import_module("speculative_in_40_lines")
    model = tiny.llama(V=8, context=32)
    return module, model, relative(model, noise=0.3)


def test_40_lines_are_greedy(algorithm) -> None:
    module, model, draft = algorithm
    prompt = [1, 5, 2]
    expected = stock(model, prompt, 12)
    for gamma in (0, 1, 4):
        ids = module.generate(model, draft, prompt, 12, gamma=gamma, temperature=0)
        assert ids == prompt + expected


def test_40_lines_keep_the_distribution(algorithm) -> None:
    """The first two tokens, which one step may give both; fails by chance once in a million runs,
    if the seed changes."""
    module, model, draft = algorithm
    torch.manual_seed(0)
    number, counts = 600, Counter()
    for _ in range(number):
        counts[tuple(module.generate(model, draft, [1, 5], 2, gamma=2)[2:])] += 1
    expected = {}
    with torch.inference_mode():
        first = module.distribution(model(torch.tensor([[1, 5]])).logits[0, -1], 1.0)
        for a in range(8):
            second = module.distribution(model(torch.tensor([[1, 5, a]])).logits[0, -1], 1.0)
            expected |= {(a, b): float(first[a] * second[b]) for b in range(8)}
    common = [pair for pair, p in expected.items() if p * number >= 5]
    seen = [counts[pair] for pair in common]
    rest = number - sum(seen)
    wanted = [number * expected[pair] for pair in common]
    assert len(common) > 8
    result = chisquare([*seen, rest], [*wanted, number - sum(wanted)])
    assert result.pvalue > 1e-6


def test_40_lines_on_the_pair_that_ships(run, capsys) -> None:
    importlib.import_module("speculative_in_40_lines").main("It was")
    assert capsys.readouterr().out.startswith("It was")
