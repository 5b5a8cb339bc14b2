"""`foretoken bench` as a user meets it, on small random pairs; one peer is really run."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from console import Run
from foretoken.measurement import bench
from pairs import relative
from tiny import byte_level, folder, llama, t5

QUICK = ("--max-new-tokens", 8, "--repeats", 2, "--gamma", "2")


@pytest.fixture
def call(monkeypatch: pytest.MonkeyPatch, console: Run) -> Run:
    monkeypatch.setattr(bench, "REST_SECONDS", 0.0)
    return partial(console, "bench")


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[object, ...]:
    """A target without a tokenizer that ends texts early by itself, and two prompts."""
    base = tmp_path_factory.mktemp("pair")
    model = llama(V=64)
    model.generation_config.eos_token_id = list(range(1, 64))
    target, draft = folder(base / "target", model), folder(base / "draft", relative(model))
    prompts = base / "prompts.jsonl"
    prompts.write_text('{"prompt": [5, 17, 33]}\n{"prompt": "3,58,20,36"}\n')
    return "--target", target, "--draft", draft, "--prompts", prompts


@pytest.mark.prove
def test_a_document_with_a_peer(call: Run, pair: tuple[object, ...], tmp_path: Path):
    code, out, _ = call(*pair, *QUICK, "--vs", "transformers", "--out", tmp_path / "new", "--json")
    assert code == 0
    document = json.loads(out)
    assert document["rounds"] == 2 and not document["interrupted"]
    names = [(row["name"], row["variant"]) for row in document["figures"]]
    own = [("foretoken", name) for name in ("plain", "gamma 2", "automatic")]
    assert names == [*own, ("transformers", "plain"), ("transformers", "gamma 2")]
    for row in document["figures"]:
        assert row["agreement"] == {"share": 1.0, "first_difference": None}
        assert row["seconds_per_token"]["n"] == 2 and row["tokens_per_second"]["median"] > 0
    plain, two = document["figures"][:2]
    assert plain["speedup"] == 1.0 and plain["tokens_per_call"] == 1.0
    assert plain["predicted"] is None and plain["measured_over_predicted"] is None
    assert two["measured_over_predicted"] == two["speedup"] / two["predicted"]["predicted"]
    assert document["precision"]["weights"] == "float32"
    assert document["peers"]["transformers"]["precision"]["weights"] == "float32"
    (duel,) = document["duels"]
    assert duel["name"] == "transformers" and duel["plain"] > 0 and duel["best"] > 0
    assert json.loads((tmp_path / "new" / "bench.json").read_text()) == document


@pytest.mark.prove  # a peer's process takes seconds to begin
def test_a_peer_that_cannot_read_the_draft_decodes_plainly(call: Run, pair: tuple[object, ...]):
    code, out, _ = call(*pair, "--draft", "lookup", *QUICK, "--vs", "transformers", "--json")
    document = json.loads(out)
    note = document["peers"]["transformers"]["note"]
    assert code == 0 and note == "plain only: it cannot read the draft"
    names = [(row["name"], row["variant"]) for row in document["figures"]]
    own = [("foretoken", name) for name in ("plain", "gamma 2", "automatic")]
    assert names == [*own, ("transformers", "plain")]


BATCHES = (*QUICK, "--batch", "1,3")


@pytest.mark.prove  # a peer's process takes seconds to begin
def test_a_document_of_batches(call: Run, pair: tuple[object, ...]):
    """Three texts of two prompts at once; transformers, as it is, takes them together."""
    code, out, _ = call(*pair, *BATCHES, "--vs", "transformers", "--json")
    document = json.loads(out)
    assert code == 0 and not document["interrupted"]
    assert [at["batch"] for at in document["batches"]] == [1, 3]
    ours = [("foretoken", name) for name in ("plain", "gamma 2", "automatic")]
    theirs = [("transformers", "plain"), ("transformers", "gamma 2")]
    for at in document["batches"]:
        assert at["rounds"] == 2 and [duel["name"] for duel in at["duels"]] == ["transformers"]
        assert [(row["name"], row["variant"]) for row in at["figures"]] == [*ours, *theirs]
        for row in at["figures"]:
            assert row["agreement"] == {"share": 1.0, "first_difference": None}
            assert row["tokens_per_second"]["n"] == 2 and row["tokens_per_second"]["median"] > 0
            own = row["name"] == "foretoken"
            assert (row["occupancy"] is not None) == (row["padding"] is not None) == own
        plain = at["figures"][0]
        assert plain["speedup"] == 1.0 and 0 <= plain["padding"] < 1
        assert plain["occupancy"] == pytest.approx(1.0)  # all have the same length


def test_tables(call: Run, pair: tuple[object, ...]):
    code, out, _ = call(*pair, *QUICK, "--temperature", 1)
    assert code == 0
    heads = ("first ms", "tokens/s", "of it", "verify", "speed-up", "target")
    for words in (*heads, "gamma 2", "automatic", "best fixed one", "temperature 1"):
        assert words in out
    assert "…" not in out and "against" not in out


def test_where_the_time_went_and_a_picture(call: Run, pair: tuple[object, ...], tmp_path: Path):
    pytest.importorskip("matplotlib")
    picture = tmp_path / "speed.svg"
    result = call(*pair, *QUICK, "--json", "--svg", picture)
    figures = json.loads(result.out)["figures"]
    for row in figures:
        assert sum(row["shares"].values()) == pytest.approx(1)
        assert 0 < row["shares"]["target"] < 1 and row["first_seconds"]["median"] > 0
    assert figures[0]["shares"]["draft"] < 0.1 < figures[1]["shares"]["draft"]
    for label in ("foretoken, automatic", "foretoken, predicted", "gamma, draft tokens per step"):
        assert label in picture.read_text()
    shown = call(*pair, *QUICK, "--batch", "1,2", "--svg", picture)
    assert shown.code == 0 and "foretoken, 2 at once" in picture.read_text()


def test_a_picture_needs_matplotlib(call: Run, pair: tuple[object, ...], monkeypatch):
    monkeypatch.setattr("foretoken.cli.option.find_spec", lambda name: None)
    code, _, err = call(*pair, *QUICK, "--svg", "a.svg")
    assert code == 2 and "--svg draws; give it matplotlib: pip install 'foretoken[plot]'" in err


def test_what_other_processes_took_is_said(call: Run, pair: tuple[object, ...], monkeypatch):
    monkeypatch.setattr("foretoken.costing.contention.share", lambda spans: 0.23)
    for more in ((), ("--batch", "1")):
        assert "other processes took 23% of" in call(*pair, *QUICK, *more).out
    assert json.loads(call(*pair, *QUICK, "--json").out)["others"] == 0.23


FAKE = """
import json, sys
for i, line in enumerate(sys.stdin):
    asked = json.loads(line)
    if sys.argv[1] == "at load":
        reply = {"error": "Q8_0 holds blocks of 32, not 48"}
    elif i == 0:
        reply = {"version": "1", "precision": {"weights": "float32"}}
        if sys.argv[1] == "plainly":
            reply["plain_only"] = "it takes no states"
    elif sys.argv[1] == "in a round" and asked["gamma"]:
        reply = {"error": "no room for guesses"}
    else:
        text = {"tokens": [1] * asked["max_new_tokens"], "first_tokens": 1}
        reply = {"texts": [text | {"first_seconds": 0.1, "seconds": 0.5}] * len(asked["prompts"])}
    print(json.dumps(reply), flush=True)
