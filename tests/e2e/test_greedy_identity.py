"""At temperature 0 every text is transformers' own, on every runtime, whatever drafts: token by
token, in float64, or as float32 allows on the native decoder.

This is where cache positions that are off by one would show (transformers #30042), rows that
disturb each other (arXiv 2510.22876) and windows that lose or keep too much (transformers #46629).
"""

from __future__ import annotations

from typing import Any

import pytest
from transformers import PreTrainedModel

import pairs
from foretoken import CascadeDrafter, Completion, LookupDrafter, MixtureDrafter
from foretoken.drafters.lm import LMDrafter
from foretoken.models.stock.model import CausalModel, Seq2SeqModel
from foretoken.models.stock.selfcheck import LOGIT_TOLERANCE, measure_deviation
from foretoken.sampling.acceptance_rules import EXACT_RULES
from pairs import PROMPTS, V, an_end, assert_greedy, relative, scores, speculator, stock, target
from tiny_families import FAMILIES

LIMIT = 24
RUNTIMES = {"transformers": FAMILIES, "graphs": FAMILIES, "native": FAMILIES}
CASES = [
    pytest.param(
        runtime, name, id=f"{name} on {runtime}", marks=[pytest.mark.native] * (runtime == "native")
    )
    for runtime, names in RUNTIMES.items()
    for name in names
]
DAILY = [
    *("Llama on transformers", "Gemma 3 on graphs", "T5 on graphs"),
    *("Mistral on native", "T5 on native"),
]


def assert_chosen(found: Completion, model: PreTrainedModel, prompt: list[int], eos: int) -> None:
    """Each token wins in a full forward pass, up to float32's noise as the self-check bounds it."""
    settings, source = model.generation_config, None
    head, new = prompt, found.tokens
    if model.config.is_encoder_decoder:
        head, source = [settings.decoder_start_token_id], prompt
    logits = scores(model, [*head, *new[:-1]], source)[len(head) - 1 :].double()
    for i, (token, row) in enumerate(zip(new, logits, strict=True)):
        forced = settings.forced_eos_token_id if i == LIMIT - 1 else None
        missing = row.max() - row[token]
        assert missing <= 2 * LOGIT_TOLERANCE * (row.max() - row.min()) or token == forced
    assert eos not in new[:-1] and (len(new) == LIMIT or new[-1] == eos)


@pytest.mark.daily(*DAILY)
@pytest.mark.parametrize(("runtime", "name"), CASES)
def test_every_runtime_and_family(runtime: str, name: str) -> None:
    """Alone and in a ragged batch whose rows end at different times, some past a window."""
    if runtime == "graphs":
        pairs.must_record(name)
    model = target(name)
    eos = an_end(model, PROMPTS[1], LIMIT)
    pair = speculator(model, relative(model), eos, runtime)
    drafted = accepted = 0
    for gamma in 0, 1, 4:
        texts = pair.generate(PROMPTS, max_new_tokens=LIMIT, gamma=gamma)
        assert texts[1].finish_reason == "stop"
        (alone,) = pair.generate(PROMPTS[gamma % 3], max_new_tokens=LIMIT, gamma=gamma)
        for text, prompt in zip([*texts, alone], [*PROMPTS, PROMPTS[gamma % 3]], strict=True):
            if runtime != "native":
                assert_greedy(text, model, prompt, LIMIT, eos)
            elif text.tokens != stock(model, prompt, LIMIT, eos):
                assert_chosen(text, model, prompt, eos)
            assert text.stats.runtime == runtime
            drafted += text.stats.drafted
            accepted += text.stats.accepted
    assert 0 < accepted < drafted
    if runtime == "native":
        assert measure_deviation(model, pair.target) < LOGIT_TOLERANCE
        pair.target.permute([])


@pytest.mark.parametrize(
    "runtime", ["graphs", pytest.param("native", marks=[pytest.mark.native, pytest.mark.prove])]
)
def test_sampled_texts_do_not_depend_on_the_runtime(runtime: str) -> None:
    """The same keyed numbers and, but for rounding, the same distributions: the same tokens."""
    model = target("Llama")
    here, there = (speculator(model, relative(model), None, n) for n in ("transformers", runtime))
    for rule in EXACT_RULES:
        how: Any = {"max_new_tokens": LIMIT, "temperature": 0.9, "top_p": 0.95, "rule": rule}
        both = (each.generate(PROMPTS, gamma=3, seed=3, **how) for each in (here, there))
        for ours, theirs in zip(*both, strict=True):
            assert ours.tokens == theirs.tokens
            assert [r.draft_tokens for r in ours.steps] == [r.draft_tokens for r in theirs.steps]


@pytest.mark.daily("Gemma 3")
@pytest.mark.parametrize("name", ["Mistral", "Gemma 2", "Gemma 3"])
def test_windows_are_passed(name: str) -> None:
    """transformers #46629, #48280: prompt, text and blocks each longer than the window."""
    model = target(name)
    window = model.config.sliding_window
    assert window == pairs.WINDOW and len(PROMPTS[2]) > 2 * window
    pair = speculator(model, relative(model, noise=0.1))
    texts = pair.generate(PROMPTS, max_new_tokens=64, gamma=window + 4)
    for prompt, text in zip(PROMPTS, texts, strict=True):
        assert_greedy(text, model, prompt, 64)
        assert any(record.drafted > record.accepted for record in text.steps)
        assert any(record.accepted for record in text.steps)


def cascade(model: PreTrainedModel) -> CascadeDrafter:
    """A draft of the target's kind, and a decoder that drafts for it."""
    draft = relative(model)
    kind = Seq2SeqModel if model.config.is_encoder_decoder else CausalModel
    last = LMDrafter(CausalModel(relative(target("Llama"))), V)
    return CascadeDrafter(kind(draft), MixtureDrafter([(LookupDrafter(), 1), (last, None)]), 2)


DRAFTS = {
    "model": relative,
    "cascade": cascade,
    "decoder": lambda model: relative(target("Llama")),
    "lookup": lambda model: "lookup",
}


@pytest.mark.daily("model", "decoder")
@pytest.mark.parametrize("kind", DRAFTS)
@pytest.mark.parametrize("name", ["Llama", "T5"])
def test_every_draft_gamma_and_end(name: str, kind: str) -> None:
    """gamma 0 to 8, the rules by turns; an end of sequence inside a kept block ends the text."""
    model, rules = target(name), list(EXACT_RULES)
    stop = an_end(model, PROMPTS[0], LIMIT)
    for eos, limit in (stop, LIMIT), (None, 13):
        pair = speculator(model, DRAFTS[kind](model), eos)
        for i, gamma in enumerate((0, 1, 2, 4, 8)):
            rule = rules[i % len(rules)]
            texts = pair.generate(PROMPTS, max_new_tokens=limit, gamma=gamma, rule=rule)
            for prompt, text in zip(PROMPTS, texts, strict=True):
                assert_greedy(text, model, prompt, limit, eos)
            assert (texts[0].finish_reason == "stop") == (eos is not None)
