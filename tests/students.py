"""Small targets, and the texts that they write, for drafts over their states to learn."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from transformers import PreTrainedModel

import foretoken
import tiny
from foretoken.train.corpus import Example, Examples
from foretoken.train.generated_data import generate_references

V = 64
ROOM = 10**8  # bytes for states


def network(seed: int = 0) -> PreTrainedModel:
    return tiny.llama(V, num_hidden_layers=6, seed=seed).requires_grad_(False)


def examples(target: PreTrainedModel, folder: Path, count: int = 24) -> Examples:
    """The target's own texts of up to 20 tokens."""
    prompts = [Example([1 + i % 60, 1 + 7 * i % 60], []) for i in range(count)]
    asked = Examples(prompts[4:], prompts[:4], "prompts")
    spec = foretoken.load(target, "none")
    options: dict[str, Any] = {"length": 20, "temperatures": (1.0, 0.0), "seed": 0}
    return generate_references(spec, asked, folder, **options, report=lambda n: None)
