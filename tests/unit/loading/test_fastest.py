"""The faster runtime of a CPU: by what passes took, kept where little else ran, and followed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import foretoken
import tiny
from foretoken.costing import contention
from foretoken.errors import RefusedError
from foretoken.loading import fastest, runtimes
from foretoken.loading.fastest import Fastest, PassSize
from foretoken.loading.runtimes import Early, Placement
from foretoken.loading.sources import source
from foretoken.models import store
from foretoken.models.blocks import found
from foretoken.models.stock.selfcheck import small_copy
from foretoken.storage.cache import remembered
from tiny import folder
from tiny_families import build


class Rows:
    """A model that counts its passes."""

    def __init__(self, name: str) -> None:
        self.name, self.passes = name, 0

    def start(self, prompts: list[list[int]]) -> None:
        assert all(prompt == [1] * fastest.PAST for prompt in prompts)
        self.rows = len(prompts)


@pytest.fixture
def seconds(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> dict[str, list[float]]:
    """Seconds of a pass by runtime, and by the place of its size among `passes`."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    made: dict[str, list[float]] = {"onnx": [1.0, 3.0, 4.0, 9.0], "openvino": [1.0, 2.0, 1.0, 2.0]}

    def taken(model: Any, size: PassSize, rows: int, rest: Any) -> float:
        assert len(rest) > 1000 and rows == model.rows
        model.passes += 1
        return made[model.name][[*fastest.passes(rows)].index(size)] + (model.passes % 3)

    monkeypatch.setattr(fastest, "_taken", taken)
    return made


def chosen(*names: str, dtype: str = "int8", rows: int = 1) -> Fastest:
    made: dict[str, Any] = {name: lambda network, dtype, name=name: Rows(name) for name in names}
    return fastest.fastest(build("Llama"), dtype, made, rows=rows)


def test_the_least_times_of_a_usual_text_decide(seconds: dict[str, list[float]]) -> None:
    assert chosen("onnx", "openvino").runtime == "openvino"  # 356 and 240
    (kept,) = remembered(fastest.FILE).values()
    assert kept["label"] == "LlamaForCausalLM, 32 wide, in int8" and kept["seconds"] == seconds
    seconds["onnx"][1] = 0.5  # too late: it is measured once
    assert chosen("onnx", "openvino").runtime == "openvino"
    assert chosen("onnx", "openvino", dtype="int4").runtime == "onnx"  # another precision


def test_the_first_runtime_is_left_for_a_clear_lead_alone(seconds: dict[str, list[float]]) -> None:
    seconds["openvino"] = [1.0, 2.5, 3.0, 6.0]  # 304, 1.17 times as fast
    assert chosen("onnx", "openvino").runtime == "onnx"
    assert chosen("openvino", "onnx").runtime == "openvino"


def test_many_rows_have_a_runtime_of_their_own(seconds: dict[str, list[float]]) -> None:
    # over a token of all rows, over four, and over a prompt
    seconds |= {"onnx": [2.0, 4.0, 4.0], "openvino": [2.0, 4.0, 1.0]}
    assert chosen("onnx", "openvino", rows=8).runtime == "openvino"  # 464 and 368
    seconds |= {"onnx": [1.0, 1.0, 1.0, 1.0], "openvino": [2.0, 2.0, 2.0, 2.0]}
    assert chosen("onnx", "openvino").runtime == "onnx"
    assert [each["rows"] for each in remembered(fastest.FILE).values()] == [8, 1]


def test_few_numbers_of_rows_are_measured() -> None:
    assert [fastest.measured_for(rows) for rows in (1, 2, 4, 5, 16, 17)] == [1, 4, 4, 16, 16, 64]
    for rows in (4, 16, 64):
        *decoding, prompts = fastest.passes(rows).values()
        assert sum(decoding) == 160 and prompts == 4 * rows


def test_a_pass_over_a_prompt_is_of_one_row() -> None:
    """Real passes over real rows: the others have no new tokens then, and all go back."""
    model: Any = foretoken.load(build("Llama"), "none").target
    model.start([[1] * fastest.PAST] * 3)
    for size in fastest.passes(3):
        assert fastest._taken(model, size, 3, np.ones(8, np.uint8)) > 0
        assert model.lengths == [fastest.PAST] * 3


