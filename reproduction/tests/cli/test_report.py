"""`python -m reproduction report`: a tiny recipe from models to page, resumed, and mistakes."""

from __future__ import annotations

import json
import sys

import pytest

import reproduction
from console import Run, mistake
from foretoken.storage import files
from reproduction import page as plots
from reproduction.cli.report import time_left
from reproduction.experiments import arithmetic
from tiny import byte_level, folder, llama

RECIPE = """
name = "tiny"
title = "Tiny models"
target = "target"
gammas = [2]
max_new_tokens = 8
tokens = 100
timed = 2
repeats = 1
temperatures = [1]
experiments = ["acceptance", "walltime", "trace", "observations"]
[prompts]
file = "prompts.txt"
[[drafts]]
label = "small"
draft = "draft"
[[drafts]]
label = "wrong"
draft = "no-such/folder"
"""


@pytest.fixture(scope="module")
def recipe(tmp_path_factory):
    place = tmp_path_factory.mktemp("recipe")
    for name, layers in (("target", 2), ("draft", 1)):
        folder(place / name, llama(320, num_hidden_layers=layers), byte_level())
    (place / "prompts.txt").write_text("the day\nthe old man\nit was\n")
    (place / "tiny.toml").write_text(RECIPE)
    return place / "tiny.toml"


@pytest.mark.prove
def test_from_models_to_page_and_resumed(console: Run, recipe, tmp_path, monkeypatch):
    monkeypatch.setattr(plots, "DPI", 20)  # the same, sooner
    monkeypatch.setattr(arithmetic, "MAX_GAMMA", 8)
    out = tmp_path / "new" / "report"
    result = console("report", recipe, "--out", out)
    assert result.code == 1 and result.out.splitlines() == [
        str(out / name) for name in ("report.html", "report.md", "report.json")
    ]
    failures = [line for line in result.err.splitlines() if line.startswith("failed: ")]
    assert len(failures) == 2 and all("no-such/folder" in line for line in failures)
    lines = (out / "results.jsonl").read_text().splitlines()
    assert len(lines) == 6  # what they were made with, and the measurements
    with open(out / "results.jsonl", "ab") as other:
        files.lock_file(other, out)
        mistake(console("report", recipe, "--out", out), "another process writes to")
    console("report", recipe, "--out", out)
    text = (out / "report-tiny.md").read_text()
    assert "## Table 3" in text and "## Tables 2 and 4" in text and "## Figure 1" in text
    assert "The quick report" not in (out / "report.md").read_text()
    kept_lines = (out / "results.jsonl").read_text().splitlines()
    assert kept_lines[:6] == lines and len(kept_lines) == 8  # what failed was tried again
    assert all("wrong" in line for line in kept_lines[6:])
    console("report", recipe, "--out", out, "--as-measured")
    assert (out / "report-tiny.md").read_text() == text
    assert (out / "results.jsonl").read_text().splitlines() == kept_lines
    assert f"python -m reproduction report {recipe} --out {out}" in (out / "report.md").read_text()
    document = json.loads(console("report", recipe, "--out", out, "--as-measured", "--json").out)
    assert document == json.loads((out / "report.json").read_text())
    console("report", recipe, "--out", tmp_path / "quick", "--quick")
    console("report", recipe, "--out", tmp_path / "quick", "--as-measured")
    assert "The quick report" in (tmp_path / "quick" / "report.md").read_text()


