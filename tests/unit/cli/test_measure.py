"""`foretoken measure` as a user meets it."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import pytest

from console import Run, mistake
from foretoken.cli.measure import show
from foretoken.cli.render import page
from foretoken.measurement import machine, result
from foretoken.measurement.result import load
from measurements import document
from tiny import byte_level, folder, llama


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, console: Run) -> Run:
    monkeypatch.setattr(machine, "READ_BYTES", 2**20)
    return console


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folders `target` and `draft`, `bare` without a tokenizer; prompts for both kinds."""
    base = tmp_path_factory.mktemp("measure")
    folder(base / "target", llama(320, eos_token_id=None), byte_level())
    folder(base / "draft", llama(320, seed=1, num_hidden_layers=1), byte_level())
    folder(base / "bare", llama(64, eos_token_id=None))
    (base / "prompts.txt").write_text("It was\nThe day was\nTo the sea\n")
    ids = [{"prompt": [1, 2, 3]}, {"prompt": [4, 5]}]
    (base / "ids.jsonl").write_text("\n".join(map(json.dumps, ids)))
    return base


def pair(base: Path, *more: object) -> tuple[object, ...]:
    where = ("--target", base / "target", "--draft", base / "draft", "--prompts")
    short = ("--max-new-tokens", 8, "--gamma", 2, "--runtime", "transformers")
    return (*where, base / "prompts.txt", *short, *more)


def test_what_is_measured_is_printed_saved_and_planned(run, base, tmp_path):
    out = tmp_path / "m.json"
    printed = run("measure", *pair(base, "--temperature", 1, "--out", out))
    assert printed.code == 0 and "measuring" in printed.err
    for says in (
        "alpha on the target's text ",
        "over 24 tokens; D_LK 0.",
        "c_hat ",
        "a draft token ",
        "other work of a step ",
        "weights                     target ",
        "GB/s of bandwidth; measured ",
        "memory                      process peak ",
        "gamma 2 measured: ",
        f"{out}: compare with `foretoken measure {out} OTHER`",
    ):
        assert says in printed.out
    assert [path.name for path in tmp_path.iterdir()] == ["m.json"]
    saved = json.loads(out.read_text())
    assert saved["options"]["target"] == str(base / "target") and saved["machine"]["cores"] > 0
    assert [len(one["overlaps"]) for one in saved["prompts"]] == [8, 8, 8]

    plan = run("measure", out)
    assert plan.code == 0 and plan.err == "" and "speculate" in plan.out
    advice = plan.out[plan.out.index("speculate") :]
    assert advice in printed.out  # one measurement advises as a comparison does
    report = json.loads(run("measure", out, "--json").out)
    assert report["command"] in plan.out and f"--gamma {report['gamma']}" in report["command"]
    (candidate,) = report["candidates"]
    assert candidate["draft"] == str(base / "draft")
    assert candidate["alpha"] == saved["alpha"]
    assert report["speculate"] == (candidate["speedup"]["value"] > 1)


def test_what_is_printed_fits_the_terminal(monkeypatch, capsys, tmp_path, run):
    """Long paths and slow models; what is wider is one word, and the shell takes the command."""
    monkeypatch.setenv("COLUMNS", "80")
    folder = "/a/folder of models/whose name is long/target"
    facts = {"target": folder, "passes": [1.5 + n / 10 for n in range(16)]}
    files, shown = [], ""
    for i, draft in enumerate(["/a/folder/of/models/draft", "/another/folder/draft", "lookup"]):
        content = document([0.8] * 5, 0.1, draft=draft, speedup=1.3 + i / 10, **facts)
        files.append(tmp_path / f"{i}.json")
        files[-1].write_text(json.dumps(content))
        show(load(files[-1]), page())
        shown += capsys.readouterr().out
    plan = run("measure", *files)
    shown += plan.out
    assert plan.code == 0 and "run, best" in shown
    command = plan.out[plan.out.index("foretoken generate") :].strip()
    lines = [line for line in shown.splitlines() if not line.startswith("foretoken generate")]
    assert all(len(line) <= 80 for line in lines) and "…" not in shown
    words = shlex.split(command)
    assert words[words.index("--target") + 1] == folder and words[-2:] == ["--gamma", "5"]


def test_json_is_one_document(run, base):
    result = run("measure", *pair(base, "--limit", 2, "--json"))
    report = json.loads(result.out)
    assert result.code == 0 and len(report["prompts"]) == 2
    derived = report["derived"]
    assert derived["d_lk"] == pytest.approx(1 - report["alpha"]["value"])
    assert derived["v"][0] == 1 and len(derived["v"]) == 16
    assert 0 < derived["c_hat"] < 1
    assert derived["bandwidth_bytes_per_second"] > 0 and report["peak_bytes"] > 10**7
    floor = report["target"]["pass_bytes"] / derived["bandwidth_bytes_per_second"]
    assert derived["floor_seconds"] == pytest.approx(floor)
    for position, rate in zip(report["positions"], derived["accepted"], strict=True):
        assert (rate is None) == (position["judged"] == 0)
        assert rate is None or 0 <= rate["low"] <= rate["value"] <= rate["high"] <= 1
    assert [one["gamma"] for one in derived["predictions"]] == list(range(16))


SAID = "other processes took 23% of the processors meanwhile"


