"""benchmarks/pairs.py: wide and narrow networks with one distribution, and drafts of the asked
alpha."""

from __future__ import annotations

import json
import sys
from types import ModuleType

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoModelForSeq2SeqLM

from foretoken import load
from scripts import benchmark

V = 256


@pytest.fixture(scope="module")
def pairs() -> ModuleType:
    return benchmark("pairs")


def distribution(pairs: ModuleType, kind: str, width: int, layers: int, eps: float, rest_seed: int):
    """Of a network with the core of seed 0, on fixed random ids."""
    family = pairs.FAMILIES[kind]
    config = family.config(width, layers, V, 64)
    model = pairs.network(family, torch.float32, 0, config, rest_seed, eps)
    ids = torch.randint(2, V, (2, 24), generator=torch.Generator().manual_seed(0))
    arguments = {"input_ids": ids} | ({"decoder_input_ids": ids} if kind == "t5" else {})
    return pairs.distributions(model, arguments, 20)


@pytest.mark.parametrize("kind", ["llama", "t5"])
def test_width_and_depth_do_not_change_the_distribution_of_a_core_alone(pairs, kind):
    narrow = distribution(pairs, kind, 128, 1, 0.0, 1)
    torch.testing.assert_close(distribution(pairs, kind, 256, 3, 0.0, 2), narrow, atol=1e-4, rtol=0)
    assert narrow.max(-1).values.mean() > 0.2  # peaked
    assert len(set(narrow.argmax(-1).tolist())) > 20  # and diverse


@pytest.mark.parametrize("kind", ["llama", "t5"])
def test_alpha_falls_as_eps_grows(pairs, kind):
    target = distribution(pairs, kind, 256, 2, 0.003, 1)
    alphas = [
        pairs.alpha(target, distribution(pairs, kind, 128, 1, eps, 2)) for eps in (0, 0.1, 0.5, 5)
    ]
    assert alphas == sorted(alphas, reverse=True)
    assert alphas[0] > 0.95 and alphas[-1] < 0.3


def test_bisection_finds_eps_or_refuses(pairs):
    eps, reached = pairs.bisect(lambda eps: 0.97 / (1 + eps), 0.5)
    assert reached == pytest.approx(0.5, abs=pairs.CLOSE) and eps == pytest.approx(0.94, abs=0.03)
    assert pairs.bisect(lambda eps: 0.97 / (1 + eps), 0.98) == (0.0, 0.97)
    with pytest.raises(SystemExit, match="out of reach"):
        pairs.bisect(lambda eps: 0.9 / (1 + eps), 0.95)


@pytest.mark.parametrize("kind, dtype", [("llama", "bfloat16")])
def test_a_saved_pair_loads_and_is_as_its_card_says(pairs, kind, dtype, tmp_path, monkeypatch):
    sizes = ["--vocab", str(V), "--params", "1M", "--draft-params", "500K"]
    rest = ["--alpha", "0.7", "--dtype", dtype]
    monkeypatch.setattr(sys, "argv", ["pairs.py", kind, str(tmp_path), *sizes, *rest])
    monkeypatch.setattr(pairs, "NEW", 32)
    pairs.main()
    card = json.loads((tmp_path / "pair.json").read_text())
    assert card["drafts"]["draft-a70"]["alpha at T=1"] == pytest.approx(0.7, abs=pairs.TOLERANCE)
    assert card["target"]["zeros"] < 1e-4
    loader = AutoModelForSeq2SeqLM if kind == "t5" else AutoModelForCausalLM
    models = [loader.from_pretrained(tmp_path / name) for name in ("target", "draft-a70")]
    assert {str(model.dtype) for model in models} == {f"torch.{dtype}"}
    target, draft = (model.float().eval() for model in models)
    written = pairs.texts(target, 32, sampled=True, seed=0)
    again = pairs.alpha(written.distributions, written.seen_by(draft))
    assert again == pytest.approx(card["drafts"]["draft-a70"]["alpha at T=1"], abs=1e-3)
    spec = load(target, draft)
    assert len(spec.generate([[5, 6, 7]], max_new_tokens=8)[0].tokens) == 8
