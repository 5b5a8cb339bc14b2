"""`foretoken drafts`: the drafts for a target on this machine, and on a stand-in of the hub."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import constants

from console import Run, mistake
from foretoken.loading import hub, known_drafts
from hub_server import Answer, empty_cache, entry, serve_hub
from tiny import byte_level, folder, llama

TARGET = "lab/Mini-3.5-8B"
KNOWN = {"Mini-3.5-8B": ("other/mini35_eagle3", "gone/mini_eagle3")}
CONFIG = {"model_type": "llama", "vocab_size": 320, "hidden_size": 64}


def based_on(relation: str) -> tuple[str, str]:
    """The tags that the hub gives to a model whose page names the target as its base model."""
    return f"base_model:{TARGET}", f"base_model:{relation}:{TARGET}"


MODELS = [
    entry(TARGET, "license:mit", bf16=8_000, files=CONFIG | {"mtp_num_hidden_layers": 1}),
    entry("other/mini35_eagle3", "license:apache-2.0", bf16=500, downloads=3),
    # declared by its base model; its kind is in its tags or its config
    entry("x/speculator-a", *based_on("finetune"), architectures=["Eagle3Model"]),
    entry("x/speculator-b", *based_on("adapter"), "dspark", downloads=2),
    entry("x/eagle3-tuned", *based_on("finetune"), downloads=7, bf16=400),
    # by its name; the name of another target begins alike
    entry("y/Mini-3.5-8B-speculator.dflash2", "speculators", bf16=600, downloads=9),
    entry("y/Mini-3.5-8B-Instruct-speculator.eagle3", "speculators", bf16=600),
    entry("y/Mini-3.5-8B-speculator.peagle", "speculators"),
    entry("lab/Mini-3.5-8B-assistant", model_type="gemma4_assistant", bf16=100),
    # neither a model that assists nor a file of another format
    entry("z/Mini-3.5-8B-medical-assistant", *based_on("finetune"), model_type="llama"),
    entry("z/Mini-3.5-8B-eagle3-GGUF", "gguf", *based_on("quantized")),
    # of the same family: smaller, too large, with another vocabulary, gated
    entry("lab/Mini-3.5-2B", bf16=2_000, downloads=1, files=CONFIG),
    entry("lab/Mini-3.5-1B", bf16=1_000, files={"text_config": CONFIG}),
    entry("lab/Mini-3.5-7B", bf16=7_000, files=CONFIG),
    entry("lab/Mini-3.5-3B", bf16=3_000, files=CONFIG | {"vocab_size": 999}),
    entry("lab/Mini-3.5-4B", bf16=4_000),
    entry("lab/Mini-3-1B", bf16=1_000, files=CONFIG),
    entry("quantizer/Mini-FP8", *based_on("quantized"), bf16=4_000, files=CONFIG),
]


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache of the hub, no package with a model, and a table of two known drafts."""
    monkeypatch.setattr(known_drafts, "KNOWN_DRAFTS", KNOWN)
    return empty_cache(tmp_path, monkeypatch)


