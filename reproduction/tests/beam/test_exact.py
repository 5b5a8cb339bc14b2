"""Speculative beam search finds the beams of plain beam search: random tables against the oracle,
small random transformers against transformers' own."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

import oracle
from foretoken import Speculator
from foretoken.drafters.lm import LMDrafter
from foretoken.generation_config import EndTokens
from pairs import DEVICE, PROMPTS, relative, scores, speculator, target
from pairs import random as network
from reproduction.beam import speculative
from reproduction.beam.search import BeamParams
from reproduction.beam.speculative import Beam, beam_search
from table import TableModel

FAMILIES = ["Llama", "GPT-2", "Mistral", "T5", "BART"]
STOPPING = (False, True, "never")
WIDTHS = ((0.5, 3, 3), (1.0, 4, 1), (2.0, 2, 2))  # penalty, beams, texts


def expected_beams(
    model: oracle.Model,
    width: int,
    limit: int,
    eos: frozenset[int] = frozenset(),
    length_penalty: float = 1.0,
    early_stopping: bool | str = False,
) -> list[tuple[oracle.Text, float]]:
    """Beam search as transformers defines it: finished texts and their scores, best first."""
    running: list[tuple[float, oracle.Text]] = [(0.0, ())]
    finished: list[tuple[float, oracle.Text]] = []
    for length in range(1, limit + 1):
        grown = []
        for total, text in running:
            with np.errstate(divide="ignore"):
                log_distribution = np.log(model(text))
            grown += [(total + float(lp), (*text, y)) for y, lp in enumerate(log_distribution)]
        grown = sorted((g for g in grown if g[0] > -np.inf), key=lambda g: -g[0])
        for total, text in grown[:width]:
            if text[-1] in eos or length == limit:
                finished.append((total / length**length_penalty, text))
        finished = sorted(finished, key=lambda f: -f[0])[:width]
        running = [g for g in grown if g[1][-1] not in eos][:width]
        if not running or (len(finished) == width and early_stopping is True):
            break
        at = limit if early_stopping == "never" and length_penalty > 0 else length
        if len(finished) == width and running[0][0] / at**length_penalty <= finished[-1][0]:
            break
    return [(text, score) for score, text in finished]


def mixed(p: oracle.Model, share: float, V: int, seed: int) -> oracle.Model:
    """A draft whose alpha is at least `share`, whatever the text."""
    other = oracle.random_model(seed, V)
    return lambda text: share * p(text) + (1 - share) * other(text)


def tables(
    p: oracle.Model, q: oracle.Model, V: int, eos: frozenset[int] = frozenset()
) -> Speculator:
    return Speculator(TableModel(p, V), LMDrafter(TableModel(q, V), V), ends=EndTokens(eos))


def compare(case: int) -> None:
    """One random case: distributions, widths, ends and penalties."""
    dice = random.Random(case)
    V, w, limit = dice.randint(3, 9), dice.randint(1, 4), dice.randint(1, 9)
    eos = frozenset(dice.sample(range(V), dice.randint(0, 2)))
    p = oracle.random_model(case, V, zeros=dice.choice([0.0, 0.0, 0.3]))
    q = mixed(p, dice.choice([0.0, 0.5, 0.9, 1.0]), V, case + 10_000)
    penalty, stopping = dice.choice([-0.5, 0.0, 0.5, 1.0, 2.0]), dice.choice(STOPPING)
    prompts = [[dice.randrange(V) for _ in range(dice.randint(1, 4))] for _ in range(2)]
    hypotheses = beam_search(
        tables(p, q, V, eos),
        prompts,
        BeamParams(w, w, penalty, stopping),
        max_new_tokens=limit,
        gamma=dice.randint(0, 4),
        draft_beams=w + dice.randint(0, 3),
    )
    for prompt, beams in zip(prompts, hypotheses, strict=True):
        distribution = lambda text, prompt=prompt: p((*prompt, *text))  # noqa: E731
        expected = expected_beams(distribution, w, limit, eos, penalty, stopping)
        assert [tuple(b.tokens) for b in beams] == [text for text, _ in expected]
        assert [b.score for b in beams] == pytest.approx([s for _, s in expected], abs=1e-9)


@pytest.mark.parametrize("first", range(0, 100, 20))
def test_random_tables_against_the_oracle(first: int) -> None:
    for case in range(first, first + 20):
        compare(case)


@pytest.mark.prove
def test_500_random_tables_against_the_oracle() -> None:
    for case in range(1000, 1500):
        compare(case)


def stock(model, prompt: list[int], limit: int, eos: int | None, **options):
    """Tokens and scores of transformers' own beam search."""
    ids = torch.tensor([prompt], device=DEVICE)
    out = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        do_sample=False,
        max_new_tokens=limit,
        eos_token_id=eos,
        pad_token_id=0,
        return_dict_in_generate=True,
        output_scores=True,
        **options,
    )
    start = 1 if model.config.is_encoder_decoder else len(prompt)
    texts = [text[start : start + limit] for text in out.sequences.tolist()]
    texts = [text[: text.index(eos) + 1] if eos in text else text for text in texts]
    return texts, out.sequences_scores.tolist()