"""


@pytest.fixture
def peers(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """llama.cpp cannot load, openvino-genai cannot guess, transformers can do all."""
    fails = {"llama.cpp": "at load", "openvino-genai": "in a round", "transformers": "never"}
    (tmp_path / "fake.py").write_text(FAKE)
    monkeypatch.setattr(
        bench, "command", lambda name: [sys.executable, str(tmp_path / "fake.py"), fails[name]]
    )


VS = ("--vs", "llama.cpp", "--vs", "openvino-genai", "--vs", "transformers")
UNABLE = {
    "llama.cpp": "Q8_0 holds blocks of 32, not 48",
    "openvino-genai": "gamma 2: no room for guesses",
}


@pytest.mark.usefixtures("peers")
def test_a_peer_that_cannot_run_the_pair_is_named_and_the_others_go_on(
    call: Run, pair: tuple[object, ...]
):
    code, out, _ = call(*pair, *QUICK, *VS, "--json")
    document = json.loads(out)
    assert code == 0 and document["rounds"] == 2 and not document["interrupted"]
    assert document["unable"] == UNABLE
    assert {row["name"] for row in document["figures"]} == {"foretoken", "transformers"}
    assert [duel["name"] for duel in document["duels"]] == ["transformers"]
    assert list(document["peers"]) == ["transformers"]


def test_a_peer_that_decodes_only_plainly_with_this_pair(
    call: Run, pair: tuple[object, ...], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    (tmp_path / "fake.py").write_text(FAKE)
    fake = [sys.executable, str(tmp_path / "fake.py"), "plainly"]
    monkeypatch.setattr(bench, "command", lambda name: fake)
    code, out, _ = call(*pair, *QUICK, *VS[:2], "--json")
    document = json.loads(out)
    rows = [(row["name"], row["variant"]) for row in document["figures"]]
    assert code == 0 and [row for row in rows if row[0] == "llama.cpp"] == [("llama.cpp", "plain")]
    assert document["peers"]["llama.cpp"]["note"] == "plain only: it takes no states"


@pytest.mark.usefixtures("peers")
def test_a_peer_that_cannot_run_the_pair_is_told(call: Run, pair: tuple[object, ...]):
    code, out, _ = call(*pair, *QUICK, *VS)
    assert code == 0 and out.count("cannot run") == 2
    for name, why in UNABLE.items():
        assert f"{name} cannot run this pair: {why}\n" in out


@pytest.mark.usefixtures("peers")
def test_a_peer_that_cannot_draft_token_for_several_is_named_with_their_number(
    call: Run, pair: tuple[object, ...]
):
    code, out, _ = call(*pair, *BATCHES, *VS[2:], "--json")
    document = json.loads(out)
    assert code == 0 and document["unable"] == {
        "openvino-genai": "batch 1, gamma 2: no room for guesses"
    }
    for at in document["batches"]:
        assert {row["name"] for row in at["figures"]} == {"foretoken", "transformers"}


@pytest.mark.parametrize(
    "vs", [(), pytest.param(("--vs", "transformers"), marks=pytest.mark.prove)]
)
def test_text_prompts_and_an_encoder_decoder(call: Run, tmp_path: Path, vs: tuple[str, ...]):
    model = folder(tmp_path / "t5", t5(), byte_level())
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("It was the first day\n")
    pair = ("--target", model, "--draft", model, "--prompts", prompts)
    code, out, _ = call(*pair, *QUICK, *vs, "--json")
    assert code == 0
    assert all(row["agreement"]["share"] == 1.0 for row in json.loads(out)["figures"])


def test_without_a_draft_there_is_plain_decoding_only(call: Run, pair: tuple[object, ...]):
    code, out, _ = call(*pair, *QUICK, "--draft", "none", "--json")
    document = json.loads(out)
    assert code == 0 and [row["gamma"] for row in document["figures"]] == [0]
    assert document["automatic_over_best"] is None and document["duels"] == []


@pytest.fixture
def interrupted(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Ctrl-C in our own n-th turn."""

    def after(n: int) -> None:
        turns, own = iter(range(1, n + 1)), bench.own

        def impatient(*args: Any, **how: Any) -> list[bench.RaceRun]:
            if next(turns) == n:
                raise KeyboardInterrupt
            return own(*args, **how)

        monkeypatch.setattr(bench, "own", impatient)

    return after


