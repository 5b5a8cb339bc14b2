"""What trainers print: a bar that waits for the first report, and the result with its use."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from foretoken.cli.option import TargetReading
from foretoken.cli.train import progress_bar, show, size, use
from foretoken.errors import InputError
from foretoken_lab.cli.train import _require_folders, _show_model


def test_the_bar_waits_for_the_first_report(capsys):
    with progress_bar("training", 3):
        pass
    assert capsys.readouterr().err == ""
    with progress_bar("training", 3) as report:
        report(1, "loss 2.000", None)
        report(3, "loss 1.000", "step 3: a line")
    shown = capsys.readouterr()
    assert shown.out == "" and "loss 1.000" in shown.err and "3/3" in shown.err
    assert "step 3: a line\n" in shown.err


def test_figures_and_use_or_the_summary(capsys):
    command = use(None, "a draft", TargetReading(tokenizer="t"))
    show({"steps": 3}, ["a line"], command, as_json=False)
    printed = "a line\nuse it: foretoken generate --draft 'a draft' --tokenizer t PROMPT\n"
    assert capsys.readouterr().out == printed
    show({"steps": 3}, ["a line"], command, as_json=True)
    assert json.loads(capsys.readouterr().out) == {"steps": 3}


@pytest.mark.parametrize("files", [None, ["tokenizer.json"], ["tokenizer.json", "config.json"]])
def test_a_model_is_a_target_or_the_draft_of_one(files, tmp_path, capsys):
    """A bare tokenizer's folder is nobody's model."""
    for name in files or []:
        (tmp_path / name).touch()
    _show_model({}, [], Path("m"), None if files is None else tmp_path, as_json=False)
    pair = f"{tmp_path if files and len(files) == 2 else 'TARGET'} --draft m"
    expected = f"generate --target {'m' if files is None else pair} PROMPT\n"
    assert capsys.readouterr().out == f"use it: foretoken {expected}"


def test_what_must_be_a_folder(tmp_path):
    _require_folders((None, "text"), (tmp_path, "a model"))
    with pytest.raises(InputError, match="no is no folder; give a folder of a model"):
        _require_folders((tmp_path, "text"), (Path("no"), "a model"))


def test_sizes():
    summary = {"steps": 5, "seconds": 2.4}
    for parameters, shown in ((99_999, "99999"), (1_234_567, "1.23M")):
        expected = f"out: {shown} parameters, 5 steps in 2 s"
        assert size(Path("out"), summary | {"parameters": parameters}) == expected
