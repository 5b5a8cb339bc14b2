"""Layers for multi-token prediction in GGUF files: the same weights, and the same draft tokens, as
from safetensors."""

from __future__ import annotations

import copy
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from gguf import GGUFWriter

import census
import foretoken
import tiny
from foretoken.errors import RefusedError
from foretoken.loading import draft_candidates, inventory
from foretoken.loading.gguf_mtp import read_mtp_weights
from foretoken.models.stock.small_copy import randomize_weights
from gguf_file import write_qwen
from loads import refused
from pairdrafts import Tensors, add_mtp, filed, mtp_draft, mtp_layer

pytest.importorskip("transformers.integrations.gguf", reason="this version loads no Qwen3.5")
NAMES = ["Qwen3_5ForCausalLM", "Qwen3_5MoeForCausalLM"]


@cache
def model(name: str) -> tuple[Any, Tensors]:
    """A model with as many heads of values as of keys, and a layer for it."""
    made = census.build(name)
    config: Any = copy.deepcopy(made.config)
    config.vocab_size, config.linear_num_value_heads = 320, config.linear_num_key_heads
    config.linear_key_head_dim = config.linear_value_head_dim = 32
    torch.manual_seed(0)
    network: Any = type(made)(config).eval()
    randomize_weights(network)
    network.generation_config.eos_token_id = 0
    return network.requires_grad_(False), mtp_layer(network)


@pytest.mark.parametrize("name", NAMES)
def test_weights_are_those_of_safetensors(name: str, tmp_path: Path) -> None:
    network, layer = model(name)
    write_qwen(tmp_path / "m.gguf", network, tiny.byte_level(), layer)
    read = read_mtp_weights("m", tmp_path / "m.gguf", network.config.num_hidden_layers)
    found, expected = (
        mtp_draft(network, each).network.state_dict() for each in (read, filed(layer, "mtp"))
    )
    assert found.keys() == expected.keys()
    for key, values in expected.items():  # 1 was added to norms
        assert torch.allclose(found[key], values, rtol=0, atol=1e-6), key


@pytest.mark.daily
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    "runtime", ["transformers", pytest.param("native", marks=pytest.mark.native)]
)
def test_draft_tokens_are_those_of_safetensors(name: str, runtime: str, tmp_path: Path) -> None:
    """Values differ by rounding, so that a token differs with a probability below 1e-4."""
    network, layer = model(name)
    write_qwen(tmp_path / "m.gguf", network, tiny.byte_level(), layer)
    tiny.folder(tmp_path / "folder", network, tiny.byte_level())
    add_mtp(tmp_path / "folder", filed(layer, "mtp"))
    options: dict[str, Any] = {"max_new_tokens": 20, "gamma": 3, "temperature": 1.5, "seed": 3}
    texts = [
        foretoken.load(each, "mtp", runtime=runtime).generate([[5, 17], [9]], **options)
        for each in (tmp_path / "folder", tmp_path / "m.gguf")
    ]
    assert all(text.stats.accepted for text in texts[0])
    for a, b in zip(*texts, strict=True):
        assert (a.tokens, a.stats.accepted) == (b.tokens, b.stats.accepted)


def test_a_file_with_a_layer_is_listed_with_mtp(tmp_path: Path) -> None:
    network, layer = model(NAMES[0])
    for name, given in (("with", layer), ("without", {})):
        file = tmp_path / f"{name}.gguf"
        write_qwen(file, network, tiny.byte_level(), given)
        models = inventory.list_models([tmp_path])
        target = draft_candidates.find_target(str(file), models)
        drafts = draft_candidates.list_local_drafts(str(file), target, models)
        assert ("mtp" in [each.name for each in drafts]) == bool(given)


def test_files_without_a_layer_that_can_be_read_are_refused(tmp_path: Path) -> None:
    network, _ = model(NAMES[0])
    write_qwen(tmp_path / "m.gguf", network, tiny.byte_level(), {})
    says = "has no layer for multi-token prediction; give another draft"
    refused(RefusedError, says, tmp_path / "m.gguf", "mtp")
    writer = GGUFWriter(tmp_path / "other.gguf", "glm4moe")
    writer.add_tensor("blk.3.nextn.eh_proj.weight", torch.ones(2, 4).numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(RefusedError, match="architecture 'glm4moe', .* qwen35moe.; give"):
        read_mtp_weights("other", tmp_path / "other.gguf", 3)
