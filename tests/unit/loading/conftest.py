"""A pair in folders, and a model without a tokenizer."""

from __future__ import annotations

from pathlib import Path

import pytest

from loads import PADDED
from tiny import byte_level, folder, llama


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Folders of a target and a smaller draft with the same tokenizer."""
    base = tmp_path_factory.mktemp("pair")
    draft = llama(320, seed=1, num_hidden_layers=1)
    return (
        folder(base / "target", llama(PADDED), byte_level()),
        folder(base / "draft", draft, byte_level()),
    )


@pytest.fixture(scope="module")
def bare(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder without a tokenizer."""
    return folder(tmp_path_factory.mktemp("bare") / "model", llama(PADDED))
