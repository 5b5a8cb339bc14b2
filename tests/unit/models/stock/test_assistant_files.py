"""Assistants of Gemma 4 from tensors by name, and what is said of those that do not fit."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import Gemma4TextConfig, Gemma4UnifiedAssistantConfig, Gemma4UnifiedTextConfig

import assistants
import tiny
from assistants import WIDTH
from foretoken.errors import InputError, RefusedError
from foretoken.models.stock.assistant_files import build_assistant, is_assistant

V = 24
TARGET = assistants.target(V).config


def files(*, ordered: bool = True) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    own = assistants.own_assistant(V, ordered=ordered)
    return own.config.to_dict(), dict(own.state_dict())


def read(config: Any, tensors: dict[str, torch.Tensor], target: Any = TARGET) -> Any:
    return build_assistant(config, tensors, target, torch.float32)


def test_a_configuration_may_be_a_dictionary_or_transformers_own() -> None:
    config, tensors = files()
    ours, same = read(config, tensors), read(assistants.assistant_config(V, ordered=True), tensors)
    named = ours.state_dict()
    assert named.keys() == same.state_dict().keys()
    assert all(torch.equal(x, same.state_dict()[name]) for name, x in named.items())
    assert named["pre_projection.weight"].dtype == torch.float32
    assert torch.equal(named["masked_embedding.token_ordering"].sort().values, torch.arange(V))


def test_the_output_layer_is_that_of_the_embeddings_and_what_is_not_known_is_left_out() -> None:
    config, tensors = files(ordered=False)
    del tensors["lm_head.weight"]
    tensors["model.layers.0.self_attn.k_proj.weight"] = torch.ones(2, 2)
    ours = read(config, tensors)
    embeddings = tensors["model.embed_tokens.weight"]
    assert torch.equal(ours.lm_head.weight, embeddings.float())


def test_a_unified_one_is_the_same_network() -> None:
    text = assistants.text_config(V, hidden_size=16, num_kv_shared_layers=4).to_dict()
    known = Gemma4UnifiedTextConfig().to_dict()
    text = {name: value for name, value in text.items() if name in known}
    unified = Gemma4UnifiedAssistantConfig(
        text_config=Gemma4UnifiedTextConfig(**{**text, "model_type": "gemma4_unified_text"}),
        backbone_hidden_size=WIDTH,
    )
    config, tensors = files(ordered=False)
    names = read(config, tensors).state_dict().keys()
    assert read(unified, tensors).state_dict().keys() == names


def test_kinds_are_told_by_their_configuration() -> None:
    assert is_assistant(files()[0]) and is_assistant(assistants.assistant_config(V, ordered=False))
    assert not is_assistant({}) and not is_assistant(TARGET)
    with pytest.raises(InputError, match="model_type is 'gemma4_text'"):
        read(TARGET, {})


@pytest.mark.parametrize("name", ["post_projection.weight", "model.layers.3.layer_scalar"])
def test_a_tensor_that_is_missing_or_of_another_shape_is_named(name: str) -> None:
    config, tensors = files()
    tensors[name] = (
        tensors[name].repeat(2)[..., None] if tensors[name].ndim == 1 else tensors[name].T
    )
    with pytest.raises(InputError, match=name):
        read(config, tensors)
    del tensors[name]
    with pytest.raises(InputError, match=f"lack {name}"):
        read(config, tensors)


def test_tensors_of_integers_are_no_weights() -> None:
    config, tensors = files()
    tensors["pre_projection.weight"] = tensors["pre_projection.weight"].to(torch.int8)
    with pytest.raises(InputError, match="not quantized"):
        read(config, tensors)


def test_centroids_have_all_tokens_once() -> None:
    config, tensors = files()
    with pytest.raises(InputError, match="7 centroids"):
        read({**config, "num_centroids": 7}, tensors)
    tensors["masked_embedding.token_ordering"] = torch.zeros(V, dtype=torch.long)
    with pytest.raises(InputError, match="token_ordering"):
        read(config, tensors)


def test_a_broken_configuration_is_refused() -> None:
    config, tensors = files()
    with pytest.raises(InputError, match="is invalid"):
        read({**config, "text_config": None}, tensors)
    with pytest.raises(InputError, match="is invalid"):
        read(
            {**config, "text_config": {**config["text_config"], "enable_moe_block": True}}, tensors
        )


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"hidden_size": 2 * WIDTH}, "states"),
        ({"vocab_size": V + 1}, "tokens"),
        ({"num_key_value_heads": 4}, "heads and width of sliding_attention"),
        ({"global_head_dim": 16}, "heads and width of full_attention"),
        ({"layer_types": ["full_attention"] * 4}, "this target has none"),
    ],
)
def test_an_assistant_of_another_target_is_refused(settings: dict[str, Any], said: str) -> None:
    other = assistants.text_config(V, **{"hidden_size": WIDTH, **settings})
    with pytest.raises(RefusedError, match=said):
        read(*files(), other)
    assert isinstance(other, Gemma4TextConfig)


def test_another_family_is_refused() -> None:
    with pytest.raises(RefusedError, match="the target is llama"):
        read(*files(), tiny.llama(V).config)