@pytest.mark.prove
def test_measurements_of_another_recipe_are_told_of_and_can_be_shown(
    console: Run, recipe, tmp_path, monkeypatch
):
    monkeypatch.setattr(plots, "DPI", 20)  # the same, sooner
    monkeypatch.setattr(arithmetic, "MAX_GAMMA", 8)
    text = RECIPE.replace('"walltime", "trace", "observations"', '"trace"')
    text = text.replace('"target"', f'"{recipe.parent}/target"')
    text = text.replace('"draft"', f'"{recipe.parent}/draft"')
    text = text[: text.rindex("[[drafts]]")]  # without the one that cannot be loaded
    (tmp_path / "prompts.txt").write_text("the day\nit was\n")
    own = tmp_path / "own.toml"
    own.write_text(text)
    out = tmp_path / "report"
    assert "measured anew" not in console("report", own, "--out", out).err
    own.write_text(text + "\n")
    assert "measured anew" not in console("report", own, "--out", out).err
    own.write_text(text.replace("max_new_tokens = 8", "max_new_tokens = 9"))
    result = console("report", own, "--out", out).err
    assert f"tiny: measured anew; {out}/results.jsonl has it of another recipe" in result
    (tmp_path / "prompts.txt").unlink()
    mistake(console("report", own, "--out", out), "there is no")
    content = (out / "results.jsonl").read_bytes()
    (out / "results.jsonl").write_bytes(b"<<<<<<< HEAD\n" + content)
    own.write_text(text.replace("temperatures = [1]", "temperatures = [0]"))
    shown = console("report", own, "--out", out, "--as-measured")
    assert "cannot read line 1; left as it is" in shown.err
    says = (
        "tiny: shown as it was measured; the recipe has changed since: temperatures, max_new_tokens"
    )
    assert says in shown.err
    assert shown.code == 0 and "Measured: " in (out / "report-tiny.md").read_text()
    assert (out / "results.jsonl").read_bytes().endswith(content)
    (out / "results.jsonl").write_bytes(content.replace(b'"lines"', b'"others"'))
    shown = console("report", own, "--out", out, "--as-measured")
    assert shown.code == 1 and "its measurements cannot be shown (KeyError: 'lines')" in shown.err
    mistake(
        console("report", own, "--out", tmp_path / "none", "--as-measured"),
        "has no measurement of tiny",
    )
    assert not (tmp_path / "none").exists()


def test_mistakes_are_told_before_models_load(console: Run, recipe, tmp_path):
    out = tmp_path / "out"
    mistake(console("report", tmp_path / "none.toml", "--out", out), "there is no")
    both = ("--quick", "--as-measured")
    mistake(console("report", recipe, "--out", out, *both), "--quick measures and --as-measured")
    mistake(console("report", recipe, recipe, "--out", out), "two recipes have the name tiny")
    (tmp_path / "file").touch()
    mistake(console("report", recipe, "--out", tmp_path / "file"), "is a file")
    (tmp_path / "prompts.txt").write_text("one\ntwo\n")
    (tmp_path / "short.txt").write_text("one\n")
    for change, says in [
        (("repeats", "repeat"), "repeat is no key of a recipe; did you mean repeats?"),
        (('"target"', '"no/target"'), "there is no folder 'no/target', and HF_HUB_OFFLINE"),
        (("[prompts]", 'dtype = "float31"\n[prompts]'), "dtype is 'float31'"),
        (("prompts.txt", "none.txt"), "there is no"),
        (("prompts.txt", "short.txt"), "holds 1 prompts"),
    ]:
        text = RECIPE.replace(*change)
        if "no/target" not in text:
            text = text.replace('target = "target"\n', "")
        (tmp_path / "wrong.toml").write_text(text)
        mistake(console("report", tmp_path / "wrong.toml", "--out", out), says)
    assert not out.exists()


def test_the_time_left_in_words():
    assert time_left(None) == "time left unknown"
    words = [time_left(seconds) for seconds in (40, 100, 9000)]
    assert words == ["about 40 s left", "about 2 min left", "about 2.5 h left"]


def test_a_library_that_is_missing_is_named(console: Run, recipe, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "jinja2", None)
    monkeypatch.delitem(sys.modules, "reproduction.page", raising=False)
    monkeypatch.delattr(reproduction, "page", raising=False)
    result = console("report", recipe, "--out", tmp_path / "out")
    mistake(result, "this needs jinja2, which is missing")
