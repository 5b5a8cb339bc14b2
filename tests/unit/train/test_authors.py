"""Whose texts a batch has, and the logits along them."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from foretoken.train.corpus import Example
from foretoken.train.pair import (
    BatchSource,
    Pair,
    TrainingSequence,
    compute_new_token_logits,
    make_pair,
)
from pairs import relative
from tiny import llama, t5

V = 64


def examples(references: bool = True) -> list[Example]:
    random = torch.Generator().manual_seed(1)
    ids = torch.randint(2, V, (8, 10), generator=random).tolist()
    return [Example(row[:4], row[4:] if references else []) for row in ids]


def models(make) -> Pair:
    target = make(V=V)
    return make_pair(target, relative(target, 0.3), None)


@pytest.mark.parametrize("make", [llama, pytest.param(t5, marks=pytest.mark.prove)])
def test_shares_of_texts(make):
    of = models(make)
    data = examples()
    references = [list(e.reference) for e in data]

    def batch(step=0, seed=0, **shares):
        authors = BatchSource(of, 1.0, 6, **shares)
        return [text.new_tokens for text in authors.make_batch(data, 16, seed, step)]

    assert all(new in references for new in batch())
    own, theirs = batch(on_policy=1.0), batch(target_generated=1.0)
    assert not any(new in references for new in own + theirs) and own != theirs
    assert own == batch(on_policy=1.0) != batch(step=1, on_policy=1.0)
    mixed = batch(on_policy=0.4, target_generated=0.3)
    kinds = ["own" if n in own else "data" if n in references else "theirs" for n in mixed]
    assert set(kinds) == {"own", "theirs", "data"}
    bare = BatchSource(of, 1.0, 6).make_batch(examples(references=False), 4, 0, 0)
    assert all(len(text.new_tokens) > 1 for text in bare)  # the target's, where the data are silent


@pytest.mark.parametrize("make", [llama, t5])
def test_logits_are_those_of_each_text_alone(make):
    of = models(make)
    data = examples()
    texts = BatchSource(of, 1.0, 6, on_policy=1.0).make_batch(data, 3, 0, 0)
    texts = [
        TrainingSequence(t.request, t.new_tokens[: 2 + b]) for b, t in enumerate(texts)
    ]  # ragged
    together = compute_new_token_logits(of.target, texts)
    assert together.shape == (2 + 3 + 4, V)
    alone = torch.cat([compute_new_token_logits(of.target, [text]) for text in texts])
    assert torch.allclose(together, alone, atol=1e-4)
    forced = [replace(t, request=replace(t.request, forced={1: 9})) for t in texts]
    assert torch.equal(compute_new_token_logits(of.target, forced), together[[0, 2, 4, 5, 7, 8]])
