"""The model of a known distribution."""

from __future__ import annotations

import torch

from table import TableModel

MATRIX = [[0.1, 0.9], [0.7, 0.3]]


def test_a_row_of_the_matrix_behind_every_token() -> None:
    model = TableModel.markov(MATRIX)
    model.start([[0], []])
    distributions = model.score([[1, 0], [1]], [2, 1]).exp()
    assert torch.allclose(
        distributions[0], torch.tensor([MATRIX[1], MATRIX[0]], dtype=torch.float64)
    )
    assert torch.allclose(distributions[1, 0], torch.tensor(MATRIX[1], dtype=torch.float64))


def test_rows_go_back_change_places_and_leave() -> None:
    seen: list[tuple[int, ...]] = []
    model = TableModel(lambda text: seen.append(text) or [0.5, 0.5], 2, encoder_decoder=True)
    model.start([[0, 1], [1]], [[9], [8]])
    model.set_lengths([1, 1])
    model.permute([1, 0, 0])
    model.leave([1])
    model.score([[1], [0]], [1, 1])
    assert seen == [(8, 1, 1), (9, 0, 0)]
