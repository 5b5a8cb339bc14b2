"""`foretoken bench` as a user meets it, on small random pairs."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import foretoken
from console import Run, mistake
from foretoken.cli.bench import _advise
from foretoken.cli.render import open_console
from foretoken.cli.speculative_config import parse_speculative_config
from foretoken.measurement import machine, races
from foretoken.measurement.plan import Plan, PlanOptions
from pairs import relative
from tiny import byte_level, folder, llama, t5

OTHER = "has results of another command or of other models; remove the file"
QUICK = ("--max-new-tokens", 8, "--repeats", 2, "--gamma", "2")


@pytest.fixture
def call(monkeypatch: pytest.MonkeyPatch, console: Run) -> Run:
    monkeypatch.setattr(races, "REST_SECONDS", 0.0)
    monkeypatch.setattr(machine, "BANDWIDTH_READ_BYTES", 2**20)
    return partial(console, "bench")


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target without a tokenizer that ends texts early by itself; a draft and prompts beside."""
    base = tmp_path_factory.mktemp("pair")
    model = llama(V=64)
    model.generation_config.eos_token_id = list(range(1, 64))
    folder(base / "draft", relative(model))
    (base / "prompts.jsonl").write_text('{"prompt": [5, 17, 33]}\n{"prompt": "3,58,20,36"}\n')
    return folder(base / "target", model)


@pytest.fixture
def pair(target: Path) -> tuple[object, ...]:
    beside = target.parent
    return target, "--draft", beside / "draft", "--prompts", beside / "prompts.jsonl"


def test_drafts_gammas_and_texts_at_once(
    call: Run, pair: tuple[object, ...], target: Path, tmp_path: Path
):
    out = tmp_path / "new.json"
    more = ("--draft", "lookup", "--batch", "1,3", "--out", out, "--json")
    result = call(*pair, *QUICK, *more)
    document = json.loads(result.out)
    assert result.code == 0 and not document["interrupted"]
    assert json.loads(out.read_text()) == document
    rows = [(row["draft"], row["batch"], row["gamma"]) for row in document["figures"]]
    drafts = (str(target.parent / "draft"), "lookup")
    assert rows == [(d, n, g) for d in drafts for n in (1, 3) for g in (0, 2, None)]
    for row in document["figures"]:
        assert row["seconds_per_token"]["n"] == 2 and row["tokens_per_second"]["median"] > 0
        assert row["speedup"]["q1"] <= row["speedup"]["median"] and row["tokens_per_call"] >= 1
        assert row["gamma"] != 0 or row["speedup"]["median"] == 1.0
        assert (row["predicted"] is None) or row["batch"] == 1
    two = document["figures"][1]["predicted"]
    assert 0 < two["alpha"] <= 1 and two["c"] > 0 and two["v"] > 0 and two["predicted"] > 0
    memory = document["memory"]
    assert 0 < memory["pass_bytes"] <= memory["weight_bytes"] < memory["peak_bytes"]
    assert memory["bytes_per_second"] > 0


def test_the_same_command_goes_on_where_it_was_stopped(
    call: Run, pair: tuple[object, ...], tmp_path: Path, interrupted: Callable[[int], None]
):
    interrupted(10)  # two prompts and three gammas are six runs: in the first round that counts
    out, drafts = tmp_path / "new.json", ("--draft", "lookup", "--draft", "copy")
    assert call(*pair[:1], *drafts, *pair[3:], *QUICK, "--out", out).code == 130
    interrupted(19 + 3)  # all rounds of the first draft, then three runs of the second
    code, _, err = call(*pair[:1], *drafts, *pair[3:], *QUICK, "--out", out)
    first = json.loads(out.read_text())
    assert code == 130 and first["interrupted"] and len(first["figures"]) == 3
    interrupted(100)
    code, shown, err = call(*pair[:1], *drafts, *pair[3:], *QUICK, "--out", out, "--json")
    document = json.loads(shown)
    assert code == 0 and "3 results are already there" in err and not document["interrupted"]
    assert document["figures"][:3] == first["figures"] and len(document["figures"]) == 6
    mistake(call(*pair, *QUICK, "--out", out), OTHER)
    for text in ("{", "[1]", json.dumps(document | {"figures": [{}]})):
        out.write_text(text)
        mistake(call(*pair[:1], *drafts, *pair[3:], *QUICK, "--out", out), OTHER)


