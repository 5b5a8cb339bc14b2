"""Bans and biases against transformers' processors; what they remember can go back."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers.generation.logits_process import (
    EncoderNoRepeatNGramLogitsProcessor,
    ForcedBOSTokenLogitsProcessor,
    ForcedEOSTokenLogitsProcessor,
    InfNanRemoveLogitsProcessor,
    MinNewTokensLengthLogitsProcessor,
    NoBadWordsLogitsProcessor,
    NoRepeatNGramLogitsProcessor,
    SequenceBiasLogitsProcessor,
    SuppressTokensAtBeginLogitsProcessor,
    SuppressTokensLogitsProcessor,
)

from foretoken.controls import penalties
from foretoken.controls.history import History

V = 6
SCORES = torch.linspace(-2, 3, V, dtype=torch.float64)
TEXTS = st.lists(st.integers(0, V - 1), min_size=1, max_size=14)
NGRAMS = st.integers(1, 4)
SEQUENCES = st.lists(
    st.lists(st.integers(0, V - 1), min_size=1, max_size=4), min_size=1, max_size=6
)


def theirs(processor, text: list[int]) -> torch.Tensor:
    return processor(torch.tensor([text]), SCORES[None].clone())[0]


def history(text: list[int], prompt: int = 1) -> History:
    past = History(text[:prompt])
    for token in text[prompt:]:
        past.push(token)
    return past


@given(TEXTS, NGRAMS)
def test_no_ngram_twice(text, n):
    expected = theirs(NoRepeatNGramLogitsProcessor(n), text)
    assert torch.equal(penalties.NoRepeat(n, text)(SCORES.clone(), history(text)), expected)


@given(TEXTS, NGRAMS, st.lists(st.integers(-3, V - 1), max_size=40))
def test_what_it_remembers_can_go_back(prompt, n, walk):
    """Negative: so many tokens are taken back."""
    control, text = penalties.NoRepeat(n, prompt), list(prompt)
    for token in walk:
        if token >= 0:
            text.append(token)
            control.push(token)
        for _ in range(min(max(0, -token), len(text) - len(prompt))):
            text.pop()
            control.pop()
        fresh = penalties.NoRepeat(n, text)(SCORES.clone(), history(text))
        assert torch.equal(control(SCORES.clone(), history(text)), fresh)


@given(TEXTS, TEXTS, NGRAMS)
def test_no_ngram_of_the_source(source, text, n):
    expected = theirs(EncoderNoRepeatNGramLogitsProcessor(n, torch.tensor([source])), text)
    assert torch.equal(
        penalties.NoneOfSource(n, source, V)(SCORES.clone(), history(text)), expected
    )


def test_a_source_of_other_ids():
    """An encoder may know more ids than there are scores: they are followed, but not banned."""
    control = penalties.NoneOfSource(2, [V + 1, 3, V + 2, 4], V)
    assert control(SCORES.clone(), history([3])).isfinite().all()
    assert torch.equal(
        control(SCORES.clone(), history([V + 1])).isfinite().nonzero()[:, 0],
        torch.tensor([0, 1, 2, 4, 5]),
    )


@given(TEXTS, SEQUENCES)
def test_bad_words(text, words):
    words = [list(word) for word in dict.fromkeys(map(tuple, words))]
    expected = theirs(NoBadWordsLogitsProcessor(words), text)
    control = penalties.Biased({tuple(word): -torch.inf for word in words})
    assert torch.equal(control(SCORES.clone(), history(text)), expected)


@given(TEXTS, SEQUENCES, st.lists(st.floats(-4, 4, width=32), min_size=6, max_size=6))
def test_sequence_bias(text, words, numbers):
    """transformers holds biases in float32."""
    biases = dict(zip(map(tuple, words), numbers, strict=False))
    expected = theirs(SequenceBiasLogitsProcessor(biases), text)
    torch.testing.assert_close(penalties.Biased(biases)(SCORES.clone(), history(text)), expected)


@given(TEXTS, st.integers(1, 6))
def test_ends_among_the_first_new_tokens(text, least):
    processor = MinNewTokensLengthLogitsProcessor(1, least, torch.tensor([2, 5]))
    control = penalties.Suppressed([2, 5], until=least)
    assert torch.equal(control(SCORES.clone(), history(text)), theirs(processor, text))


@given(TEXTS, st.integers(0, 3))
def test_suppressed(text, begin):
    everywhere = theirs(SuppressTokensLogitsProcessor([0, 4]), text)
    assert torch.equal(penalties.Suppressed([0, 4])(SCORES.clone(), history(text)), everywhere)
    first = theirs(SuppressTokensAtBeginLogitsProcessor([0, 4], 1 + begin), text)
    control = penalties.Suppressed([0, 4], begin, begin + 1)
    assert torch.equal(control(SCORES.clone(), history(text)), first)


@given(TEXTS, st.integers(1, 10))
def test_forced(text, limit):
    """The decoder's second token, and the last that fits."""
    processors = [ForcedBOSTokenLogitsProcessor(3), ForcedEOSTokenLogitsProcessor(1 + limit, 5)]
    expected = SCORES[None].clone()
    for processor in processors:
        expected = processor(torch.tensor([text]), expected)
    control = penalties.Forced({0: 3} | {limit - 1: 5})
    assert torch.equal(control(SCORES.clone(), history(text)), expected[0])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_what_is_invalid(dtype):
    scores = torch.tensor([1.0, torch.nan, torch.inf, -torch.inf, -2.0], dtype=dtype)
    expected = InfNanRemoveLogitsProcessor()(torch.tensor([[0]]), scores[None].clone())[0]
    assert torch.equal(penalties.finite(scores, history([0])), expected)
