"""Drafts of another kind than their target: what fits works, and greedy text stays the target's."""

from __future__ import annotations

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel

import foretoken
from foretoken.drafters.cascade import CascadeDrafter
from foretoken.drafters.lm import LMDrafter
from foretoken.drafters.lookup import LookupDrafter
from foretoken.drafters.mixture import MixtureDrafter
from foretoken.drafters.uniform import UniformDrafter
from foretoken.models.stock.model import CausalModel, Seq2SeqModel
from tiny import llama, t5

V = 64
PROMPTS = [[5, 17, 33], [60, 12, 7, 9, 44, 31, 2], [8]]


def gpt2() -> GPT2LMHeadModel:
    """Learned positions, no rotary ones, and a context that the texts outgrow."""
    torch.manual_seed(7)
    shape = {"n_embd": 32, "n_layer": 1, "n_head": 2, "n_positions": 20}
    ends = {"bos_token_id": 0, "eos_token_id": 0}
    return GPT2LMHeadModel(GPT2Config(vocab_size=V, **shape, **ends)).double().eval()


def decoder() -> LMDrafter:
    return LMDrafter(CausalModel(llama(V, seed=9).double()))


TARGETS = {"Llama": lambda: llama(V).double(), "T5": lambda: t5(V).double()}
DRAFTS = {
    "GPT-2": gpt2,
    "Llama": lambda: llama(V, seed=9).double(),
    "lookup": LookupDrafter,
    "uniform": lambda: UniformDrafter(V),
    "cascade": lambda: CascadeDrafter(CausalModel(gpt2()), decoder(), 2),
    "mixture": lambda: MixtureDrafter([(LookupDrafter(), 2), (decoder(), None)]),
}
FOR_T5 = {
    "T5": lambda: t5(V, seed=9).double(),
    "cascade of a T5": lambda: CascadeDrafter(
        Seq2SeqModel(t5(V, seed=9).double()),
        MixtureDrafter([(decoder(), 1), (LookupDrafter(), None)]),
    ),
}
PAIRS = [(t, d) for t in TARGETS for d in DRAFTS] + [("T5", d) for d in FOR_T5]


@pytest.mark.daily("Llama-GPT-2", "Llama-mixture", "T5-Llama", "T5-cascade of a T5")
@pytest.mark.parametrize(("target", "draft"), PAIRS)
def test_a_draft_of_another_kind(target, draft):
    spec = foretoken.load(TARGETS[target](), (DRAFTS | FOR_T5)[draft]())
    plain = spec.generate(PROMPTS, gamma=0, max_new_tokens=24)
    fast = spec.generate(PROMPTS, gamma=3, max_new_tokens=24)
    assert [c.tokens for c in fast] == [c.tokens for c in plain]
    sampled = spec.generate(PROMPTS, gamma=3, max_new_tokens=12, temperature=1.0)
    assert any(c.stats.drafted for c in [*fast, *sampled])
    assert all(c.stats.alpha is None or 0 <= c.stats.alpha <= 1 for c in sampled)