def test_ctrl_c_leaves_whole_rounds(
    call: Run, pair: tuple[object, ...], tmp_path: Path, interrupted: Callable[[int], None]
):
    interrupted(17)  # two prompts and three gammas are six runs: in the round after the first
    code, _, _ = call(*pair, *QUICK, "--out", tmp_path)
    document = json.loads((tmp_path / "bench.json").read_text())
    assert code == 130 and document["interrupted"] and document["rounds"] == 1


def test_ctrl_c_leaves_the_batches_that_were_done(
    call: Run, pair: tuple[object, ...], tmp_path: Path, interrupted: Callable[[int], None]
):
    interrupted(12)  # three gammas and three rounds with the one that warms up: nine of a batch
    code, out, _ = call(*pair, *BATCHES, "--out", tmp_path)
    document = json.loads((tmp_path / "bench.json").read_text())
    assert code == 130 and document["interrupted"] and "1 at once" in out
    assert [(at["batch"], at["rounds"]) for at in document["batches"]] == [(1, 2)]


def test_ctrl_c_while_it_warms_up(
    call: Run, pair: tuple[object, ...], interrupted: Callable[[int], None]
):
    interrupted(10)
    code, out, err = call(*pair, *QUICK, "--json")
    assert code == 130 and not out and "interrupted before the first round" in err


@pytest.mark.parametrize(
    ("args", "told"),
    [
        (("--gamma", "2,x"), "gamma is '2,x'; give numbers separated by commas"),
        (("--gamma", "-1"), "gamma is -1"),
        (("--max-new-tokens", 3, "--gamma", 2), "too few to time gamma 2; give 4 or more"),
        (("--max-new-tokens", 5000), "prompt 0 leaves room for 93 new tokens, not 5000"),
        (("--repeats", 0), "repeats is 0; give 1 or more"),
        (("--vs", "vllm"), "--vs is 'vllm'; give one of"),
        (("--vs", "transformers", "--vs", "transformers"), "names a peer twice"),
        (("--vs", "transformers", "--adapter", "x"), "without --adapter; leave out one"),
        (("--batch", "1,x"), "batch is '1,x'; give numbers separated by commas"),
        (("--batch", "0,1"), "batch is [0, 1]; give numbers from 1 to 16"),
        (("--batch", "8,17"), "batch is [8, 17]; give numbers from 1 to 16"),
        (("--batch", "2", "--vs", "llama.cpp"), "llama.cpp runs one text at a time; leave it"),
    ],
)
def test_mistakes_are_one_line(
    call: Run, pair: tuple[object, ...], args: tuple[object, ...], told: str
):
    code, out, err = call(*pair, *args)
    assert code == 2 and not out and told in err
    assert err.startswith("error: ") and err.count("\n") == 1


@pytest.mark.parametrize("args", [(*QUICK, *VS), (*BATCHES, *VS[2:])])
@pytest.mark.usefixtures("peers")
def test_what_is_printed_fits_the_terminal(
    call: Run,
    pair: tuple[object, ...],
    monkeypatch: pytest.MonkeyPatch,
    args: tuple[object, ...],
):
    monkeypatch.setenv("COLUMNS", "80")
    code, out, _ = call(*pair, *args)
    assert code == 0 and "a call    tokens a" in out  # a legend
    paths = {str(pair[1]), str(pair[3])}
    for line in out.splitlines():
        assert len(line) <= 80 or paths & {word.strip(",:") for word in line.split()}
        assert "…" not in line
