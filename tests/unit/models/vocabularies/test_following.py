"""What is read anew of texts that change, and the end of those that are too long."""

from __future__ import annotations

import pytest
import torch

from foretoken.models.table import TableModel
from foretoken.models.vocabularies.following import Following, agreed
from oracle import random_model

V = 5
Q = random_model(1, V)


class Counting(TableModel):
    """Counts what it reads."""

    read = 0

    def score(self, blocks, need):
        self.read += sum(map(len, blocks))
        assert self.context is None or all(
            len(text) + len(block) <= self.context
            for text, block in zip(self._texts, blocks, strict=True)
        )
        return super().score(blocks, need)


def following(texts, **options) -> tuple[Following, Counting]:
    model = Counting(Q, V, **options)
    follower = Following(model)
    follower.start(texts)
    return follower, model


def distributions(rows: Following, texts) -> list[list[float]]:
    return rows.score(texts, [int(text is not None) for text in texts])[:, 0].exp().tolist()


def test_only_what_differs_is_read():
    rows, model = following([[1, 2, 3], [4]])
    (first, second), read = distributions(rows, [[1, 2, 4, 4], [4, 0]]), model.read
    assert first == pytest.approx(Q((1, 2, 4, 4))) and second == pytest.approx(Q((4, 0)))
    assert read == 3
    assert (
        distributions(rows, [None, [4, 0]])[1] == pytest.approx(Q((4, 0)))
        and model.read == read + 1
    )
    rows.read([[1, 2, 4, 4, 3], None])
    assert model.read == read + 2
    rows.read([None, None])


def test_what_follows_several_tokens_is_read_again():
    rows, model = following([[1, 2, 3]])
    logits = rows.score([[1, 2, 3]], [2])
    assert logits[0, 0].exp().tolist() == pytest.approx(Q((1, 2)))
    assert logits[0, 1].exp().tolist() == pytest.approx(Q((1, 2, 3)))
    assert model.read == 2 and rows.holds([1, 2, 3]) == 3


def test_rows_move_up_and_are_copied():
    rows, _ = following([[1], [2], [3]])
    rows.leave([0])
    assert distributions(rows, [[2, 0], [3, 0]])[1] == pytest.approx(Q((3, 0)))
    rows.permute([1, 1])
    assert distributions(rows, [[3, 1], [3, 0, 2]])[1] == pytest.approx(Q((3, 0, 2)))


@pytest.mark.parametrize("context", [1, 2, 5, 8])
def test_of_a_long_text_the_end_is_read_and_moves_seldom(context):
    rows, model = following([[]], context=context)
    text = [int(x) for x in torch.randint(V, (40,), generator=torch.Generator().manual_seed(0))]
    lengths = []
    for n in range(1, len(text) + 1):
        (distribution,) = distributions(rows, [text[:n]])
        lengths.append(len(rows._cached[0]))
        assert distribution == pytest.approx(Q(tuple(text[n - lengths[-1] : n])))
    assert lengths[:context] == list(range(1, context + 1))
    assert min(lengths[context:], default=1) > context // 2 and max(lengths) == context
    whole, _ = following([text], context=context)
    assert whole._cached == rows._cached


def test_the_common_beginning_of_two_texts():
    assert agreed([1, 2, 3], [1, 2, 4, 5]) == 2
    assert agreed([1, 2], [1, 2, 3]) == agreed([1, 2, 3], [1, 2]) == 2
    assert agreed([], [1]) == agreed([2], [1]) == 0