def by_oracle(model, prompt: list[int], limit: int, eos: int | None, **options):
    """The same from full forwards without a cache, in float64."""
    settings, encoder_decoder = model.generation_config, model.config.is_encoder_decoder
    head, source = (
        ([settings.decoder_start_token_id], prompt) if encoder_decoder else (prompt, None)
    )

    def distribution(text: oracle.Text) -> np.ndarray:
        if settings.forced_eos_token_id is not None and len(text) == limit - 1:
            raise AssertionError("the oracle knows no forced ends")
        return oracle.softmax(scores(model, [*head, *text], source)[-1].double().numpy())

    ends = frozenset() if eos is None else frozenset({eos})
    beams = expected_beams(
        distribution,
        options["num_beams"],
        limit,
        ends,
        options["length_penalty"],
        options["early_stopping"],
    )[: options["num_return_sequences"]]
    return [list(text) for text, _ in beams], [score for _, score in beams]


def assert_same(beams: list[Beam], model, prompt, limit, eos, **options) -> None:
    texts, numbers = stock(model, prompt, limit, eos, **options)
    if [b.tokens for b in beams] != texts:  # transformers compares in float32: a near-tie
        texts, numbers = by_oracle(model, prompt, limit, eos, **options)
    assert [b.tokens for b in beams] == texts
    assert [b.score for b in beams] == pytest.approx(numbers, abs=1e-5)


@pytest.mark.prove
@pytest.mark.parametrize("stopping", STOPPING)
@pytest.mark.parametrize("name", FAMILIES)
def test_beams_are_those_of_transformers(name: str, stopping) -> None:
    model, limit = target(name), 10
    draft, ended = relative(model), 0
    for penalty, w, n in WIDTHS if name in ("Llama", "T5") else WIDTHS[:1]:
        options = {"num_beams": w, "num_return_sequences": n}
        options |= {"length_penalty": penalty, "early_stopping": stopping}
        params, none = BeamParams(**options), speculator(model, "none")
        plain = beam_search(none, PROMPTS, params, max_new_tokens=limit)
        eos = plain[1][0].tokens[4]
        spec = speculator(model, draft, eos)
        hypotheses = beam_search(spec, PROMPTS, params, max_new_tokens=limit)
        for prompt, without, beams in zip(PROMPTS, plain, hypotheses, strict=True):
            assert_same(without, model, prompt, limit, None, **options)
            assert_same(beams, model, prompt, limit, eos, **options)
            assert [b.finish_reason == "stop" for b in beams] == [
                b.tokens[-1] == eos for b in beams
            ]
            ended += sum(b.finish_reason == "stop" for b in beams)
            assert beams[0].stats.steps >= beams[0].stats.target_calls
    assert ended


def test_a_text_model_drafts_for_an_encoder_decoder() -> None:
    model, draft = target("T5"), network("Llama", 0)
    options = {"num_beams": 3, "num_return_sequences": 2}
    options |= {"length_penalty": 1.0, "early_stopping": False}
    spec, params = speculator(model, draft), BeamParams(**options)
    hypotheses = beam_search(spec, PROMPTS, params, max_new_tokens=8)
    for prompt, beams in zip(PROMPTS, hypotheses, strict=True):
        assert_same(beams, model, prompt, 8, None, **options)
        assert beams[0].stats.draft_calls > 0


def test_fewer_target_calls_where_alpha_is_0_8() -> None:
    V, limit = 12, 24
    for seed in range(8):
        p = oracle.random_model(seed, V, sharpness=0.2)
        q = mixed(p, 0.8, V, seed + 100)
        prompt = [seed % V]
        alphas = [float(np.minimum(p((*prompt, y)), q((*prompt, y))).sum()) for y in range(V)]
        spec = tables(p, q, V)
        plain = beam_search(spec, prompt, max_new_tokens=limit, gamma=0)[0][0]
        quick = beam_search(spec, prompt, max_new_tokens=limit)[0][0]
        assert plain.stats.target_calls == plain.stats.steps == limit
        assert quick.stats.target_calls < limit == quick.stats.steps
        assert quick.stats.steps == sum(1 + depth for depth in quick.stats.depths)
        assert (quick.tokens, quick.score) == (plain.tokens, pytest.approx(plain.score))
        assert min(alphas) >= 0.8 - 1e-9


def test_a_perfect_draft_is_followed_all_the_way() -> None:
    p = oracle.random_model(3, 8)
    best = beam_search(tables(p, p, 8), [1], max_new_tokens=12, gamma=3)[0][0]
    assert best.stats.depths == (3, 3, 3)
    assert best.stats.target_calls == 3


def test_negative_control_without_the_look_for_missing_beams(monkeypatch) -> None:
    """Beams that nobody drafted are dropped instead: other texts come out."""

    def careless(search, tree) -> int:
        steps = 0
        while not search.done and any(node in tree.logits for node in search.nodes):
            search.running = [x for x in search.running if x.node in tree.logits]
            search.step(torch.stack([tree.logits[node] for node in search.nodes]))
            steps += 1
        return steps - 1

    monkeypatch.setattr(speculative, "_advance", careless)
    wrong = 0
    for case in range(60):
        try:
            compare(case)
        except AssertionError:
            wrong += 1
    assert wrong >= 5
