"""At temperature 0 every text is transformers' own, whatever guesses: token by token, in float64.

This is where cache positions that are off by one would show (transformers #30042), rows that
disturb each other (arXiv 2510.22876) and windows that lose or keep too much (transformers #46629).
"""

from __future__ import annotations

from functools import cache

import pytest
import torch
from transformers import PreTrainedModel

import pairs
from foretoken import CascadeDrafter, Completion, LookupDrafter, MixtureDrafter
from foretoken.drafters.lm import LMDrafter
from foretoken.models.stock.model import CausalModel, Seq2SeqModel
from foretoken.sampling.verify import RULES
from pairs import PROMPTS, V, an_end, assert_greedy, relative, speculator, stock, target
from tiny_families import FAMILIES

LIMIT = 24
GAMMAS = range(9)
FEW = {"eos": (0, 1, 2, 4, 8), "limit": (1, 4, 8), "neither": (0, 3, 5)}
ENDS = {"eos": LIMIT, "limit": 13, "neither": LIMIT}


@pytest.mark.daily("Llama", "Gemma 3", "T5")
@pytest.mark.parametrize("name", FAMILIES)
def test_every_family(name: str) -> None:
    """Alone and in a ragged batch whose rows end at different times, some past a window."""
    model = target(name)
    eos = an_end(model, PROMPTS[1], LIMIT)
    pair = speculator(model, relative(model), eos)
    drafted = accepted = 0
    for gamma in 0, 1, 4:
        together = pair.generate(PROMPTS, max_new_tokens=LIMIT, gamma=gamma)
        for prompt, completion in zip(PROMPTS, together, strict=True):
            assert_greedy(completion, model, prompt, LIMIT, eos)
            drafted += completion.stats.drafted
            accepted += completion.stats.accepted
    for gamma, prompt in zip((1, 0, 4), PROMPTS, strict=True):
        (alone,) = pair.generate(prompt, max_new_tokens=LIMIT, gamma=gamma)
        assert_greedy(alone, model, prompt, LIMIT, eos)
    assert 0 < accepted < drafted  # both courses were taken
    assert together[1].finish_reason == "stop"


@pytest.mark.daily("Gemma 3")
@pytest.mark.parametrize("name", ["Mistral", "Gemma 2", "Gemma 3"])
def test_windows_are_passed(name: str) -> None:
    """transformers #46629, #48280: prompt, text and blocks each longer than the window."""
    model = target(name)
    window = model.config.sliding_window
    assert window == pairs.WINDOW and len(PROMPTS[2]) > 2 * window
    pair = speculator(model, relative(model, noise=0.1))
    for prompt, completion in zip(
        PROMPTS, pair.generate(PROMPTS, max_new_tokens=64, gamma=window + 4), strict=True
    ):
        assert_greedy(completion, model, prompt, 64)
        assert any(record.drafted > record.accepted for record in completion.steps)
        assert any(record.accepted for record in completion.steps)


@cache
def imitator(name: str) -> PreTrainedModel:
    """A Llama that has learned source and greedy text of two prompts: it drafts for a T5."""
    model = pairs.random("Llama", 5).requires_grad_(True)
    start = target(name).generation_config.decoder_start_token_id
    texts = [[*p, start, *stock(target(name), p, LIMIT)] for p in PROMPTS[:2]]
    steps = torch.optim.Adam(model.parameters(), lr=0.01)
    for _ in range(12):
        for text in torch.tensor(texts[:1]), torch.tensor(texts[1:]):
            text = text.to(model.device)
            loss = model(input_ids=text, labels=text, use_cache=False).loss
            steps.zero_grad()
            loss.backward()
            steps.step()
    return model.requires_grad_(False)


def cascade(name: str) -> CascadeDrafter:
    """Of a draft of the target's kind, and of a decoder that drafts for it."""
    model = relative(target(name))
    kind = Seq2SeqModel if model.config.is_encoder_decoder else CausalModel
    last = MixtureDrafter(
        [(LookupDrafter(), 1), (LMDrafter(CausalModel(relative(target("Llama"))), V), None)]
    )
    return CascadeDrafter(kind(model), last, 2)


DRAFTS = {
    "model": lambda name: relative(target(name)),
    "cascade": cascade,
    "decoder": imitator,
    "lookup": lambda name: "lookup",
    "uniform": lambda name: "uniform",
    "none": lambda name: "none",
}
PRODUCT = [(name, kind) for name in ("Llama", "T5") for kind in DRAFTS]
PRODUCT.remove(("Llama", "decoder"))


def product(name: str, kind: str, end: str, cases: list[tuple[int, str]]) -> list[Completion]:
    """Completions of the ragged batch for every case of gamma and rule, compared."""
    model = target(name)
    eos = an_end(model, PROMPTS[0], LIMIT) if end == "eos" else None
    pair = speculator(model, DRAFTS[kind](name), eos)
    found = []
    for gamma, rule in cases:
        texts = pair.generate(PROMPTS, max_new_tokens=ENDS[end], gamma=gamma, rule=rule)
        for prompt, text in zip(PROMPTS, texts, strict=True):
            assert_greedy(text, model, prompt, ENDS[end], eos)
        found += texts
    return found


@pytest.mark.daily("eos")
@pytest.mark.parametrize("end", ENDS)
@pytest.mark.parametrize(("name", "kind"), PRODUCT)
def test_every_drafter_gamma_and_end(name: str, kind: str, end: str) -> None:
    """gamma 0 to 8, the rules by turns; an end of sequence inside a kept block ends the text."""
    rules = list(RULES)
    results = product(name, kind, end, [(g, rules[i % len(rules)]) for i, g in enumerate(FEW[end])])
    steps = [record for text in results for record in text.steps]
    if kind in ("model", "decoder"):
        assert any(r.accepted for r in steps) and any(r.drafted > r.accepted for r in steps)
    if end == "eos":
        assert results[0].finish_reason == "stop"
        if kind == "decoder":
            assert any(0 < len(record.kept) == record.accepted for record in steps)


@pytest.mark.prove
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("end", ENDS)
@pytest.mark.parametrize(("name", "kind"), PRODUCT)
def test_the_full_product(name: str, kind: str, end: str, rule: str) -> None:
    product(name, kind, end, [(gamma, rule) for gamma in GAMMAS])


@pytest.mark.prove
@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("seed", range(3))
def test_other_weights(name: str, seed: int) -> None:
    """Whatever the draft makes of it, also where a text repeats itself."""
    model = pairs.random(name, 100 + seed)
    pair = speculator(model, relative(model, noise=0.06, seed=seed))
    for gamma in 0, 1, 4:
        for prompt, completion in zip(
            PROMPTS, pair.generate(PROMPTS, max_new_tokens=40, gamma=gamma), strict=True
        ):
            assert_greedy(completion, model, prompt, 40)