@pytest.mark.prove
def test_rows_of_a_draft_that_was_cut_short_are_done_again(
    call: Run, pair: tuple[object, ...], tmp_path: Path, interrupted: Callable[[int], None]
):
    """Neither counted nor advised: two prompts and three gammas are six runs a round."""
    out, args = (
        tmp_path / "new.json",
        (*pair, "--draft", "copy", *QUICK, "--out", tmp_path / "new.json"),
    )
    interrupted(12 + 3)
    assert call(*args).code == 130
    first = json.loads(out.read_text())
    assert {row["speedup"]["n"] for row in first["figures"]} == {1} and first["best"]
    interrupted(1)
    code, shown, err = call(*args)
    assert code == 130 and not shown and "0 results are already there" in err
    interrupted(18 + 15)
    assert call(*args).code == 130
    document = json.loads(out.read_text())
    document["best"]["tried"] = "copy"  # as the rows that are done again had it
    out.write_text(json.dumps(document))
    interrupted(1)
    code, shown, err = call(*args, "--json")
    again = json.loads(shown)
    assert code == 130 and "3 results are already there" in err and len(again["figures"]) == 3
    assert again["best"]["tried"] == str(pair[2])


@pytest.mark.prove
def test_a_model_that_changed_is_another(call: Run, pair: tuple[object, ...], tmp_path: Path):
    draft, out = tmp_path / "draft", tmp_path / "new.json"
    shutil.copytree(str(pair[2]), draft)
    args = (pair[0], "--draft", draft, *pair[3:], *QUICK, "--repeats", 1, "--out", out)
    assert call(*args).code == 0 and call(*args).code == 0
    folder(draft, llama(64, seed=5))
    mistake(call(*args), OTHER)


