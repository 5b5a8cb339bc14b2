"""The translation ladder in models/: a T5 target and its drafts translate, and translate alike with
and without draft tokens."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForSeq2SeqLM

import foretoken
from reproduction.experiments import quality

ROOT = Path(__file__).parents[2]
LADDER = ROOT / "models" / "translation"
DRAFTS = ("draft-4", "draft-12", "draft-40")
CAPTIONS = [
    line.split("\t")
    for line in (ROOT / "reproduction/recipes/prompts/captions.tsv").read_text("utf-8").splitlines()
]
SOURCES, REFERENCES = [source for source, _ in CAPTIONS], [target for _, target in CAPTIONS]


def test_it_is_small_and_in_transformers_own_layout() -> None:
    assert sum(path.stat().st_size for path in LADDER.rglob("*.safetensors")) <= 12 * 10**6
    sizes = []
    for name in ("target", *DRAFTS):
        model = AutoModelForSeq2SeqLM.from_pretrained(LADDER / name, dtype="auto")
        assert model.config.model_type == "t5" and model.dtype == torch.bfloat16
        sizes.append(sum(weight.numel() for weight in model.parameters()))
    target, *drafts = sizes
    for draft, share in zip(drafts, (4, 12, 40), strict=True):
        assert target / draft == pytest.approx(share, rel=0.1)


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[pytest.mark.prove] * (n != "draft-12")) for n in DRAFTS]
)
def test_translations_score_the_same_with_and_without_draft_tokens(name: str) -> None:
    pair = foretoken.load(LADDER / "target", LADDER / name, dtype="float64")
    comparison = quality.with_and_without(
        pair, SOURCES[:12], REFERENCES[:12], quality.translation, gamma=3, max_new_tokens=24
    )
    assert comparison["same"] == 1 and comparison["plain"] == comparison["speculative"]
    assert comparison["plain"]["bleu"] > 15  # it translates


def test_sampled_translations_cost_the_target_the_same_with_and_without_draft_tokens() -> None:
    """Two estimates of one number from 40 texts each. Their difference is beyond four standard
    errors, twice the intervals' root of squares, in 1 of 16,000 runs; the seeds are fixed."""
    pair = foretoken.load(LADDER / "target", LADDER / "draft-12", dtype="float64")
    params = foretoken.SamplingParams(1.0, max_new_tokens=16, logprobs=0)
    plain, drafted = (
        quality.nats(pair.generate(SOURCES, params, gamma=gamma, seed=gamma)) for gamma in (0, 3)
    )
    assert abs(plain.value - drafted.value) < 2 * math.hypot(plain.error, drafted.error)
