"""The probability integral transform: tokens of known laws become numbers that must be uniform.

Whatever the laws, each given the past, the numbers are independent and uniform on [0, 1) where
the tokens were drawn from them (Rosenblatt 1952, randomized within a token). Knows no models.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Uniforms:
    """The numbers of some tokens, `[n]` each, float64."""

    ranked: Tensor  # likeliest tokens first: shows a law that is too sharp or too flat
    by_id: Tensor  # in the order of the ids: shows random numbers that were used twice


def uniforms(law: Tensor, tokens: Tensor, noise: Tensor) -> Uniforms:
    """The numbers of `tokens [n]` under `law [n, V]`; `noise [n]` is uniform and fresh.

    A token without mass gets the very end of the ranks.
    """
    p = law.double()
    p = p / p.sum(-1, keepdim=True)
    masses = p.gather(1, tokens[:, None])
    ids = torch.arange(p.shape[1], device=p.device)
    equals = p.where(p == masses, 0.0).sum(-1)
    ranked = p.where(p > masses, 0.0).sum(-1) + noise * equals
    by_id = p.where(ids < tokens[:, None], 0.0).sum(-1) + noise * masses[:, 0]
    return Uniforms(ranked.cpu(), by_id.cpu())