def test_what_other_processes_took_is_said_and_saved(run, base, tmp_path, monkeypatch):
    monkeypatch.setattr(
        "foretoken.costing.contention.share", lambda spans: 0.23 if list(spans) else None
    )
    out = tmp_path / "m.json"
    assert SAID in run("measure", *pair(base, "--limit", 2, "--out", out)).out
    saved = json.loads(out.read_text())
    assert saved["others"] == 0.23 and len(saved["prompts"]) == 2
    assert f"draft: {SAID}" in run("measure", out).out
    assert json.loads(run("measure", out, "--json").out)["candidates"][0]["others"] == 0.23
    out.write_text(json.dumps(saved | {"others": 0.05}))
    assert "other processes" not in run("measure", out).out


def test_ids_and_copies(run, base):
    args = ("--target", base / "bare", "--draft", "lookup", "--prompts", base / "ids.jsonl")
    args = (*args, "--max-new-tokens", 8, "--runtime", "transformers")
    result = run("measure", *args)
    assert result.code == 0 and "no draft token, so 0, at" in result.out
    assert "draft   lookup: python" in result.out


def test_drafts_are_measured_and_planned(run, base):
    result = run("measure", *pair(base, "--draft", "uniform", "--draft", "lookup", "--json"))
    report = json.loads(result.out)
    names = [one["draft"] for one in report["candidates"]]
    assert sorted(names) == sorted([str(base / "draft"), "uniform", "lookup"])
    factors = [one["speedup"]["value"] for one in report["candidates"]]
    assert factors == sorted(factors, reverse=True)


@pytest.mark.openvino
def test_a_target_s_own_copies_are_planned(run, base):
    args = ("--target", base / "bare", "--prompts", base / "ids.jsonl", "--limit", 2)
    result = run("measure", *args, "--self", "--max-new-tokens", 8, "--json")
    assert result.code == 0, result.err
    report = json.loads(result.out)
    names = {one["draft"] for one in report["candidates"]}
    assert names == {"self:int4", "self:int8", "lookup"}


def test_an_interrupted_measurement_is_picked_up(run, base, tmp_path, monkeypatch):
    out, args = tmp_path / "m.json", pair(base, "--out", tmp_path / "m.json")
    add, kept = result.PartialMeasurement.add, []

    def interrupt(self, observed):
        add(self, observed)
        kept.append(observed)
        if len(kept) == 2:
            raise KeyboardInterrupt

    monkeypatch.setattr(result.PartialMeasurement, "add", interrupt)
    stopped = run("measure", *args)
    assert stopped.code == 130 and "Traceback" not in stopped.err
    assert f"picks up {out}.part.jsonl" in stopped.err and not out.exists()
    assert run("measure", *args).code == 0 and len(kept) == 3
    saved = json.loads(out.read_text())["prompts"]
    assert [one["plain"]["seconds"] for one in saved] == [one.plain.seconds for one in kept]


def test_a_plan_from_files_written_by_hand(run, tmp_path):
    good, bad = tmp_path / "good.json", tmp_path / "bad.json"
    fast, slow = ({"tokens": 3, "speedup": speedup} for speedup in (4 / 3, 0.73))
    good.write_text(json.dumps(document([0.5, 0.5], 0.1, draft="lookup", **fast)))
    bad.write_text(json.dumps(document([0.1], 0.5, draft="[red]uniform", **slow)))
    result = run("measure", bad, good)
    assert "speculate with lookup, gamma 2: 1.33x ± 0.00\n" in result.out
    assert "--draft lookup --gamma 2" in result.out
    result = run("measure", bad)
    assert "do not speculate: the best draft is predicted to give 0." in result.out
    assert "[red]uniform" in result.out and "--gamma 0" in result.out


def test_mistakes_are_told_before_models_are_loaded(run, base, tmp_path):
    args = ("--target", tmp_path / "no", "--prompts", base / "prompts.txt")
    mistake(run("measure", *args, "--gamma", 0), "gamma is 0; give 1 or more")
    mistake(run("measure", *args, "--limit", 0), "limit is 0; give the number of prompts")
    mistake(run("measure", *args, "--limit", 1), "1 prompt; give 2 or more")
    mistake(run("measure", *args, "--top-p", 2), "top_p is 2.0")
    mistake(run("measure", *args, "--max-new-tokens", 1), "max_new_tokens is 1; give 2 or more")
    mistake(run("measure", *args, "--draft", "none"), "draft is none; give one that guesses")
    mistake(run("measure", *args, "--out", tmp_path / "no" / "m"), "there is no folder")
    mistake(run("measure", "--prompts", tmp_path / "no.txt"), "no.txt cannot be read")
    mistake(run("measure", *args), "is no folder")
    mistake(run("measure", *args, "--self"), "is no folder")
    mistake(run("measure"), "give files of foretoken measure --out, or --prompts")
    mistake(run("measure", "a.json", "--draft", "lookup"), "give files of measurements, or options")
    two = (*args, "--draft", "lookup", "--draft", "uniform")
    mistake(run("measure", *two, "--out", tmp_path / "m"), "--out is for one draft")
    mistake(run("measure", tmp_path / "no.json"), "no.json; make it with foretoken measure")
    (tmp_path / "cut.json").write_text(json.dumps(document([0.5], 0.1))[:300])
    mistake(run("measure", tmp_path / "cut.json"), "cut.json cannot be read as a measurement")
    (tmp_path / "deep.json").write_text("[" * 100_000)
    mistake(run("measure", tmp_path / "deep.json"), "a measurement: it nests too deeply")
