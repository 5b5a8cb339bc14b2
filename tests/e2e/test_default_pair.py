"""The pair that ships: what `load()` and `foretoken generate` give where no model is named."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import foretoken
from foretoken.certificate.certify import CertificatePlan, certify

ASSETS = Path(foretoken.__file__).parent / "assets"
PROMPTS = [
    "The old house stood at the end of the lane, and",
    '"I have never seen him before," said the girl,',
    "In the morning they",
]


@pytest.fixture(scope="module")
def pair() -> foretoken.Speculator:
    return foretoken.load(dtype="float64")


def test_it_is_small_and_in_transformers_own_layout():
    files = [path for name in ("target", "draft") for path in (ASSETS / name).iterdir()]
    assert sum(path.stat().st_size for path in files) <= 18 * 10**6
    for name in ("target", "draft"):
        model = AutoModelForCausalLM.from_pretrained(ASSETS / name, dtype="auto")
        assert model.config.model_type == "llama" and model.dtype == torch.bfloat16


@pytest.fixture(scope="module")
def stock() -> list[list[int]]:
    """transformers' own greedy text behind every prompt, in float64."""
    model = AutoModelForCausalLM.from_pretrained(ASSETS / "target", dtype=torch.float64)
    tokenizer = AutoTokenizer.from_pretrained(ASSETS / "target")
    texts: list[list[int]] = []
    for prompt in PROMPTS:
        ids = tokenizer(prompt, return_tensors="pt")
        out = model.generate(**ids, do_sample=False, max_new_tokens=32)
        texts.append(out[0, ids.input_ids.shape[1] :].tolist())
    return texts


@pytest.mark.daily(4)
@pytest.mark.parametrize("gamma", [4, None])
def test_greedy_text_is_transformers_own(pair, stock, gamma):
    """In a ragged batch, and alone."""
    together = pair.generate(PROMPTS, gamma=gamma, max_new_tokens=32)
    assert [completion.tokens for completion in together] == stock
    assert pair.generate(PROMPTS[0], gamma=gamma, max_new_tokens=32)[0].tokens == stock[0]


@pytest.mark.daily(1.0)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_the_draft_is_a_fair_guesser(pair, temperature):
    """And the target writes words."""
    completions = pair.generate(
        PROMPTS, gamma=4, temperature=temperature, top_p=0.9, max_new_tokens=64, seed=1
    )
    for completion in completions:
        letters = sum(c.isalpha() or c.isspace() for c in completion.text)
        assert letters > 0.8 * len(completion.text) > 0 and "\ufffd" not in completion.text
    overlaps = [overlap for c in completions for step in c.steps for overlap in step.overlaps]
    assert sum(overlaps) / len(overlaps) > 0.3
    assert sum(c.stats.target_calls for c in completions) < sum(len(c.tokens) for c in completions)


def test_the_context_ends_it(pair):
    prompt = pair.inputs.encode_prompt("the house and ") * pair.target.context
    prompt = prompt[: pair.target.context - 9]
    (completion,) = pair.generate(prompt, gamma=4)
    assert completion.finish_reason == "stop" or len(completion.tokens) == 9


def test_the_command_line_needs_no_model(console):
    result = console("generate", PROMPTS[0], "--max-new-tokens", 20, "--json")
    assert result.code == 0
    document = json.loads(result.out)
    assert document["target"] == "novels"
    expected = foretoken.load().generate(PROMPTS[0], max_new_tokens=20)[0]
    assert document["completions"][0]["tokens"] == expected.tokens


@pytest.mark.prove
def test_it_is_certified(pair):
    """With few texts; `foretoken certify` takes more."""
    certificate = certify(pair, PROMPTS, CertificatePlan(num_samples=32, num_greedy_tokens=16))
    assert certificate.verdict == "lossless" and certificate.shapes.noise < 1e-4
    assert not certificate.differences
    assert certificate.greedy_tokens == 2 * (3 + 2) * 16  # gammas, rows
