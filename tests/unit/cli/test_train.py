"""What trainers print: a bar that waits for the first report, and the result with its use."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from foretoken.cli.option import TargetFileOptions
from foretoken.cli.train import (
    describe_result,
    make_generate_command,
    name_target,
    print_summary,
    show_progress_bar,
)


def test_the_bar_waits_for_the_first_report(capsys):
    with show_progress_bar("training", 3):
        pass
    assert capsys.readouterr().err == ""
    with show_progress_bar("training", 3) as report:
        report(1, "loss 2.000", None)
        report(3, "loss 1.000", "step 3: a line")
    shown = capsys.readouterr()
    assert shown.out == "" and "loss 1.000" in shown.err and "3/3" in shown.err
    assert "step 3: a line\n" in shown.err


def test_figures_and_use_or_the_summary(capsys):
    command = make_generate_command(None, "a draft", TargetFileOptions(tokenizer="t"))
    print_summary({"steps": 3}, ["a line"], command, as_json=False)
    printed = "a line\nuse it: foretoken generate --draft 'a draft' --tokenizer t PROMPT\n"
    assert capsys.readouterr().out == printed
    print_summary({"steps": 3}, ["a line"], command, as_json=True)
    assert json.loads(capsys.readouterr().out) == {"steps": 3}


@pytest.mark.parametrize("files", [None, ["tokenizer.json"], ["tokenizer.json", "config.json"]])
def test_a_tokenizers_folder_is_a_target_where_it_holds_a_model(files, tmp_path):
    for name in files or []:
        (tmp_path / name).touch()
    whole = files is not None and len(files) == 2
    assert name_target(tmp_path) == (tmp_path if whole else "TARGET")


def test_sizes():
    summary = {"steps": 5, "seconds": 2.4}
    for parameters, shown in ((99_999, "99999"), (1_234_567, "1.23M")):
        expected = f"out: {shown} parameters, 5 steps in 2 s"
        assert describe_result(Path("out"), summary | {"parameters": parameters}) == expected
