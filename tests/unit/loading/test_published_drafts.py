"""A folder is found out to be a draft, of which kind, and whether it fits the target; greedy texts
with it are the target's own."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import PreTrainedModel
from typer.testing import CliRunner

import assistants
import blocks
import foretoken
import pairdrafts
import tiny
from foretoken import cli
from foretoken.errors import ForetokenError, InputError, RefusedError
from foretoken.loading.published_drafts import get_draft_kind
from foretoken.loading.weights import FolderWeights
from loads import refused

PROMPTS = [[5, 9, 17], [3]]


def saved(folder: Path, config: dict[str, Any], tensors: dict[str, Tensor]) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config, default=str))
    save_file(
        {name: x.clone().contiguous() for name, x in tensors.items()}, folder / "model.safetensors"
    )
    return folder


def llama(folder: Path) -> tuple[PreTrainedModel, Path]:
    target = tiny.llama(320, context=128, num_hidden_layers=6)
    target.save_pretrained(folder / "target")
    return target, folder / "target"


def blocks_of(place: Path, target: PreTrainedModel, kind: str = "dspark") -> Path:
    added = blocks.ADDED if kind == "dflash2" else {}
    config = blocks.DOMINO if kind == "domino" else blocks.speculators(kind, **added)
    return saved(place, config, blocks.tensors(config, target))


def assert_own_texts(spec: foretoken.Speculator) -> None:
    drafted = spec.generate(PROMPTS, max_new_tokens=16, gamma=3)
    plain = spec.generate(PROMPTS, max_new_tokens=16, gamma=0)
    assert [text.tokens for text in drafted] == [text.tokens for text in plain]
    assert sum(text.stats.drafted for text in drafted) > 0


@pytest.mark.daily("dflash-transformers", "dflash-graphs", "dspark-native")
@pytest.mark.parametrize(
    ("kind", "runtime"),
    [
        pytest.param(kind, runtime, marks=marks, id=f"{kind}-{runtime}")
        for kind in ("dflash", "dflash2", "domino", "dspark")
        for runtime, marks in (
            ("transformers", ()),
            ("graphs", ()),
            ("native", pytest.mark.native),
        )
    ],
)
def test_blocks(kind: str, runtime: str, tmp_path: Path) -> None:
    target, folder = llama(tmp_path)
    draft = blocks_of(tmp_path / kind, target, kind)
    spec = foretoken.load(folder, draft, runtime=runtime)
    (model,) = spec.drafter.holds
    assert (spec.target.runtime, spec.drafter.runtime) == (runtime, runtime)
    default = "int8" if runtime == "native" else "float32"
    assert spec.target.taps and model.compute_dtype == default
    assert_own_texts(spec)
    assert spec.generate(PROMPTS[0], gamma=3)[0].stats.draft_runtime == runtime
    spec = foretoken.load(folder, draft, runtime=runtime, draft_dtype="bfloat16")
    assert spec.drafter.holds[0].compute_dtype == "bfloat16"
    assert_own_texts(spec)
    if runtime == "transformers":
        refused(
            RefusedError, "draft_dtype='int8' is supported only by the native", folder, draft,
            draft_dtype="int8", runtime=runtime,
        )  # fmt: skip


@pytest.mark.native
def test_blocks_that_native_cannot_run_do_so_on_torch(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    target, folder = llama(tmp_path)
    config = {**blocks.ZLAB, "layer_types": ["sliding_attention"] * 2, "sliding_window": 2}
    config |= {"use_sliding_window": True}
    draft = saved(tmp_path / "draft", config, blocks.tensors(config, target))
    with caplog.at_level("INFO"):
        spec = foretoken.load(folder, draft, runtime="native")
    assert spec.drafter.runtime == "transformers" and "shorter than the block" in caplog.text
    assert_own_texts(spec)


def test_blocks_that_cannot_be_recorded_run_on_torch(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Dynamic frequencies depend on the longest position."""
    target, folder = llama(tmp_path)
    rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}
    config = {**blocks.ZLAB, "rope_parameters": rope}
    draft = saved(tmp_path / "draft", config, blocks.tensors(config, target))
    with caplog.at_level("INFO"):
        spec = foretoken.load(folder, draft, runtime="graphs")
    assert (spec.target.runtime, spec.drafter.runtime) == ("graphs", "transformers")
    assert "BlockNetwork cannot be run in fixed shapes" in caplog.text
    assert_own_texts(spec)


