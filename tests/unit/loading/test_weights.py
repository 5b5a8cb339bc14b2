"""What the headers of a model's files contradict is refused before anything is built."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

import foretoken
from foretoken.errors import InputError
from foretoken.loading.sources import find_source
from foretoken.loading.weights import (
    MAX_LAYERS,
    require_layer_count,
    require_layers,
    require_matching_layers,
)
from gguf_file import write_gguf
from loads import refused
from tiny import byte_level, folder, llama

LAYERS = 3


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return folder(tmp_path / "model", llama(64, num_hidden_layers=LAYERS))


def configure(path: Path, **settings: Any) -> Path:
    """Change a folder's config.json."""
    file = path / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | settings))
    return path


def in_form(path: Path, form: str) -> Path:
    """Write the folder's weights otherwise."""
    file = path / "model.safetensors"
    if form == "bin":
        torch.save(load_file(file), path / "pytorch_model.bin")
        file.unlink()
    if form == "shards":
        parts = sorted(load_file(file).items())
        shards = {"a.safetensors": dict(parts[::2]), "b.safetensors": dict(parts[1::2])}
        file.unlink()
        for name, tensors in shards.items():
            save_file(tensors, path / name, metadata={"format": "pt"})
        places = {key: name for name, tensors in shards.items() for key in tensors}
        index = {"metadata": {}, "weight_map": places}
        (path / "model.safetensors.index.json").write_text(json.dumps(index))
    return path


def unbuilt(*_: Any, **__: Any) -> None:
    pytest.fail("a network was built")


@pytest.mark.parametrize("form", ["one", "shards", "bin"])
def test_more_layers_than_the_config_says(model: Path, form: str) -> None:
    """They would be left out, and the text would be nonsense."""
    in_form(configure(model, num_hidden_layers=LAYERS - 1), form)
    refused(InputError, "holds weights of layer 2 of model.layers, but its config has", model)
    refused(InputError, "holds weights of layer 2 of model.layers", llama(64), model)  # as a draft
    for count in (10**6, 0, -3):
        configure(model, num_hidden_layers=count)
        with pytest.MonkeyPatch.context() as patch:  # before any is built
            patch.setattr(AutoModelForCausalLM, "from_config", unbuilt)
            refused(InputError, f"has num_hidden_layers {count} in its config", model)


def test_weights_of_a_hub_model_are_compared_as_they_are_read(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read = find_source(configure(model, num_hidden_layers=1), None, False)
    monkeypatch.setattr("foretoken.loading.weights.read_dtypes", lambda *_: {})  # not here yet
    with pytest.raises(InputError, match="holds weights of layer 2 of model.layers"):
        read.load_network(torch.float32, torch.device("cpu"))


def test_a_count_without_files_has_a_limit() -> None:
    config = llama(64).config
    config.num_hidden_layers = MAX_LAYERS + 1
    with pytest.raises(
        InputError, match=f"num_hidden_layers {MAX_LAYERS + 1} .* at most {MAX_LAYERS} are"
    ):
        require_layer_count("m", config, {})
    config.num_hidden_layers = MAX_LAYERS
    require_layer_count("m", config, {})


@pytest.mark.parametrize(("layers", "says"), [(2, "layer 2 of blk"), (10**6, "1000000 in its")])
def test_a_gguf_file_is_held_to_its_header(tmp_path: Path, layers: int, says: str) -> None:
    model = llama(320, hidden_size=64, intermediate_size=96, num_hidden_layers=LAYERS)
    write_gguf(tmp_path / "tiny.gguf", model, byte_level(), layers=layers)
    refused(InputError, says, tmp_path)


@pytest.mark.parametrize(
    ("form", "kind"),
    [("one", torch.int16), ("bin", torch.int8), ("one", torch.uint8), ("bin", torch.int64)],
)
def test_integers_that_nothing_explains(model: Path, form: str, kind: torch.dtype) -> None:
    file, key = model / "model.safetensors", "model.layers.0.self_attn.q_proj.weight"
    weights = load_file(file)
    weights[key] = (weights[key] * 100).to(kind)
    save_file(weights, file, metadata={"format": "pt"})
    refused(InputError, f"has {key} in .*no quantization_config", in_form(model, form))


def test_what_a_config_explains_or_no_model_reads_may_be_integers() -> None:
    network, key = llama(64), "model.layers.0.self_attn.q_proj.weight"
    require_matching_layers(
        "m", network, {"h.0.attn.bias": "BOOL", "embeddings.position_ids": "I64"}, in_gguf=False
    )
    with pytest.raises(InputError):
        require_matching_layers("m", network, {key.removeprefix("model."): "I8"}, in_gguf=False)
    network.config.quantization_config = {"quant_method": "bitsandbytes"}
    require_matching_layers("m", network, {key: "I8"}, in_gguf=False)


OWN = [f"model.layers.{i}.{part}" for i in range(2) for part in ("q.weight", "mlp.experts.0.w")]
MORE = [
    "lm_head.weight",
    "vision.layers.7.q.weight",  # a stack that the model has not
    "model.layers.0.rotary_emb.inv_freq",
    "model.layers.2.eh_proj.weight",  # a layer for multi-token prediction
    "model.layers.2.q.weight",
    "model.mtp_layers.0.q.weight",
]


def test_weights_of_the_same_stack_are_counted_and_others_let_be() -> None:
    require_layers("m", OWN, [*OWN, *MORE])
    for extra in ("model.layers.2.q.weight", "model.layers.1.mlp.experts.1.w"):
        with pytest.raises(InputError, match="its config has"):
            require_layers("m", OWN, [*OWN, extra])


def test_what_a_family_ignores_is_ignored(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    configure(model, num_hidden_layers=LAYERS - 1)
    kind = type(llama(64))
    monkeypatch.setattr(kind, "_keys_to_ignore_on_load_unexpected", [r"model\.layers\.2\."])
    assert foretoken.load(model, "none", runtime="transformers").generate([[5]], max_new_tokens=2)


@pytest.mark.parametrize("limit", [0, -5])
def test_a_context_of_no_tokens(model: Path, limit: int) -> None:
    configure(model, max_position_embeddings=limit)
    says = f"max_position_embeddings is {limit} in the model's config; give an integer of 1"
    refused(InputError, says, model)
    network = llama(64)
    network.config.max_position_embeddings = limit
    refused(InputError, says, network)
