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