@pytest.mark.native
def test_a_stored_conversion_of_blocks_is_for_one_target(tmp_path: Path) -> None:
    """Most have the target's output layer, which other targets do not have."""
    target, folder = llama(tmp_path)
    draft = blocks_of(tmp_path / "draft", target)
    found = [foretoken.load(folder, draft, runtime="native").drafter.identity for _ in range(2)]
    target.lm_head.weight.data *= 2
    target.save_pretrained(folder)
    found.append(foretoken.load(folder, draft, runtime="native").drafter.identity)
    assert found[0] is not None and found[0] == found[1] != found[2]


@pytest.mark.native
def test_blocks_beside_a_target_in_memory(tmp_path: Path) -> None:
    target = tiny.llama(320, context=128, num_hidden_layers=6).bfloat16()
    spec = foretoken.load(target, blocks_of(tmp_path / "draft", target), runtime="native")
    assert spec.target.runtime == "native"
    assert target.lm_head.weight.dtype == torch.bfloat16
    assert_own_texts(spec)


def assistant(folder: Path, *, ordered: bool, seed: int = 1) -> tuple[Path, Path]:
    """Folders of a target and of its assistant."""
    assistants.target(64, inputs=16).float().save_pretrained(folder / "target")
    tensors = assistants.network(64, ordered=ordered, seed=seed).state_dict()
    tensors = {k: x.float() if x.is_floating_point() else x for k, x in tensors.items()}
    config = assistants.assistant_config(64, ordered=ordered).to_dict()
    return folder / "target", saved(folder / "draft", config, tensors)


@pytest.mark.native
@pytest.mark.parametrize("ordered", [False, True])
def test_an_assistant_runs_beside_its_target(tmp_path: Path, ordered: bool) -> None:
    target, draft = assistant(tmp_path, ordered=ordered)
    for options in ({}, {"runtime": "transformers"}, {"dtype": "int8"}):
        spec = foretoken.load(target, draft, **options)
        runtime = options.get("runtime", "native")
        assert spec.target.runtime == spec.drafter.runtime == runtime
        assert_own_texts(spec)
    refused(RefusedError, "which graphs does not share", target, draft, runtime="graphs")


@pytest.mark.native
def test_an_assistant_that_native_refuses_has_its_target_on_torch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target, draft = assistant(tmp_path, ordered=True, seed=2)  # no conversion of it is stored
    monkeypatch.setattr("foretoken.models.native.network_reader.LANES", 32)
    spec = foretoken.load(target, draft)
    assert spec.target.runtime == spec.drafter.runtime == "transformers"
    assert_own_texts(spec)
    refused(RefusedError, "widths 16 and 48", target, draft, runtime="native")
    refused(RefusedError, "widths 16 and 48", target, draft, dtype="int8")


def test_a_layer_for_multi_token_prediction_by_itself(tmp_path: Path) -> None:
    """speculators' names; the same guesses as from the target's own files."""
    target, folder = llama(tmp_path)
    layer = pairdrafts.mtp_layer(target)
    names = {"enorm": "token_layernorm", "hnorm": "hidden_layernorm", "eh_proj": "input_proj"}
    names |= {"post_norm": "final_layernorm"}
    alone: dict[str, Tensor] = {}
    for key, x in layer.items():
        part, _, rest = key.partition(".")
        alone[f"mtp_layers.0.{rest if part == 'mtp_block' else f'{names[part]}.{rest}'}"] = x
    draft = saved(tmp_path / "mtp", {"speculators_model_type": "mtp"}, alone)
    pairdrafts.add_mtp(folder, pairdrafts.filed(layer, "mtp"))
    options: dict[str, Any] = {"max_new_tokens": 16, "gamma": 3, "temperature": 1.0}
    texts = [
        foretoken.load(folder, each, runtime="transformers").generate(PROMPTS, **options)
        for each in (draft, "mtp")
    ]
    assert [text.stats.accepted for text in texts[0]] == [text.stats.accepted for text in texts[1]]
    assert [text.tokens for text in texts[0]] == [text.tokens for text in texts[1]]


