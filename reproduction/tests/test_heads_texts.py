"""At temperature 0 every text is the target's own, whatever heads guess: every family, in float64.

Heads that have learned the very texts are kept often, untrained ones hardly ever: both courses.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel

import tiny
from foretoken import Completion, SamplingParams, Speculator
from foretoken.certificate.certify import CertificatePlan, certify
from foretoken.measurement.agreement import POSITIONS_PER_FORWARD, compute_overlaps
from foretoken.models.stock.model import CausalModel
from foretoken.request import Request
from foretoken.sampling.keys import SequenceKey
from foretoken.train.pair import TrainingSequence
from pairs import PROMPTS, V, assert_greedy, speculator, stock, target
from reproduction.blockwise import Heads, ends_of
from reproduction.heads import HeadsDrafter
from reproduction.train_heads import distance
from tiny_families import FAMILIES

LIMIT = 24


def rehearsed(model: PreTrainedModel, prompt: list[int], count: int) -> Heads:
    """Heads that know the greedy text of one prompt."""
    heads = Heads.fresh(model, count).to(model.device, torch.float64)
    encoder_decoder = model.config.is_encoder_decoder
    start = [model.generation_config.decoder_start_token_id] if encoder_decoder else prompt
    request = Request(start, LIMIT, SequenceKey(0, 0), source=prompt if encoder_decoder else None)
    texts = [TrainingSequence(request, stock(model, prompt, LIMIT))]
    steps = torch.optim.Adam(heads.parameters(), lr=0.02)
    for _ in range(40):
        distance(heads, model, texts).backward()
        steps.step()
        steps.zero_grad()
    return heads.float()


def compared(pair: Speculator, model: PreTrainedModel, gamma: int) -> list[Completion]:
    completions = pair.generate(PROMPTS, max_new_tokens=LIMIT, gamma=gamma)
    for prompt, text in zip(PROMPTS, completions, strict=True):
        assert_greedy(text, model, prompt, LIMIT)
    return completions


@pytest.mark.parametrize("name", ["Llama", "T5", "BART"])
def test_trained_heads(name: str, tmp_path: Path) -> None:
    model = target(name)
    file = tmp_path / "heads.safetensors"
    rehearsed(model, PROMPTS[0], 3).save(file)
    pair = speculator(model, f"reproduction.heads:{file}")
    for gamma in range(5):
        first, *others = compared(pair, model, gamma)
        (alone,) = pair.generate(PROMPTS[0], max_new_tokens=LIMIT, gamma=gamma)
        assert alone.tokens == first.tokens
        if gamma:
            assert first.stats.accepted > 0 and first.stats.target_calls < LIMIT
            assert any(text.stats.accepted < text.stats.drafted for text in others)
            assert max(step.drafted for step in first.steps) == min(gamma, 3)


@pytest.mark.parametrize("name", FAMILIES)
def test_every_family(name: str, tmp_path: Path) -> None:
    model, file = target(name), tmp_path / "heads.safetensors"
    heads = Heads.fresh(model, 2)
    torch.nn.init.normal_(heads.outer, std=0.1, generator=torch.Generator().manual_seed(0))
    heads.save(file)
    comparison = compared(speculator(model, f"reproduction.heads:{file}"), model, 2)
    assert all(text.stats.drafted > text.stats.accepted for text in comparison)


@pytest.mark.prove
def test_proof_a_certificate(tmp_path: Path) -> None:
    """Heads read the states of the very target in which a control plants its bug."""
    model, file = target("Llama"), tmp_path / "heads"
    heads = Heads.fresh(model, 2)
    torch.nn.init.normal_(heads.outer, std=0.1, generator=torch.Generator().manual_seed(0))
    heads.save(file)
    sizes = {"gamma": 2, "num_samples": 48, "num_greedy_tokens": 16}
    plan = CertificatePlan(**sizes, distributions=(SamplingParams(1.0),))
    certificate = certify(speculator(model, f"reproduction.heads:{file}"), PROMPTS[:2], plan)
    assert certificate.verdict == "lossless"
    assert all(control.found for control in certificate.controls)


def test_replayed_texts_have_the_states_of_the_very_token() -> None:
    network, new = tiny.llama(V).double(), [5, 3, 8, 1] * (POSITIONS_PER_FORWARD // 4 + 1)
    heads = Heads.fresh(network, 1).double()
    torch.nn.init.normal_(heads.outer, generator=torch.Generator().manual_seed(0))
    model, (output, embeddings) = CausalModel(network), ends_of(network)
    drafter = HeadsDrafter(model, heads, output, embeddings)
    request = Request([1, 2], len(new), SequenceKey(0, 0))
    shares = compute_overlaps(model, drafter, request, new, SamplingParams(1.0))
    text = torch.tensor([[1, 2, *new]])
    with torch.no_grad():
        hidden = network.model(text).last_hidden_state[0]
        p = output(hidden[2:-1]).softmax(-1)  # from the second new token on
        q = output(heads(hidden[1:-2], embeddings(text[0, 2:-1]), 0, 1)).softmax(-1)[:, 0]
    assert shares[0] is None
    assert shares[1:] == pytest.approx(torch.minimum(p, q).sum(-1).tolist())