def test_a_runtime_is_timed_once_whatever_else_runs(
    seconds: dict[str, list[float]], monkeypatch: pytest.MonkeyPatch, caplog: Any
) -> None:
    monkeypatch.setattr(contention, "share", lambda spans: 0.4)
    with caplog.at_level("INFO", "foretoken"):
        assert chosen("onnx", "openvino")[0] == "openvino"
        seconds["onnx"][1] = 0.5
        assert chosen("onnx", "openvino")[0] == "openvino"  # at the next start
    assert not caplog.messages


def test_a_runtime_that_refuses_is_left_out(seconds: dict[str, list[float]]) -> None:
    def refuse(network: Any, dtype: str) -> Any:
        raise RefusedError("not this family")

    makes: dict[str, Any] = {
        "openvino": refuse,
        "onnx": lambda network, dtype: Rows("onnx"),
    }
    assert fastest.fastest(build("Llama"), "int8", makes).runtime == "onnx"


def test_the_copy_of_a_gguf_file_has_blocks(seconds: dict[str, list[float]]) -> None:
    """Of four bits, and of eight in the output layer. Other weights stay as they are drawn."""
    seen: list[list[int | None]] = []

    def make(network: Any, dtype: str) -> Any:
        layers = network.model.layers[0].mlp.gate_proj, network.lm_head
        kept = [found(layer.weight.detach().numpy()) for layer in layers]
        seen.append([blocks and blocks.bits for blocks in kept])
        return Rows("onnx")

    for in_blocks in (False, True):
        fastest.fastest(build("Llama"), "int8", {"onnx": make}, in_blocks=in_blocks)
    assert seen == [[None, None], [4, 8]]


