"""Families with attention of their own, and those that run row by row: the distribution of sampled
texts, as of other real networks.

The exact distribution comes from full forwards. Seeds are fixed; on other seeds each chi-square
here would fail by chance about once in a million times.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
import transformers
from transformers import PreTrainedModel

import oracle
import pairs
from faulty import Liar
from foretoken import load
from foretoken.models.stock.rowwise import RowwiseModel
from foretoken.models.stock.small_copy import randomize_weights

ALPHA = 1e-6
V, LENGTH, N = 8, 3, 3000  # nothing is drafted for the first token, nor for the last
PROMPT, HOT = [3, 7, 1, 5], 2.0  # a temperature at which many texts are common
ENDS = {"eos_token_id": None, "pad_token_id": 0, "bos_token_id": 1}
SMALL = {"vocab_size": V, "hidden_size": 32, "num_hidden_layers": 2, **ENDS}
KINDS: dict[str, Callable[[], tuple[Any, Any]]] = {
    "BLOOM": lambda: (transformers.BloomForCausalLM, dict(SMALL, n_head=2)),
    "GPT-J": lambda: (
        transformers.GPTJForCausalLM, dict(SMALL, n_head=2, rotary_dim=8, n_positions=64)
    ),
    "Mamba": lambda: (transformers.MambaForCausalLM, dict(SMALL, state_size=8)),
    "RWKV": lambda: (transformers.RwkvForCausalLM, dict(SMALL, attention_hidden_size=32)),
    "RecurrentGemma": lambda: (
        transformers.RecurrentGemmaForCausalLM,
        dict(SMALL, num_hidden_layers=3, num_attention_heads=2, intermediate_size=48),
    ),
    "M2M-100": lambda: (
        transformers.M2M100ForConditionalGeneration,
        dict(ENDS, vocab_size=V, d_model=32, encoder_layers=1, decoder_layers=1,
             encoder_attention_heads=2, decoder_attention_heads=2, encoder_ffn_dim=48,
             decoder_ffn_dim=48, decoder_start_token_id=2),
    ),
}  # fmt: skip


@cache
def network(name: str) -> PreTrainedModel:
    kind, settings = KINDS[name]()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        model = kind(kind.config_class(**settings)).eval()
        randomize_weights(model)
    model.generation_config.eos_token_id = model.generation_config.forced_eos_token_id = None
    return model.requires_grad_(False)


def texts(name: str, draft: Any) -> Counter[tuple[int, ...]]:
    spec = load(network(name), draft, runtime="transformers")
    assert spec.target.runtime.startswith("transformers")
    completions = spec.generate(
        [PROMPT] * N, max_new_tokens=LENGTH, gamma=2, temperature=HOT, seed=2
    )
    steps = [step for text in completions for step in text.steps]
    assert any(step.accepted for step in steps)
    return Counter(tuple(text.tokens) for text in completions)


def exact(name: str) -> dict[oracle.Text, float]:
    model = network(name)
    start = model.generation_config.decoder_start_token_id
    head, source = ([start], PROMPT) if model.config.is_encoder_decoder else (PROMPT, None)

    def distribution(text: oracle.Text) -> Any:
        logits = pairs.scores(model, [*head, *text], source)[-1].double().numpy()
        return oracle.standardize(logits, HOT)

    return oracle.joint(distribution, LENGTH)


@pytest.mark.prove
@pytest.mark.parametrize("name", KINDS)
def test_sampled_texts_have_the_targets_distribution(name: str) -> None:
    draft = pairs.relative(network(name), noise=0.4)
    assert oracle.p_value(texts(name, draft), exact(name)) > ALPHA


@pytest.mark.prove
def test_a_wrong_q_is_seen() -> None:
    draft = RowwiseModel(pairs.relative(network("BLOOM"), noise=0.4))
    assert oracle.p_value(texts("BLOOM", Liar(draft, V)), exact("BLOOM")) < ALPHA
