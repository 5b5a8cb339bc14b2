"""`python -m reproduction theory`: what it prints, and that it is one JSON document when asked."""

import json
import time

import pytest
import typer
from typer.testing import CliRunner

from console import mistake
from foretoken.errors import InputError
from foretoken.theory import walltime_factor
from reproduction.cli.theory import theory
from reproduction.theory import operations_factor

app = typer.Typer()
app.command()(theory)


def run(*args: str) -> str:
    result = CliRunner().invoke(app, list(args), catch_exceptions=False)
    assert result.exit_code == 0 and result.stderr == ""
    return result.stdout


def line_of(gamma: int, printed: str) -> str:
    return next(line for line in printed.splitlines() if line.split()[1:2] == [str(gamma)])


def test_optimum_and_table():
    printed = run("--alpha", "0.8", "--c", "0.02")
    assert printed.startswith("optimal gamma 11: 3.82x\n")
    assert "alpha 0.8 > c 0.02" in printed
    assert "oracle bound 4.63x" in printed
    assert "3.82x" in line_of(11, printed)
    assert all(line_of(gamma, printed) for gamma in range(17))


def test_an_optimum_beyond_the_table():
    printed = run("--alpha", "0.9", "--c", "0.02", "--max-gamma", "3")
    assert printed.startswith("optimal gamma 19: ") and line_of(19, printed)
    assert "last gamma looked at" not in printed


def test_no_gamma_pays():
    printed = run("--alpha", "0.1", "--c", "0.2")
    assert printed.startswith("optimal gamma 0: 1.00x\n")
    assert "alpha 0.1 <= c 0.2: no gamma pays" in printed


def test_no_finite_optimum():
    printed = run("--alpha", "1", "--c", "0", "--max-gamma", "2")
    assert printed.startswith("optimal gamma 64: 65.00x\nthat is the last gamma looked at")
    assert "oracle bound unbounded" in printed


def test_json():
    document = json.loads(run("--alpha", "0.8", "--c", "0.02", "--json"))
    assert document["optimal"]["gamma"] == 11 and document["improves"] is True
    assert document["c_hat"] == 0.02 and document["tokens"] is None
    assert [row["gamma"] for row in document["table"]] == list(range(17))
    assert document["table"][5]["walltime_factor"] == walltime_factor(0.8, 5, 0.02)
    assert document["table"][5]["operations_factor"] == operations_factor(0.8, 5, 0.02)


def test_json_knows_no_infinity():
    document = json.loads(run("--alpha", "1", "--c", "0", "--json"), parse_constant=pytest.fail)
    assert document["oracle_factor"] is None


def test_a_long_table_is_quick():
    """As many terms as rows, summed for every row, took a minute."""
    began = time.process_time()
    document = json.loads(run("--alpha", "0.999", "--c", "0.001", "--max-gamma", "20000", "--json"))
    assert len(document["table"]) == 20_001 and time.process_time() - began < 10


def test_c_hat_and_tokens():
    args = ("--alpha", "0.8", "--c", "0.1", "--c-hat", "0.5", "--tokens", "6")
    row = json.loads(run(*args, "--json"))["table"][4]
    assert row["operations_factor"] == operations_factor(0.8, 4, 0.5)
    assert row["walltime_factor"] == walltime_factor(0.8, 4, 0.1, tokens=6)
    assert "walltime, 6 tokens" in run(*args)


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (["--alpha", "2", "--c", "0.1"], "alpha is 2.0"),
        (["--alpha", "0.5", "--c", "-1"], "c is -1.0"),
        (["--alpha", "0.5", "--c", "0.1", "--max-gamma", "-1"], "max_gamma is -1"),
        (["--alpha", "0.5", "--c", "0.1", "--tokens", "0"], "tokens is 0"),
    ],
)
def test_bad_values_are_left_to_the_caller(args: list[str], says: str):
    result = CliRunner().invoke(app, args)
    assert isinstance(result.exception, InputError)
    assert str(result.exception).startswith(says)


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (("--max-gamma", "9" * 30), "max_gamma is 9999"),
        (("--tokens", "9" * 30), "tokens is 9999"),
        (("--c-hat", "1e308", "--json"), "c_hat is 1e+308; give a number from 0 to 1e+100"),
        (("--c-hat", "inf"), "c_hat is inf; give a number"),
    ],
)
def test_numbers_too_large_to_work_with(console, args, says):
    mistake(console("theory", "--alpha", 0.5, "--c", 0.1, *args), says)
