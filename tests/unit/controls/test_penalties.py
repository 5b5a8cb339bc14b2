"""Penalties against transformers' processors, and against OpenAI's formula written out."""

from __future__ import annotations

import pytest
import torch
from transformers.generation.logits_process import (
    EncoderRepetitionPenaltyLogitsProcessor,
    ExponentialDecayLengthPenalty,
    RepetitionPenaltyLogitsProcessor,
)

from foretoken.controls.history import History
from foretoken.controls.penalties import Decay, Encoder, Occurrence, Repetition

V = 20


def random_row(seed: int) -> tuple[torch.Tensor, History]:
    """Scores of either sign, some impossible, and a text with repeats."""
    generator = torch.Generator().manual_seed(seed)
    scores = torch.randn(V, generator=generator, dtype=torch.float64) * 3
    scores[torch.rand(V, generator=generator) < 0.1] = -torch.inf
    prompt = int(torch.randint(1, 9, (), generator=generator))
    history = History(torch.randint(0, V, (prompt,), generator=generator).tolist())
    for token in torch.randint(0, V, (seed % 7,), generator=generator).tolist() * 2:
        history.push(token)
    return scores, history


def theirs(processor, history: History, scores: torch.Tensor) -> torch.Tensor:
    return processor(torch.tensor([history.tokens]), scores[None].clone())[0]


@pytest.mark.parametrize("penalty", [0.6, 1.3, 5.0])
@pytest.mark.parametrize("seed", range(20))
def test_repetition(seed, penalty):
    scores, history = random_row(seed)
    expected = theirs(RepetitionPenaltyLogitsProcessor(penalty), history, scores)
    assert torch.equal(Repetition(penalty)(scores.clone(), history), expected)


@pytest.mark.parametrize("penalty", [0.6, 1.3, 5.0])
@pytest.mark.parametrize("seed", range(20))
def test_encoder(seed, penalty):
    scores, history = random_row(seed)
    source = [3, 5, 3, 19, 0]
    processor = EncoderRepetitionPenaltyLogitsProcessor(penalty, torch.tensor([source]))
    expected = theirs(processor, history, scores)
    # what the encoder alone can read has no score
    mine = Encoder(penalty, [*source, V, V + 7], V)(scores.clone(), history)
    assert torch.equal(mine, expected)
    assert torch.equal(Encoder(penalty, [V], V)(scores.clone(), history), scores)


@pytest.mark.parametrize(("presence", "frequency"), [(0.5, 0.0), (0.0, 1.2), (-0.7, 0.3), (2, 2)])
@pytest.mark.parametrize("seed", range(20))
def test_occurrence_is_openais_formula(seed, presence, frequency):
    """mu[j] - c[j] * frequency - (c[j] > 0) * presence, c counting the new tokens alone."""
    scores, history = random_row(seed)
    new = history.tokens[history.prompt :]
    count = [new.count(token) for token in range(V)]
    expected = [
        float(scores[j]) - count[j] * frequency - (count[j] > 0) * presence for j in range(V)
    ]
    mine = Occurrence(presence, frequency)(scores.clone(), history)
    assert mine.tolist() == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize("factor", [0.5, 1.0, 1.4])
@pytest.mark.parametrize("start", [0, 2, 5, 30])
@pytest.mark.parametrize("seed", range(14))
def test_decay(seed, start, factor):
    scores, history = random_row(seed)
    processor = ExponentialDecayLengthPenalty((start, factor), [4, 9], history.prompt)
    expected = theirs(processor, history, scores)
    assert torch.equal(Decay(start, factor, [4, 9])(scores.clone(), history), expected)
    assert torch.equal(Decay(start, factor, [])(scores.clone(), history), scores)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_precision_of_the_scores_stays(dtype):
    scores, history = random_row(5)
    for control in (Repetition(1.1), Encoder(1.1, [1], V), Occurrence(1, 1), Decay(0, 2, [1])):
        assert control(scores.to(dtype), history).dtype == dtype
