"""What networks say of their sizes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import LlamaConfig, PreTrainedConfig

import tiny
from foretoken.errors import InputError
from foretoken.models.stock.sizes import (
    CONTEXT_LENGTH_FIELDS,
    SAMPLES_PER_WEIGHT,
    get_context_limit,
    get_encoder_limit,
    get_encoder_vocab_size,
    get_output_vocab_size,
    is_same_model,
    make_empty_logits,
    sketch_weights,
)
from tiny_families import build

pytestmark = pytest.mark.daily


@pytest.mark.parametrize(("positions", "limit"), [(77, 77), (None, None)])
def test_the_limit_is_that_of_the_positions(positions: Any, limit: int | None) -> None:
    config = PreTrainedConfig()
    assert get_context_limit(config) is None
    config.max_position_embeddings = positions
    assert get_context_limit(config) == limit


@pytest.mark.parametrize("name", CONTEXT_LENGTH_FIELDS)
@pytest.mark.parametrize("limit", [0, -5])
def test_a_context_of_no_tokens_is_refused(name: str, limit: int) -> None:
    config = PreTrainedConfig()
    setattr(config, name, limit)
    with pytest.raises(
        InputError, match=f"{name} is {limit} in the model's config; give an integer"
    ):
        get_context_limit(config)


def test_relative_positions_have_no_limit() -> None:
    model = build("T5")
    assert get_context_limit(model.config) is None and get_encoder_limit(model) is None


def test_dynamic_frequencies_within_the_trained_length() -> None:
    rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}
    assert get_context_limit(LlamaConfig(max_position_embeddings=64, rope_parameters=rope)) == 64
    by_layer = {"full_attention": rope | {"original_max_position_embeddings": 16}}
    config = PreTrainedConfig()
    config.max_position_embeddings, config.rope_parameters = 64, by_layer
    assert get_context_limit(config) == 16


def test_encoders_and_output_layers() -> None:
    bart = build("BART")
    assert (get_encoder_limit(bart), get_encoder_vocab_size(bart), get_output_vocab_size(bart)) == (
        128,
        64,
        64,
    )
    bart.config.max_source_positions = 40
    assert get_encoder_limit(bart) == 40
    logits = make_empty_logits(bart.bfloat16(), 3)
    assert logits.shape == (3, 0, 64) and logits.dtype == torch.bfloat16


def test_a_few_values_of_every_weight():
    network = tiny.llama()
    values, weights = sketch_weights(network), list(network.parameters())
    assert values.shape == (SAMPLES_PER_WEIGHT * len(weights),) and values.dtype == torch.float32
    first = weights[0].detach().flatten()
    assert values[[0, SAMPLES_PER_WEIGHT - 1]].tolist() == first[[0, -1]].tolist()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_the_same_target_in_another_precision(dtype):
    network = tiny.llama()
    assert is_same_model(sketch_weights(network), sketch_weights(tiny.llama().to(dtype)))
    assert not is_same_model(sketch_weights(network), sketch_weights(tiny.llama(seed=1).to(dtype)))