@pytest.fixture
def requests(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    with serve_hub(MODELS, monkeypatch) as requests:
        yield requests


def made(path: Path, size: int, **config: Any) -> Path:
    path.mkdir(parents=True)
    (path / "config.json").write_text(json.dumps(CONFIG | config))
    (path / "model.safetensors").write_bytes(b"0" * size)
    return path


def listed(console: Run, *args: object) -> list[list[Any]]:
    """Name, kind and reason of each draft in the JSON document, in order."""
    result = console("drafts", *args, "--json")
    assert result.code == 0 and result.err == ""
    drafts = json.loads(result.out)["drafts"]
    return [[each["name"], each["kind"], each["why"]] for each in drafts]


BUILT_IN = [
    ["lookup", "lookup", "built-in"],
    ["self:int8", "self", "built-in"],
    ["self:int4", "self", "built-in"],
]


def test_the_hub_lists_what_was_made_for_the_target(console: Run, requests: list[Any]) -> None:
    assert listed(console, TARGET, "--online") == [
        ["other/mini35_eagle3", "eagle3", "known"],
        ["x/eagle3-tuned", "eagle3", "declared"],
        ["x/speculator-b", "dspark", "declared"],
        ["x/speculator-a", "eagle3", "declared"],
        ["y/Mini-3.5-8B-speculator.dflash2", "dflash2", "named"],
        ["lab/Mini-3.5-8B-assistant", "assistant", "named"],
        ["mtp", "mtp", "built-in"],
        ["lab/Mini-3.5-1B", "model", "smaller"],
        ["lab/Mini-3.5-2B", "model", "smaller"],
        *BUILT_IN,
        ["y/Mini-3.5-8B-speculator.peagle", "peagle", "named"],
    ]
    assert {path for path, _ in requests} >= {"/api/models", f"/api/models/{TARGET}"}


def test_the_table_has_sizes_licenses_and_reasons(console: Run, requests: list[Any]) -> None:
    result = console("drafts", TARGET, "--online")
    assert result.code == 0
    lines = {line.split()[0]: line.split() for line in result.out.splitlines() if line.strip()}
    assert lines["other/mini35_eagle3"][1:] == ["eagle3", "known", "no", "apache-2.0", "0"]
    assert "peagle (not supported)" in result.out
    assert "declared: its config, or its page on the hub, names the target" in result.out
    assert "fits:" not in result.out
    (row,) = [
        each
        for each in json.loads(console("drafts", TARGET, "--online", "--json").out)["drafts"]
        if each["name"] == "y/Mini-3.5-8B-speculator.dflash2"
    ]
    assert row["size"] == 1_200 and row["downloads"] == 9 and row["supported"]
    assert row["license"] is None and not row["local"]


def test_drafts_for_the_original_draft_for_its_quantized_copy(
    console: Run, requests: list[Any]
) -> None:
    names = [name for name, *_ in listed(console, "quantizer/Mini-FP8", "--online")]
    assert {"other/mini35_eagle3", "x/eagle3-tuned", "lab/Mini-3.5-1B"} < set(names)


def test_nothing_is_requested_without_online(console: Run, requests: list[Any]) -> None:
    known = [[name, "eagle3", "known"] for name in KNOWN["Mini-3.5-8B"]]
    assert listed(console, TARGET) == [*known, *BUILT_IN]
    assert listed(console, "someone/Mini-3.5-8B-GGUF:mini-3.5-8b-Q4_K_M.gguf")[0] == known[0]
    assert listed(console, "lab/Mini-3.5-8B-Instruct") == BUILT_IN
    assert "only names were compared" in console("drafts", TARGET).out
    assert requests == []


def test_drafts_on_this_machine(tmp_path: Path, console: Run) -> None:
    target = made(tmp_path / "all" / "Mini-3.5-8B", 900)
    small = made(tmp_path / "all" / "small", 300)
    eagle = made(tmp_path / "all" / "Mini-3.5-8B-eagle3", 100, architectures=["Eagle3"])
    made(tmp_path / "all" / "other", 100, vocab_size=999)
    assert listed(console, target, tmp_path / "all") == [
        [str(eagle), "eagle3", "named"],
        *([name, "eagle3", "known"] for name in KNOWN["Mini-3.5-8B"]),
        [str(small), "model", "fits"],
        *BUILT_IN,
    ]
    assert listed(console, "novels")[0] == ["novels", "model", "fits"]
    for name in ("HuggingFaceTB/SmolLM2-135M-Instruct", "a/b:SmolLM2-135M-Instruct-Q4_K_M.gguf"):
        assert listed(console, name)[0] == ["smollm2", "eagle3", "declared"]
    mistake(console("drafts", eagle), "is a draft (eagle3), not a target; give its target")


def test_a_draft_in_the_cache_of_the_hub_comes_first(cache: Path, console: Run) -> None:
    made(
        cache / "models--some--Mini-3.5-8B-DFlash" / "snapshots" / ("a" * 40),
        100,
        dflash_config={},
    )
    (cache / "models--some--Mini-3.5-8B-DFlash" / "blobs").mkdir()
    (cache / "models--gone--mini_eagle3").mkdir()
    assert listed(console, TARGET)[0] == ["some/Mini-3.5-8B-DFlash", "dflash", "named"]
    assert known_drafts.list_known_drafts(TARGET) == [
        "gone/mini_eagle3",
        "some/Mini-3.5-8B-DFlash",
        "other/mini35_eagle3",
    ]


def test_layers_for_multi_token_prediction(tmp_path: Path, console: Run) -> None:
    """They are listed if the files have them, not only the config."""
    path = folder(tmp_path / "target", llama(320), byte_level())
    config = json.loads((path / "config.json").read_text()) | {"num_nextn_predict_layers": 1}
    (path / "config.json").write_text(json.dumps(config))
    assert listed(console, path) == BUILT_IN
    import safetensors.torch

    weights = safetensors.torch.load_file(path / "model.safetensors")
    weights["mtp.fc.weight"] = weights["model.norm.weight"].clone()
    safetensors.torch.save_file(weights, path / "model.safetensors", {"format": "pt"})
    assert listed(console, path) == [["mtp", "mtp", "built-in"], *BUILT_IN]


def test_a_hub_that_cannot_be_reached(
    console: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The local drafts are still printed."""
    result = console("drafts", TARGET, "--online")
    assert result.code == 2 and "other/mini35_eagle3" in result.out
    assert result.err == (
        f"error: {TARGET} cannot be searched for drafts: HF_HUB_OFFLINE prevents access to the "
        "hub; leave out --online, or check the network, HF_ENDPOINT, HF_TOKEN and HF_HUB_OFFLINE\n"
    )
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    result = console("drafts", TARGET, "--online", "--json")
    assert result.code == 2 and "the hub cannot be reached (" in result.err
    document = json.loads(result.out)
    assert document["problem"] == result.err.removeprefix("error: ").strip()
    assert len(document["drafts"]) == 5
    result = console("drafts", made(tmp_path / "target", 10), "--online")
    assert result.code == 2 and "needs the hub id of the target (owner/name)" in result.err


@pytest.mark.parametrize(
    ("answer", "problem"),
    [
        ({"status": 401}, "the hub answered with status 401"),
        ({"status": 403, "code": "GatedRepo"}, "the hub answered with status 403"),
        ({"status": 404}, "the hub has no such model"),
        ({"status": 503}, "the hub answered with status 503"),
        ({"data": b"<html>a page</html>"}, "the hub's answer cannot be read"),
        ({"data": b"null"}, "the hub's answer cannot be read"),
        ({"seconds": 10}, "the hub cannot be reached (timed out)"),
    ],
)
@pytest.mark.parametrize("path", ["/api/models", f"/api/models/{TARGET}"])
def test_a_hub_with_unusual_answers(
    console: Run, monkeypatch: pytest.MonkeyPatch, path: str, answer: dict[str, Any], problem: str
) -> None:
    """Each list is waited for as briefly as the target's description."""
    monkeypatch.setattr(hub, "HUB_TIMEOUT_SECONDS", 0.5)
    with serve_hub(MODELS, monkeypatch, {path: Answer(**answer)}):
        result = console("drafts", TARGET, "--online")
    assert result.code == 2 and "other/mini35_eagle3" in result.out
    assert f"{TARGET} cannot be searched for drafts: {problem}; " in result.err


def test_brackets_and_colons_in_names(tmp_path: Path, console: Run) -> None:
    """They are neither markup nor emoji."""
    target = made(tmp_path / "target", 900)
    small = made(tmp_path / "[bold]:cat:[red]", 300)
    assert str(small) in console("drafts", target, tmp_path).out


def test_the_name_of_a_draft(console: Run, requests: list[Any]) -> None:
    """Its name or its description on the hub says that it is a draft."""
    for name, kind in (("gone/mini_eagle3", "eagle3"), ("a/B-DFlash-b16", "dflash")):
        mistake(console("drafts", name), f"{name} is a draft ({kind}), not a target; give its tar")
    assert listed(console, "z/Mini-3.5-8B-medical-assistant") == BUILT_IN
    result = console("drafts", "x/speculator-a", "--online")
    assert result.code == 2 and "x/speculator-a is a draft (eagle3), not a target" in result.err


def test_names_that_are_not_models(console: Run, requests: list[Any], tmp_path: Path) -> None:
    result = console("drafts", "lab/unknown", "--online")
    assert result.code == 2 and "the hub has no such model; give a model's folder" in result.err
    mistake(console("drafts", tmp_path), "holds no config.json")
    mistake(console("drafts", "no/such.gguf"), "no/such.gguf cannot be read")
    for path in ("./nowhere", "../nowhere"):
        mistake(console("drafts", path), f"'{path}' is not a folder; give a model's folder")
    mistake(console("drafts", TARGET, tmp_path / "nowhere"), "is not a folder")