@pytest.mark.skipif(not Path("/proc/self").exists(), reason="there is no /proc")
def test_a_file_that_cannot_be_written(
    call: Run, pair: tuple[object, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """It is found before anything is loaded; the figures are printed where it fails later."""
    with monkeypatch.context() as patch:
        patch.setattr("foretoken.measurement.benchmark.Benchmark", None)
        mistake(call(*pair, *QUICK, "--out", "/proc/x.json"), "/proc/x.json cannot be written")

    def full(path: Path, content: bytes) -> None:
        raise OSError(f"{path} cannot be written: No space left on device")

    monkeypatch.setattr("foretoken.storage.files.write_atomically", full)
    code, shown, err = call(*pair, *QUICK, "--out", tmp_path / "x.json")
    assert code == 2 and "foretoken generate" in shown
    assert err.endswith("x.json cannot be written: No space left on device\n")


@pytest.fixture
def interrupted(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Ctrl-C in our own n-th turn."""
    own = races.run_own_turn

    def after(n: int) -> None:
        turns = iter(range(1, n + 1))

        def impatient(*args: Any, **how: Any) -> list[races.RaceRun]:
            if next(turns) == n:
                raise KeyboardInterrupt
            return own(*args, **how)

        monkeypatch.setattr(races, "run_own_turn", impatient)

    return after


def test_ctrl_c_leaves_whole_rounds(
    call: Run, pair: tuple[object, ...], interrupted: Callable[[int], None]
):
    interrupted(17)  # in the round after the first
    code, out, _ = call(*pair, *QUICK, "--json")
    document = json.loads(out)
    assert code == 130 and document["interrupted"]
    assert {row["speedup"]["n"] for row in document["figures"]} == {1}
    interrupted(4)
    code, out, err = call(*pair, *QUICK, "--json")
    assert code == 130 and not out and "interrupted before the end of the first round" in err


@pytest.mark.prove
def test_what_is_printed_fits_the_terminal(
    call: Run, pair: tuple[object, ...], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setattr("foretoken.costing.contention.compute_others_share", lambda spans: 0.23)
    code, out, _ = call(*pair, *QUICK, "--batch", "1,2", "--temperature", 1)
    assert code == 0
    heads = ("first ms", "tokens/s", "quartiles", "a call", "alpha", "theory", "speed-up")
    for words in (*heads, "gamma 2", "automatic", "batch size 2", "temperature 1", "process peak"):
        assert words in " ".join(out.split())
    assert "other processes took 23% of" in out.replace("\n", " ")
    assert ("speculate" in out or "undecided" in out) and "foretoken generate --target" in out
    paths = {str(pair[0]), str(pair[2])}
    for line in out.splitlines():
        assert len(line) <= 80 or paths & {word.strip(",:") for word in line.split()}
        assert "…" not in line


def test_without_a_draft_there_is_plain_decoding_only(call: Run, pair: tuple[object, ...]):
    code, out, _ = call(*pair[:1], *pair[3:], *QUICK, "--draft", "none")
    assert code == 0 and "do not speculate: there is no draft" in out and "gamma 2" not in out


def test_messages(call: Run, tmp_path: Path):
    tokenizer = byte_level()
    tokenizer.chat_template = "{% for m in messages %}{{ m.content }} {% endfor %}"
    model = folder(tmp_path / "m", llama(320), tokenizer)
    file = tmp_path / "p.jsonl"
    file.write_text('{"messages": [{"role": "user", "content": "Where?"}]}\n{"prompt": "It"}\n')
    args = (model, "--draft", "lookup", "--prompts", file, *QUICK, "--repeats", 1, "--json")
    result = call(*args)
    assert result.code == 0 and json.loads(result.out)["asked"]["prompts"] == 2
    file.write_text('{"messages": [{"role": "user", "content": "Where?"}], "top_k": 3}\n')
    mistake(call(*args), "p.jsonl, line 1: top_k is unknown here")


def test_results_by_category(call: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("COLUMNS", "80")
    tokenizer = byte_level()
    tokenizer.chat_template = "{{ mood }}{% for m in messages %}{{ m.content }} {% endfor %}"
    model = folder(tmp_path / "m", llama(320), tokenizer)
    file, out = tmp_path / "p.jsonl", tmp_path / "new.json"
    turns = {"coding": ["ab ab ab", "cd"], "qa": ["Who?"], "high_entropy": ["xyz xyz"]}
    rows = [
        {"question_id": f"{i}", "category": c, "turns": t} for c, t in turns.items() for i in "12"
    ]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    quick = ("--draft", "lookup", "--prompts", file, *QUICK, "--out", out)
    code, shown, _ = call(model, *quick, "--limit", 1, "--batch", "1,2")
    document = json.loads(out.read_text())
    assert code == 0 and document["asked"]["prompts"] == 3 and len(document["figures"]) == 6
    for row in document["figures"]:
        assert list(row["categories"]) == list(turns)
        for figures in row["categories"].values():
            assert figures["sequences"] == row["batch"] and figures["speedup"]["n"] == 2
            assert figures["tokens_per_second"]["median"] > 0 and figures["tokens_per_call"] >= 1
            assert row["gamma"] != 0 or figures["speedup"]["median"] == 1.0
    lines = shown.splitlines()
    assert all(sum(line.startswith(name) for line in lines) == 2 for name in turns)
    assert "plain     tokens/s of plain decoding" in lines and "…" not in shown
    assert call(model, *quick, "--limit", 1, "--batch", "1,2").code == 0  # nothing is left to do
    mistake(call(model, *quick, "--limit", 2, "--batch", "1,2"), OTHER)
    mood = ("--chat-template-kwargs", '{"mood": "!"}')
    mistake(call(model, *quick, "--limit", 1, "--batch", "1,2", *mood), OTHER)
    tokenizer.chat_template = None
    bare = folder(tmp_path / "bare", llama(320), tokenizer)
    mistake(call(bare, *quick[:-2]), "p.jsonl, line 1: the tokenizer has no chat template; give")


def test_the_plan_loads_and_serves(call: Run, pair: tuple[object, ...], tmp_path: Path):
    out = tmp_path / "new.json"
    assert call(*pair, *QUICK, "--out", out).code == 0
    best = json.loads(out.read_text())["best"]
    assert best["load"] == {"target": str(pair[0]), "draft": best["draft"]}
    spec = foretoken.load(**best["load"])
    assert spec.target_name == str(pair[0])
    assert spec.generate([[5, 17]], max_new_tokens=3, **best["generate"])
    assert parse_speculative_config(str(out)) == (best["draft"], best["generate"]["gamma"], "block")


@pytest.mark.parametrize(
    ("draft", "certain", "says"),
    [
        ("a/d", True, "speculate with a/d, gamma 2: 1.30x plain decoding"),
        ("none", True, "do not speculate: a/d gives 1.30x plain decoding at best"),
        (
            "none",
            False,
            "undecided: a/d gives 1.30x plain decoding at best, but the times vary too much",
        ),
    ],
)
def test_the_verdict(draft: str, certain: bool, says: str, capsys: pytest.CaptureFixture[str]):
    gamma = 2 if draft != "none" else 0
    measured = PlanOptions(gamma, "block", 0.0, 0, 1.0)
    plan = Plan(draft, gamma, 1.3, certain, "a/d", {"target": "a/t", "draft": draft}, measured)
    _advise(asdict(plan), open_console())
    said = " ".join(capsys.readouterr().out.split())
    assert said.startswith(says) and f"foretoken generate --target a/t --draft {draft} " in said
    assert ("measure again with more prompts" in said) is not certain


@pytest.mark.prove
def test_text_prompts_and_an_encoder_decoder(call: Run, tmp_path: Path):
    model = folder(tmp_path / "t5", t5(), byte_level())
    code, out, _ = call(model, "--draft", model, *QUICK, "--json")  # the texts that are built in
    assert code == 0 and json.loads(out)["asked"]["prompts"] == 4
