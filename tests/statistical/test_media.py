"""Texts sampled behind a picture, and by an encoder of sounds: their distribution is the model's.

The exact distribution comes from full forwards of transformers' own code. Seeds are fixed; on other
seeds each chi-square here would fail by chance about once in a million times.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch

import oracle
from faulty import Liar
from foretoken import load
from foretoken.models.stock.model import CausalModel
from media_models import Made, V, built, llava, qwen2_5_vl, relative, whisper

ALPHA = 1e-6
LENGTH, N, TOP_K = 3, 3000, 4  # nothing is drafted for the first token, nor for the last
HOT = 2.0  # a temperature at which many texts are common


def texts(made: Made, draft: Any) -> Counter[tuple[int, ...]]:
    model, inputs = made
    spec = load(model, draft)
    prompts: Any = [inputs] * N
    completions = spec.generate(
        prompts, max_new_tokens=LENGTH, gamma=2, temperature=HOT, top_k=TOP_K, seed=2
    )
    assert any(step.accepted for text in completions for step in text.steps)
    return Counter(tuple(text.tokens) for text in completions)


@torch.inference_mode()
def exact(made: Made) -> dict[oracle.Text, float]:
    model, inputs = made
    name = "decoder_input_ids" if model.config.is_encoder_decoder else "input_ids"
    prompt = inputs[name]

    def distribution(text: oracle.Text) -> Any:
        ids = torch.cat([prompt, torch.tensor([text], dtype=torch.long)], 1)
        more = torch.zeros(1, len(text), dtype=torch.long)
        given = {
            n: torch.cat([x, more], 1) if x.shape == prompt.shape else x for n, x in inputs.items()
        }
        logits = model(**given | {name: ids}).logits[0, -1].double().numpy()
        return oracle.standardize(logits, HOT, TOP_K)

    return {text: p for text, p in oracle.joint(distribution, LENGTH).items() if p}


@pytest.mark.prove
@pytest.mark.parametrize("family", [llava, qwen2_5_vl, whisper])
def test_sampled_texts_have_the_targets_distribution(family: Callable[[], Made]) -> None:
    made = built(family)
    sampled = texts(made, relative(made[0], noise=0.1))
    assert oracle.p_value(sampled, exact(made)) > ALPHA


@pytest.mark.prove
def test_a_wrong_q_is_seen() -> None:
    made = built(llava)
    draft = Liar(CausalModel(relative(made[0], noise=0.1)), V)
    assert oracle.p_value(texts(made, draft), exact(made)) < ALPHA