def test_drafts_that_do_not_fit(tmp_path: Path) -> None:
    """One line each: of another verifier, layers, ids or sizes; of a kind that is not known; and
    options of other drafts."""
    target, folder = llama(tmp_path)
    other = {"verifier": {"name_or_path": "x/y", "architectures": ["Qwen3ForCausalLM"]}}
    own = blocks.speculators()
    for i, (config, more, says) in enumerate(
        (
            (own, {"speculators_config": other}, r"drafts for x/y \(Qwen3ForCausalLM\)"),
            (own, {"aux_hidden_state_layer_ids": [7]}, "layer 7, .*the target has 6"),
            (own, {"mask_token_id": 320}, "mask_token_id 320"),
            (blocks.ZLAB, {"vocab_size": 151936}, "vocab_size 151936, but this target has 320"),
            (blocks.ZLAB, {"num_target_layers": 36}, "num_target_layers 36, but this target has 6"),
            (blocks.ZLAB, {"num_hidden_layers": 10**6}, "num_hidden_layers 1000000"),
            (blocks.ZLAB, {"rope_parameters": "x"}, "cannot be read as a draft of kind 'dflash'"),
        )
    ):
        draft = saved(tmp_path / f"{i}", config | more, blocks.tensors(config, target))
        refused(ForetokenError, says, folder, draft)
    broken = blocks.tensors(blocks.ZLAB, target) | {"norm.weight": torch.full((32,), torch.nan)}
    broken = saved(tmp_path / "broken", blocks.ZLAB, broken)
    refused(RefusedError, "non-finite values in norm.weight", folder, broken)
    masked = blocks_of(tmp_path / "masked", target)
    (masked / "mask_embedding.pt").touch()
    refused(RefusedError, "a separate embedding of the mask token", folder, masked)
    x = {"x": torch.ones(1)}
    draft = saved(tmp_path / "peagle", {"speculators_model_type": "peagle"}, x)
    refused(RefusedError, "of kind 'peagle', which is not supported", folder, draft)
    layers = {"speculators_model_type": "mtp", "num_nextn_predict_layers": 2}
    draft = saved(tmp_path / "mtp", layers, x)
    refused(RefusedError, "num_nextn_predict_layers 2, but only 1 is supported", folder, draft)
    refused(RefusedError, "has no layer for multi-token prediction", folder, "mtp")
    for draft in ("lookup", folder):
        says = "draft_taps is 'inputs', but .* does not use the target's"
        refused(InputError, says, folder, draft, draft_taps="inputs")
    draft = saved(tmp_path / "draft", blocks.ZLAB, blocks.tensors(blocks.ZLAB, target))
    says = "revision is 'x', but .* is a folder, which has no revision"
    refused(InputError, says, folder, draft, draft_revision="x")
    layer = pairdrafts.eagle_file(320, (2, 3, 3)).with_config(draft_taps="inputs")
    layer = layer.save(tmp_path / "eagle")
    for asked in ("inputs", "outputs"):
        says = f"draft_taps is '{asked}', but .* specifies which hidden states"
        refused(InputError, says, folder, layer, draft_taps=asked)
    refused(InputError, r"is a draft \(eagle3\), not a model", layer)
    assert get_draft_kind(json.loads((folder / "config.json").read_text())) is None
    assert get_draft_kind({"architectures": ["LlamaForCausalLMEagle3"]}) == "eagle3"

    config = blocks.speculators()
    config["transformer_layer_config"] = {**blocks.LAYERS, "hidden_size": 64}
    wide = tiny.llama(320, num_hidden_layers=6, hidden_size=64)
    draft = saved(tmp_path / "wide", config, blocks.tensors(config, wide))
    (folder / "model.safetensors").write_bytes(b"nothing that could be loaded")
    refused(InputError, "give a draft for this target", folder, draft)


