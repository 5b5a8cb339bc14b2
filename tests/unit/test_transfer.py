"""One read gives what `tolist` gives of each part. On a device: `test_waits`."""

from __future__ import annotations

import torch

from foretoken.transfer import read_lists, send


def test_a_read_is_every_parts_list() -> None:
    parts = [torch.tensor([3, 1]), torch.tensor([[0.5], [0.25]]), torch.zeros(2, 0)]
    assert read_lists(*parts) == [[3, 1], [[0.5], [0.25]], [[], []]]


def test_nothing_moves_to_where_it_is() -> None:
    here = torch.tensor([1])
    assert send(here, torch.device("cpu")) is here