@pytest.mark.parametrize("layers", [2, 3, 4])
def test_the_copy_is_as_deep_as_it_may(
    seconds: dict[str, list[float]], monkeypatch: pytest.MonkeyPatch, layers: int
) -> None:
    network = tiny.llama(4096, num_hidden_layers=12)
    weight = sum(w.numel() for w in network.model.layers[0].parameters())
    monkeypatch.setattr(fastest, "WEIGHTS", (layers + 0.5) * weight)
    seen: list[tuple[int, int]] = []

    def make(network: Any, dtype: str) -> Any:
        seen.append((len(network.model.layers), network.config.vocab_size))
        return Rows("onnx")

    fastest.fastest(network, "int8", {"onnx": make})
    assert seen == [(layers, 4096 * layers // 12)]  # the output layer has the same share


def test_without_a_copy_the_first_is_taken(
    seconds: dict[str, list[float]], monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*args: Any) -> None:
        raise ValueError("no narrow configuration")

    monkeypatch.setattr("foretoken.models.stock.selfcheck.shrunk", broken)
    assert chosen("onnx", "openvino").runtime == "onnx"


@pytest.mark.onnx
@pytest.mark.openvino
@pytest.mark.parametrize("best", ["onnx", "openvino"])
def test_a_folder_runs_where_it_was_faster(
    best: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also in the next process, which reads no configuration for it."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    tiny.llama(64, head_dim=16).save_pretrained(tmp_path / "model")
    asked: list[tuple[str, int]] = []

    def measure(
        network: Any, dtype: str, makes: dict[str, Any], *, in_blocks: bool, rows: int
    ) -> Fastest:
        assert not in_blocks
        asked.append((dtype, rows))
        small = small_copy(type(network), network.config)
        assert {name: make(small, dtype).runtime for name, make in makes.items()} == {
            "onnx": "onnx",
            "openvino": "openvino",
        }
        return Fastest(best if rows == 1 else "openvino", True)

    monkeypatch.setattr(runtimes, "fastest", measure)
    for _ in range(2):
        assert foretoken.load(tmp_path / "model", "none", dtype="int8").target.runtime == best
    assert asked == [("int8", 1)] and len(store.entries()) == 1
    for _ in range(2):
        spec = foretoken.load(tmp_path / "model", "none", dtype="int8", rows=16)
        assert spec.target.runtime == "openvino"
    assert asked == [("int8", 1), ("int8", 16)]


@pytest.mark.onnx
@pytest.mark.openvino
def test_what_onnx_runtime_cannot_do_runs_on_openvino(tmp_path: Path) -> None:
    """Another family, another precision, and a cache of integers, without a measurement."""
    build("GPT-2").save_pretrained(tmp_path / "other")
    tiny.llama(64, head_dim=16).save_pretrained(tmp_path / "model")
    for path, options in (
        ("other", {}),
        ("model", {"dtype": "bfloat16"}),
        ("model", {"kv_dtype": "int8"}),
    ):
        keywords: dict[str, Any] = options
        spec = foretoken.load(tmp_path / path, "none", **keywords)
        assert spec.target.runtime == "openvino"


@pytest.mark.onnx
@pytest.mark.openvino
def test_a_kept_conversion_is_no_choice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """OpenVINO keeps one of a draft, or of a target that asked for it by name."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    model = folder(tmp_path / "model", tiny.llama(64, head_dim=16))
    foretoken.load(model, "none", dtype="int8", runtime="openvino")
    monkeypatch.setattr(runtimes, "fastest", lambda *args, **options: Fastest("onnx", True))
    assert foretoken.load(model, "none", dtype="int8").target.runtime == "onnx"
    early = Early(source(model, None, False), Placement("int8"))
    assert (read := early.model()) is not None and read.runtime == "onnx"
    monkeypatch.setattr(runtimes, "_onnx_library", lambda: pytest.fail("it was read in vain"))
    on_gpu = Placement("int8", torch.device("cuda"))
    assert Early(source(model, None, False), on_gpu).model() is None


@pytest.mark.onnx
@pytest.mark.openvino
def test_a_family_that_onnx_runtime_refuses_is_checked_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next process reads its conversion beside the tokenizer."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    model = folder(tmp_path / "model", build("GPT-2"))
    assert foretoken.load(model, "none", dtype="int8").target.runtime == "openvino"
    monkeypatch.setattr(runtimes, "_require_onnx", lambda network: pytest.fail("checked again"))
    early = Early(source(model, None, False), Placement("int8"))
    assert (read := early.model()) is not None and read.runtime == "openvino"


@pytest.mark.onnx
@pytest.mark.openvino
@pytest.mark.parametrize("family", ["Llama", "GPT-2"])
def test_two_precisions_are_compared_where_they_run(
    seconds: dict[str, list[float]], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, family: str
) -> None:
    """GPT-2 on OpenVINO, which is timed alone; Llama there, too, where it is asked for."""
    network = tiny.llama(64, head_dim=16) if family == "Llama" else build(family)
    model = source(folder(tmp_path / "model", network), None, False)
    times = {"int4": 2.0, "int8": 3.0}

    def taken(ready: Any, size: PassSize, rows: int, rest: Any) -> float:
        return times[ready.computed] * (1 if ready.runtime == "onnx" else 1.1)

    monkeypatch.setattr(fastest, "_taken", taken)
    passes = sum(fastest.passes(1).values())
    for dtype, each in times.items():
        best, asked = (
            runtimes.timed(model, Placement(dtype, runtime=runtime))
            for runtime in ("auto", "openvino")
        )
        assert best is not None and asked is not None
        assert asked.seconds == pytest.approx(passes * each * 1.1)
        if family == "Llama":
            assert (best.runtime, best.seconds) == ("onnx", pytest.approx(passes * each))
        else:
            assert best == asked
    assert runtimes.timed(model, Placement("int8", runtime="transformers")) is None
    pair = source(folder(tmp_path / "pair", build("T5")), None, False)
    assert runtimes.timed(pair, Placement("int8")) is None  # it reads no text alone


def test_nothing_is_timed_where_there_is_no_choice(
    seconds: dict[str, list[float]], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(network: Any, dtype: str) -> Any:
        raise RefusedError("not this family")

    monkeypatch.setattr(fastest, "_taken", lambda *args: pytest.fail("it was timed"))
    makes: dict[str, Any] = {"onnx": refuse, "openvino": lambda network, dtype: Rows("openvino")}
    best = fastest.fastest(build("Llama"), "int8", makes)
    assert (best.runtime, best.seconds) == ("openvino", None)


def test_the_share_of_the_vocabulary_is_that_of_the_layers(
    seconds: dict[str, list[float]],
) -> None:
    """Of two kinds of layers the copy has some of each."""
    config = build("Gemma 3").config
    settings = {"num_hidden_layers": 12, "layer_types": None, "vocab_size": 6000}
    network = type(build("Gemma 3"))(type(config)(**{**config.to_dict(), **settings}))
    seen: list[Any] = []

    def make(copy: Any, dtype: str) -> Any:
        seen.append(copy.config)
        return Rows("onnx")

    fastest.fastest(network, "int8", {"onnx": make})
    (copy,) = seen
    assert len(set(copy.layer_types)) == 2 and 4 < copy.num_hidden_layers < 12
    assert copy.vocab_size == 6000 * copy.num_hidden_layers // 12
