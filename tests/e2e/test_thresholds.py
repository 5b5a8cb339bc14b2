"""Lengths at which a family behaves otherwise, which the self-check of a short copy must reach.

That texts past its windows are those of `generate`, the census shows of every family.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from transformers import LlamaForCausalLM

from foretoken import InputError, RefusedError, load
from foretoken.models.stock.selfcheck import check
from foretoken.models.stock.sizes import get_context_limit
from foretoken.models.stock.small_copy import (
    COPY_CONTEXT,
    COPY_HEAD_DIM,
    COPY_WINDOW,
    ROPE_SWITCH_FIELD,
    randomize_weights,
    shrink_config,
)
from foretoken.models.stock.small_copy import find_thresholds as lengths_named
from pairs import stock

BASE: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "intermediate_size": 96,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": None,
    "max_position_embeddings": 256,
}
STRETCHED = {"rope_theta": 10000.0, "factor": 8.0, "rope_type": "yarn", ROPE_SWITCH_FIELD: 24}
MIXED = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 12}
CONFIGS = {
    "windows": transformers.Gemma3TextConfig(**BASE | MIXED),
    "windows named otherwise": transformers.ModernBertDecoderConfig(
        **BASE | MIXED | {"local_attention": 24}
    ),
    "no window": transformers.Qwen2Config(**BASE | {"use_sliding_window": False}),
    "yarn": transformers.LlamaConfig(**BASE | {"rope_parameters": STRETCHED}),
}
PROMPTS = [[5, 17, 33], [(7 * i + 3) % 62 + 2 for i in range(30)]]


@pytest.mark.parametrize("name", CONFIGS)
def test_the_self_check_gets_beyond_them(name: str) -> None:
    """Every number of the real configuration that is named as a length is small in the copy."""
    small, named = shrink_config(CONFIGS[name], COPY_HEAD_DIM), lengths_named(CONFIGS[name])
    assert bool(named) == name.startswith("windows")
    assert all(getattr(small, key) == COPY_WINDOW for key in named)
    rope: Any = getattr(small, "rope_parameters", None) or {}
    assert rope.get(ROPE_SWITCH_FIELD, 0) <= 2 * COPY_WINDOW < COPY_CONTEXT


class Sloping(LlamaForCausalLM):
    """Logits that are sharper behind a length, by what is cached of the longest row."""

    def forward(
        self,
        input_ids: Any = None,
        position_ids: Any = None,
        past_key_values: Any = None,
        **more: Any,
    ) -> Any:
        past = past_key_values.get_seq_length() if past_key_values is not None else 0
        more |= {"position_ids": position_ids, "past_key_values": past_key_values}
        result = super().forward(input_ids, **more)
        n = result.logits.shape[1]
        behind = (torch.arange(n) + past) // self.config.logit_floor
        result.logits = result.logits * (1 + behind)[:, None]
        return result


@pytest.mark.parametrize("length", [2048, 1_000_000])
def test_a_family_that_is_wrong_only_in_long_texts_is_refused(length: int) -> None:
    settings = BASE | {"max_position_embeddings": 4096, "logit_floor": length}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = Sloping(transformers.LlamaConfig(**settings)).eval()
    if length > 4096:  # which no text reaches
        assert check(model).delta < 1e-5
        return
    with pytest.raises(RefusedError, match="not exact over a ragged cache"):
        check(model)


def test_a_model_that_contradicts_itself_behind_its_window() -> None:
    """Moshi's cache has a window, its mask has none: behind it, `generate` differs from a forward
    of the same text. A window as long as the context never gets there."""
    moshi: dict[str, Any] = BASE | {"audio_vocab_size": 64, "max_position_embeddings": 64}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        narrow, wide = (
            transformers.MoshiForCausalLM(
                transformers.MoshiConfig(**moshi, sliding_window=n)
            ).eval()
            for n in (12, 64)
        )
    with pytest.raises(RefusedError, match=r"moshi .* contradicts itself: .* by \d.\de-0"):
        check(narrow)
    randomize_weights(wide)
    (text,) = load(wide, "lookup").generate([PROMPTS[1]], max_new_tokens=33, gamma=3)
    assert text.tokens == stock(wide, PROMPTS[1], 33)


@pytest.mark.daily("Roberta")
@pytest.mark.parametrize("name", ["Roberta", "Camembert", "Data2VecText", "XLMRoberta"])
def test_positions_that_count_from_the_padding_id(name: str) -> None:
    """Their own code counts from pad + 1, transformers' generate from 0: refused by rule."""
    config = getattr(transformers, f"{name}Config")(**BASE, is_decoder=True)
    model = getattr(transformers, f"{name}ForCausalLM")(config).eval()
    with pytest.raises(RefusedError, match="counts positions from the padding id"):
        load(model, "lookup")


@pytest.mark.parametrize(
    "runtime", ["transformers", pytest.param("native", marks=pytest.mark.native)]
)
def test_dynamic_frequencies_end_where_they_would_change(runtime: str) -> None:
    """In transformers they depend on how long the prompt was, and on calls before: a text ends
    there, says why, and is `generate`'s until then, whatever was generated before."""
    rope = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0}
    settings = BASE | {"max_position_embeddings": 48, "rope_parameters": rope}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = LlamaForCausalLM(transformers.LlamaConfig(**settings)).eval()
        randomize_weights(model)
    expected = stock(model, PROMPTS[0], 80)  # and the frequencies are those of 83 tokens
    spec = load(model, "lookup", runtime=runtime)
    for gamma in (0, 3):
        (text,) = spec.generate([PROMPTS[0]], max_new_tokens=80, gamma=gamma)
        assert text.tokens == expected[:45] and text.finish_reason == "length"
    with pytest.raises(InputError, match="the model's context length is 48"):
        spec.generate([PROMPTS[1] * 2])
    assert get_context_limit(model.config) == 48
    named = rope | {"original_max_position_embeddings": 48}
    assert get_context_limit(transformers.LlamaConfig(**BASE | {"rope_parameters": named})) == 48
