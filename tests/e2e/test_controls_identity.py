"""With controls, too, every text at temperature 0 is transformers' own, token by token, in float64.

Each row is compared with transformers' text for that row alone, by the same names and numbers. Its
argmax is one of float32: where its two best scores are within rounding, the comparison ends. Where
its controls leave nothing it goes on with id 0, and a row here ends.
"""

from __future__ import annotations

from functools import cache
from itertools import product
from random import Random
from typing import Any, NamedTuple

import pytest
import torch
from transformers import LogitsProcessorList, PreTrainedModel, TopKLogitsWarper

from foretoken import Completion, Speculator
from foretoken.errors import ControlError
from pairs import PROMPTS, V, an_end, relative, speculator, stock, target

LIMIT = 16
TIE = 1e-5  # relative to the scores: float32's rounding and more
NAMES = ("Llama", "T5")
DRAFTS = ("model", "lookup")
GAMMAS = (0, 1, 4)

# Each control's values: all are tried alone, and at random among others
VALUES: dict[str, list[Any]] = {
    "repetition_penalty": [1.6, 0.8],
    "encoder_repetition_penalty": [1.5, 0.7],
    "no_repeat_ngram_size": [1, 2],
    "encoder_no_repeat_ngram_size": [1, 2],
    "bad_words_ids": ["taken"],
    "sequence_bias": ["taken"],
    "min_new_tokens": [12, LIMIT],
    "suppress_tokens": ["taken"],
    "begin_suppress_tokens": ["taken"],
    "forced_bos_token_id": [7],
    "forced_eos_token_id": [11],
    "exponential_decay_length_penalty": [(2, 1.7), (3, 0.5)],
    "processors": [0.7, 1.3],
}
BANNED = {"suppress_tokens": list(range(V))}
ALONE: dict[str, list[dict[str, Any]]] = {
    "everything banned": [BANNED, BANNED | {"remove_invalid_values": True}],
    **{name: [{name: value} for value in values] for name, values in VALUES.items()},
}


class Text(NamedTuple):
    """What transformers makes of a prompt."""

    tokens: list[int]
    failed: bool  # behind these its controls leave nothing
    tied: bool  # behind these two scores are within rounding


def taken(name: str, control: str, random: Random) -> Any:
    """Ids that matter: of the greedy texts, which the control then leaves."""
    texts = [stock(target(name), prompt, LIMIT) for prompt in PROMPTS]
    ids = [random.choice(text[: LIMIT // 2]) for text in texts]
    pairs = [text[i : i + 2] for text in texts for i in (random.randrange(6),)]
    if control == "bad_words_ids":
        return [ids[:1], *pairs, [ids[0], ids[1], ids[2]]]
    if control == "sequence_bias":
        return {(ids[0],): -2.0, tuple(pairs[0]): -9.0, tuple(pairs[1]): 4.0, (3, 5): 1.0}
    return sorted({*ids, texts[0][0]})


def sampling(name: str, chosen: dict[str, Any], random: Random) -> dict[str, Any]:
    """A choice of controls, its ids filled in."""
    return {k: taken(name, k, random) if v == "taken" else v for k, v in chosen.items()}


def combined(name: str, seed: int) -> dict[str, Any]:
    """Some controls at once, with random numbers."""
    random = Random(seed)
    names = random.sample(list(VALUES), random.choice([2, 3, 4, 6]))
    return sampling(name, {k: random.choice(VALUES[k]) for k in names}, random)


def expected(
    model: PreTrainedModel, prompt: list[int], eos: int, sampled: dict[str, Any], limit: int = LIMIT
) -> Text:
    """transformers' text of one row, and where its scores say that it is none to compare."""
    ids = torch.tensor([prompt], device=model.device)
    settings = {**sampled, "eos_token_id": eos, "pad_token_id": 0, "max_new_tokens": limit}
    if "processors" in sampled:
        settings["logits_processor"] = own(settings.pop("processors"))
    out = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        do_sample=False,
        return_dict_in_generate=True,
        output_scores=True,
        **settings,
    )
    start = 1 if model.config.is_encoder_decoder else len(prompt)
    tokens = out.sequences[0, start:].tolist()
    for i, scores in enumerate(out.scores):
        best, second = scores[0].topk(2).values.tolist()
        if best == -torch.inf:
            return Text(tokens[:i], True, False)
        if second > torch.finfo(torch.float32).min and best - second < TIE * (1 + abs(best)):
            return Text(tokens[:i], False, True)
    return Text(tokens, False, False)


def own(penalty: float) -> LogitsProcessorList:
    """A user's processors, one of them transformers' own: of a kind that `generate` does not make
    itself, as that one would then be left out."""

    def evens(ids, scores):  # less likely behind an odd id, and in place
        scores[:, ::2] -= penalty * float(ids[0, -1] % 2)
        return scores

    return LogitsProcessorList([TopKLogitsWarper(20), evens])


@cache
def spec(name: str, draft: str) -> tuple[Speculator, int]:
    """A pair, and an end that its greedy text reaches."""
    model = target(name)
    eos = an_end(model, PROMPTS[1], LIMIT)
    return speculator(model, relative(model) if draft == "model" else "lookup", eos), eos


def assert_same(found: Completion, text: Text, limit: int = LIMIT) -> None:
    n = len(text.tokens) if text.tied else None
    assert found.tokens[:n] == text.tokens
    assert text.tied or (found.finish_reason == "error") == text.failed
    assert not text.failed or "allows no token after" in (found.error or "")


def compare(name: str, draft: str, gammas: tuple[int, ...], sampled: dict[str, Any]) -> int:
    """In a ragged batch and alone; how many draft tokens were kept."""
    pair, eos = spec(name, draft)
    texts = [expected(target(name), prompt, eos, sampled) for prompt in PROMPTS]
    arguments = {k: own(v) if k == "processors" else v for k, v in sampled.items()}
    count = 0
    for gamma in gammas:
        options = {"max_new_tokens": LIMIT, "gamma": gamma, **arguments}
        alone = PROMPTS[gamma % 3], texts[gamma % 3]
        if alone[1].failed:
            with pytest.raises(ControlError, match="allows no token after"):
                pair.generate(alone[0], **options)
        else:
            assert_same(pair.generate(alone[0], **options)[0], alone[1])
        if all(text.failed for text in texts):
            continue
        for completion, text in zip(pair.generate(PROMPTS, **options), texts, strict=True):
            assert_same(completion, text)
            count += completion.stats.accepted
    return count


@pytest.mark.parametrize("control", ALONE)
def test_every_control_alone(control: str) -> None:
    """Each changes a text, else this would prove nothing."""
    changed = False
    for name, chosen in product(NAMES, ALONE[control]):
        _, eos = spec(name, "model")
        sampled = sampling(name, chosen, Random(0))
        count = compare(name, "model", (4,), sampled)
        assert count or control == "everything banned"
        for prompt in PROMPTS:
            text = expected(target(name), prompt, eos, sampled)
            changed |= text.tokens != stock(target(name), prompt, LIMIT, eos)
    assert changed


@pytest.mark.parametrize(
    "seed", [*range(6), *(pytest.param(n, marks=pytest.mark.prove) for n in range(6, 200))]
)
def test_combinations(seed: int) -> None:
    """Once each of names, drafts and gammas soon."""
    name, draft, gamma = NAMES[seed % 2], DRAFTS[seed // 2 % 2], GAMMAS[seed % 3]
    compare(name, draft, (gamma,), combined(name, seed))
