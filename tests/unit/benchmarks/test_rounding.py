"""Rounding: against two distributions that are known at every position."""

from __future__ import annotations

from math import log2

import numpy as np
import pytest

from scripts import benchmark
from table import TableModel
from tiny import TEXT, byte_level, metaspace

module = benchmark("rounding")
pieces, rounding, RoundedPiece = module.pieces, module.rounding, module.RoundedPiece
V = 5
random = np.random.default_rng(3)
P, Q = random.dirichlet(np.ones(V), V), random.dirichlet(np.ones(V), V)
TEXTS = [[1, 2, 3, 4, 0, 1], [4, 4, 2], [0, 3, 1, 2]]


def models(context: int | None = None) -> tuple[TableModel, TableModel]:
    tables = TableModel.markov(P.tolist()), TableModel.markov(Q.tolist())
    for each in tables:
        each.context = context
    return tables


@pytest.mark.parametrize(("chunk", "context"), [(64, None), (2, None), (64, 3), (2, 3)])
def test_the_two_distributions_at_every_position(
    monkeypatch: pytest.MonkeyPatch, chunk: int, context: int | None
) -> None:
    """Whatever passes and windows the text is cut into; these distributions follow from the last
    token."""
    monkeypatch.setattr(module, "CHUNK", chunk)
    model, rounded = models(context)
    loss = rounding(model, rounded, [RoundedPiece(ids, 2 * len(ids)) for ids in TEXTS])
    pairs = [pair for ids in TEXTS for pair in zip(ids, ids[1:], strict=False)]
    size = 2 * sum(map(len, TEXTS))
    bits = [-sum(log2(distribution[a, b]) for a, b in pairs) / size for distribution in (P, Q)]
    assert (loss.tokens, loss.bytes) == (len(pairs), size)
    assert loss.bits_per_byte.value == pytest.approx(bits[0], rel=1e-5)
    assert loss.rounded_bits_per_byte.value == pytest.approx(bits[1], rel=1e-5)
    assert loss.more_bits_per_byte.value == pytest.approx(bits[1] - bits[0], rel=1e-4)
    alike = np.mean([P[a].argmax() == Q[a].argmax() for a, _ in pairs])
    assert loss.same.value == pytest.approx(alike)
    shared = np.mean([np.minimum(P[a], Q[a]).sum() for a, _ in pairs])
    assert loss.overlap.value == pytest.approx(shared, rel=1e-5)
    assert loss.overlap.low < shared < loss.overlap.high
    assert model._texts == rounded._texts == []


def test_pieces_are_spread_over_a_text(monkeypatch: pytest.MonkeyPatch) -> None:
    """From its beginning to its end; bytes are those of what is predicted."""
    monkeypatch.setattr(module, "LETTERS", 40)
    text, tokenizer = TEXT * 40, byte_level()
    texts = pieces(text, tokenizer)
    assert len(texts) == module.PIECES
    decoded = [tokenizer.decode(piece.ids) for piece in texts]
    assert decoded[0] == text[:40] and decoded[-1] == text[-40:] and all(x in text for x in decoded)
    for piece, shown in zip(texts, decoded, strict=True):
        first = len(tokenizer.decode(piece.ids[:1]).encode())
        assert piece.bytes == len(shown.encode()) - first
    assert len(pieces(text[:100], tokenizer)) == 2


def test_a_token_that_begins_a_text_is_not_predicted(monkeypatch: pytest.MonkeyPatch) -> None:
    class Begins:
        """Puts id 0 before a text and id 1 behind it."""

        def __call__(self, text: str, add_special_tokens: bool = True, verbose: bool = True):
            ids = metaspace()(text, add_special_tokens=False)
            if add_special_tokens:
                ids["input_ids"] = [0, *ids["input_ids"], 1]
            return ids

    monkeypatch.setattr(module, "LETTERS", 40)
    for piece in pieces(TEXT, Begins()):  # type: ignore[arg-type]
        assert piece.ids[0] == 0 and piece.ids[-1] != 1 and piece.bytes >= 40