@pytest.mark.prove
@pytest.mark.native
def test_conversions_with_and_without_states_are_both_kept(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    _, folder = llama(tmp_path)
    draft = pairdrafts.eagle_file(320, (2, 3, 3)).save(tmp_path / "draft")
    other = pairdrafts.eagle_file(320, (1, 2, 3)).save(tmp_path / "other")
    caplog.set_level("INFO", "foretoken.models.store")
    for _ in range(2):
        caplog.clear()
        for each in ("none", draft, other):
            foretoken.load(folder, each, dtype="int8", runtime="native")
    assert "converting" not in caplog.text  # the second time


def test_weights_in_pieces_and_pickles(tmp_path: Path) -> None:
    parts = {"a": torch.arange(4.0), "b": torch.ones(2, 2)}
    for name, x in parts.items():
        save_file({name: x}, tmp_path / f"{name}.safetensors")
    index = {"weight_map": {name: f"{name}.safetensors" for name in parts}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    read = FolderWeights(tmp_path).read_weights(["b", "a"])
    assert all(torch.equal(read[name], x) for name, x in parts.items())
    pickled = tmp_path / "pickled"
    pickled.mkdir()
    torch.save(parts, pickled / "pytorch_model.bin")
    assert torch.equal(FolderWeights(pickled).read_weights(["a"])["a"], parts["a"])
    (pickled / "pytorch_model.bin").write_bytes(b"no pickle")
    with pytest.raises(InputError, match="cannot be read"):
        FolderWeights(pickled).read_weights(["a"])
    with pytest.raises(InputError, match="holds no weights"):
        FolderWeights(tmp_path / "target").read_weights(["a"])


def test_doctor_says_what_a_draft_is_and_export_names_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target, folder = llama(tmp_path)
    draft = blocks_of(tmp_path / "draft", target)
    told = CliRunner().invoke(cli.app, ["doctor", str(draft)])
    assert told.exit_code == 0 and "is a draft of kind dspark" in told.output
    pair = ["--target", str(folder), "--gamma", "3", "--draft"]
    for name, named in (
        (str(draft), f'"method": "dspark", "model": "{draft}"'),
        ("mtp", '"mtp", "'),
    ):
        line = CliRunner().invoke(cli.app, ["export", "vllm", *pair, name]).output
        assert named in line and '"num_speculative_tokens": 3' in line
    cached = lambda name, file, revision: str(draft / "config.json")  # noqa: E731
    monkeypatch.setattr(huggingface_hub, "try_to_load_from_cache", cached)
    line = CliRunner().invoke(cli.app, ["export", "vllm", *pair, "a/draft"]).output
    assert '"method": "dspark", "model": "a/draft"' in line


def test_memory_for_keys_and_values_is_counted(tmp_path: Path) -> None:
    """Rows that the memory has no room for together run one after another, to the same texts."""
    target, folder = llama(tmp_path)
    spec = foretoken.load(folder, blocks_of(tmp_path / "d", target), runtime="transformers")
    alone = [text.tokens for text in spec.generate(PROMPTS, max_new_tokens=8, gamma=2)]
    parts = (spec.target, *spec.drafter.holds)
    room = sum(part.compute_cache_bytes([16], [0]) for part in parts if part.capabilities.memory)
    texts: dict[int, list[int]] = {}
    with foretoken.Engine(spec, kv_memory=room) as engine:
        ids = [engine.add(prompt, max_new_tokens=8, gamma=2) for prompt in PROMPTS]
        while engine.running or engine.waiting:
            assert engine.running <= 1
            texts |= {e.id: e.completion.tokens for e in engine.step() if e.completion}
    assert [texts[id] for id in ids] == alone
