"""Penalties and bans against transformers' processors."""

from __future__ import annotations

from collections import Counter
from itertools import product

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers.generation.logits_process import (
    EncoderNoRepeatNGramLogitsProcessor,
    EncoderRepetitionPenaltyLogitsProcessor,
    ExponentialDecayLengthPenalty,
    NoBadWordsLogitsProcessor,
    NoRepeatNGramLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
)

from foretoken.controls import penalties
from foretoken.controls.penalties import (
    EncoderRepetitionPenalty,
    ExponentialDecayPenalty,
    OccurrencePenalty,
    RepetitionPenalty,
    TokenHistory,
)

V = 20


def random_row(seed: int) -> tuple[torch.Tensor, TokenHistory]:
    """Scores of either sign, some impossible, and a text with repeats."""
    generator = torch.Generator().manual_seed(seed)
    scores = torch.randn(V, generator=generator, dtype=torch.float64) * 3
    scores[torch.rand(V, generator=generator) < 0.1] = -torch.inf
    prompt = int(torch.randint(1, 9, (), generator=generator))
    history = TokenHistory(torch.randint(0, V, (prompt,), generator=generator).tolist())
    for token in torch.randint(0, V, (seed % 7,), generator=generator).tolist() * 2:
        history.push(token)
    return scores, history


def theirs(processor, history: TokenHistory, scores: torch.Tensor) -> torch.Tensor:
    return processor(torch.tensor([history.tokens]), scores[None].clone())[0]


ROWS = [random_row(seed) for seed in range(20)]


@pytest.mark.parametrize("penalty", [0.6, 1.3, 5.0])
def test_repetition_and_encoder(penalty):
    source = [3, 5, 3, 19, 0]
    processor = EncoderRepetitionPenaltyLogitsProcessor(penalty, torch.tensor([source]))
    for scores, history in ROWS:
        expected = theirs(RepetitionPenaltyLogitsProcessor(penalty), history, scores)
        assert torch.equal(RepetitionPenalty(penalty)(scores.clone(), history), expected)
        expected = theirs(processor, history, scores)
        # what the encoder alone can read has no score
        mine = EncoderRepetitionPenalty(penalty, [*source, V, V + 7], V)(scores.clone(), history)
        assert torch.equal(mine, expected)
        assert torch.equal(
            EncoderRepetitionPenalty(penalty, [V], V)(scores.clone(), history), scores
        )


@pytest.mark.parametrize(("presence", "frequency"), [(0.5, 0.0), (0.0, 1.2), (-0.7, 0.3), (2, 2)])
def test_occurrence_is_openais_formula(presence, frequency):
    """mu[j] - c[j] * frequency - (c[j] > 0) * presence, c counting the new tokens alone."""
    for scores, history in ROWS:
        new = history.tokens[history.prompt :]
        count = [new.count(token) for token in range(V)]
        expected = [
            float(scores[j]) - count[j] * frequency - (count[j] > 0) * presence for j in range(V)
        ]
        mine = OccurrencePenalty(presence, frequency)(scores.clone(), history)
        assert mine.tolist() == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize("factor", [0.5, 1.0, 1.4])
def test_decay(factor):
    for start, (scores, history) in product([0, 2, 5, 30], ROWS):
        processor = ExponentialDecayLengthPenalty((start, factor), [4, 9], history.prompt)
        expected = theirs(processor, history, scores)
        assert torch.equal(
            ExponentialDecayPenalty(start, factor, [4, 9])(scores.clone(), history), expected
        )
        assert torch.equal(
            ExponentialDecayPenalty(start, factor, [])(scores.clone(), history), scores
        )


@given(st.lists(st.integers(0, 5), max_size=9), st.lists(st.integers(-3, 5), max_size=60))
def test_a_history_is_what_its_text_makes_of_it_whatever_was_taken_back(prompt, walk):
    """Negative: so many tokens are taken back. Ids are in the order of their first time."""
    past, text = TokenHistory(prompt), list(prompt)
    for token in walk:
        if token >= 0:
            text.append(token)
            past.push(token)
        for _ in range(min(max(0, -token), len(text) - len(prompt))):
            text.pop()
            past.pop()
    assert past.tokens == text and past.num_new_tokens == len(text) - len(prompt)
    for tally, tokens in ((past.all_counts, text), (past.new_counts, text[len(prompt) :])):
        seen = zip(tally.ids.view.tolist(), tally.counts.view.tolist(), strict=True)
        assert list(seen) == list(Counter(tokens).items())
    past.to_tensor(torch.device("cpu")).zero_()
    assert past.to_tensor(torch.device("cpu")).tolist() == text


V_BANS = 6
SCORES = torch.linspace(-2, 3, V_BANS, dtype=torch.float64)
TEXTS = st.lists(st.integers(0, V_BANS - 1), min_size=1, max_size=14)
NGRAMS = st.integers(1, 4)
SEQUENCES = st.lists(
    st.lists(st.integers(0, V_BANS - 1), min_size=1, max_size=4), min_size=1, max_size=6
)


def theirs_bans(processor, text: list[int]) -> torch.Tensor:
    return processor(torch.tensor([text]), SCORES[None].clone())[0]


def history(text: list[int], prompt: int = 1) -> TokenHistory:
    past = TokenHistory(text[:prompt])
    for token in text[prompt:]:
        past.push(token)
    return past


@given(TEXTS, NGRAMS)
def test_no_ngram_twice(text, n):
    expected = theirs_bans(NoRepeatNGramLogitsProcessor(n), text)
    assert torch.equal(penalties.NoRepeatNgram(n, text)(SCORES.clone(), history(text)), expected)


@given(TEXTS, TEXTS, NGRAMS)
def test_no_ngram_of_the_source(source, text, n):
    expected = theirs_bans(EncoderNoRepeatNGramLogitsProcessor(n, torch.tensor([source])), text)
    assert torch.equal(
        penalties.NoSourceNgram(n, source, V_BANS)(SCORES.clone(), history(text)), expected
    )


def test_a_source_of_other_ids():
    """An encoder may know more ids than there are scores: they are followed, but not banned."""
    control = penalties.NoSourceNgram(2, [V_BANS + 1, 3, V_BANS + 2, 4], V_BANS)
    assert control(SCORES.clone(), history([3])).isfinite().all()
    assert torch.equal(
        control(SCORES.clone(), history([V_BANS + 1])).isfinite().nonzero()[:, 0],
        torch.tensor([0, 1, 2, 4, 5]),
    )


@given(TEXTS, SEQUENCES)
def test_bad_words(text, words):
    words = [list(word) for word in dict.fromkeys(map(tuple, words))]
    expected = theirs_bans(NoBadWordsLogitsProcessor(words), text)
    control = penalties.SequenceBias({tuple(word): -torch.inf for word in words})
    assert torch.equal(control(SCORES.clone(), history(text)), expected)


@given(TEXTS, SEQUENCES, st.lists(st.floats(-4, 4, width=32), min_size=6, max_size=6))
def test_sequence_bias(text, words, numbers):
    """transformers holds biases in float32."""
    biases = dict(zip(map(tuple, words), numbers, strict=False))
    expected = theirs_bans(SequenceBiasLogitsProcessor(biases), text)
    torch.testing.assert_close(
        penalties.SequenceBias(biases)(SCORES.clone(), history(text)), expected
    )
