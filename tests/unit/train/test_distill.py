"""Distillation: every loss brings a draft nearer to its target, whoever writes the texts, and a
run that was killed ends where one that was not does."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import foretoken
from foretoken.errors import InputError
from foretoken.request import Request
from foretoken.sampling.distributions import SamplingParams, probabilities
from foretoken.train.corpus import Example, Examples
from foretoken.train.distill import LOSSES, Distillation, distill, measure_alpha
from foretoken.train.pair import (
    BatchSource,
    Pair,
    TrainingSequence,
    compute_new_token_logits,
    make_pair,
    make_random_draft,
)
from foretoken.train.recipe import TrainingRecipe
from pairs import random, relative
from tiny import llama, t5

V = 64
RECIPE = TrainingRecipe(steps=8, batch=4, learning_rate=5e-3, warmup=1, save_every=4)
LESSON = Distillation(length=6, held_out=4)


class Killed(BaseException):
    pass


def examples(references: bool = True) -> Examples:
    random = torch.Generator().manual_seed(1)
    ids = torch.randint(2, V, (12, 10), generator=random).tolist()
    lessons = [Example(row[:4], row[4:] if references else []) for row in ids]
    return Examples(lessons[:8], lessons[8:], "digest")


def models(make=llama, noise: float = 0.3) -> Pair:
    target = make(V=V)
    return make_pair(target.requires_grad_(False), relative(target, noise).requires_grad_(), None)


def taught(
    of: Pair,
    out: Path,
    lesson: Distillation = LESSON,
    recipe: TrainingRecipe = RECIPE,
    kill_at=None,
):
    alphas: list[float] = []

    def report(step: int, loss: float, found: float | None, best: float) -> None:
        assert (found is None) == bool(step % recipe.save_every)
        if found is not None:
            alphas.append(found)
            assert best >= found
        if step == kill_at:
            raise Killed

    return distill(of, examples(), out, lesson, recipe, report), alphas


@pytest.mark.parametrize(
    "loss",
    [pytest.param(x, marks=() if x == "lk" else pytest.mark.prove) for x in LOSSES],
)
def test_every_loss_raises_alpha(loss, tmp_path):
    lesson = replace(LESSON, loss=loss, on_policy=0.25, target_generated=0.25)
    summary, alphas = taught(models(), tmp_path, lesson, replace(RECIPE, steps=16))
    assert len(alphas) == 5 and alphas[0] == summary["alpha_before"]
    assert summary["alpha"] == max(alphas) > alphas[0] + 0.03
    assert summary["best_step"] == 4 * alphas.index(max(alphas)) and summary["loss"] == loss


@pytest.mark.parametrize("make", [llama, pytest.param(t5, marks=pytest.mark.prove)])
def test_killed_and_resumed_is_uninterrupted(make, tmp_path):
    lesson = replace(LESSON, on_policy=0.5, target_generated=0.25)
    whole, _ = taught(models(make), tmp_path / "whole", lesson)
    for kill_at in (2, 6):  # before the first checkpoint, and between two
        with pytest.raises(Killed):
            taught(models(make), tmp_path / "cut", lesson, kill_at=kill_at)
    rest, alphas = taught(models(make), tmp_path / "cut", lesson)
    assert len(alphas) == 1  # only the second half was done again
    a, b = (load_file(tmp_path / n / "model" / "model.safetensors") for n in ("whole", "cut"))
    assert a.keys() == b.keys() and all(torch.equal(w, b[name]) for name, w in a.items())
    assert {**rest, "seconds": 0} == {**whole, "seconds": 0}


def test_a_draft_that_only_gets_worse_is_not_kept(tmp_path):
    of = models(noise=0.02)
    before = {name: w.clone() for name, w in of.draft.state_dict().items()}
    summary, alphas = taught(of, tmp_path, recipe=replace(RECIPE, learning_rate=1.0))
    assert summary["best_step"] == 0 and summary["alpha"] == alphas[0] > max(alphas[1:])
    assert all(torch.equal(w, before[name]) for name, w in of.draft.state_dict().items())
    assert json.loads((tmp_path / "summary.json").read_text()) == summary


def test_what_is_saved_is_a_draft(tmp_path):
    of = models()
    summary, _ = taught(of, tmp_path)
    spec = foretoken.load(of.target, tmp_path / "model")
    assert spec.generate([5, 6], temperature=1.0, gamma=2, max_new_tokens=8)[0].stats.drafted
    text = TrainingSequence(Request([5, 6], 9, (0, 0)), [7, 8, 9])
    again = replace(of, target_spec=spec)
    assert measure_alpha(again, [text], 1.0) == pytest.approx(
        measure_alpha(of, [text], 1.0), abs=1e-6
    )
    with pytest.raises(InputError, match="began with loss lk, not tv"):
        taught(models(), tmp_path, replace(LESSON, loss="tv"))
    for other in (make_pair(random("Llama", 3).float(), of.draft, None),
                  make_pair(of.target, llama(V=V, seed=9), None)):  # fmt: skip
        with pytest.raises(InputError, match=r"began with (target|draft) \w+, not \w+; give"):
            taught(other, tmp_path)


@pytest.mark.prove
def test_a_fresh_draft_learns_from_nothing(tmp_path):
    target = random("Llama", 0).float()  # its distributions are sharp
    shape = {"num_hidden_layers": 1, "hidden_size": 16, "head_dim": 4}
    draft = make_random_draft(target, shape, seed=0)
    assert draft.config.hidden_size == 16 < target.config.hidden_size
    assert draft.config.vocab_size == V == target.config.vocab_size
    recipe = replace(RECIPE, steps=40, learning_rate=0.03)
    _, alphas = taught(make_pair(target, draft, None), tmp_path, recipe=recipe)
    assert max(alphas) > 1.3 * alphas[0]


def test_a_draft_whose_output_is_padded_less_than_the_target_s(tmp_path):
    target = llama(V=V + 5).requires_grad_(False)
    _, alphas = taught(make_pair(target, llama(V=V, seed=1), None), tmp_path)
    assert max(alphas) > alphas[0]


# who writes


def test_greedy_texts_and_a_loss_at_temperature_one(tmp_path):
    of = models()
    lesson = replace(LESSON, temperature=0.0, on_policy=0.5, target_generated=0.5)
    assert (
        lesson.loss_temperature == 1.0 and replace(lesson, temperature=0.7).loss_temperature == 0.7
    )
    data = examples().train
    for shares, network in (({"on_policy": 1.0}, of.draft), ({"target_generated": 1.0}, of.target)):
        for text in BatchSource(of, 0.0, 6, **shares).make_batch(data, 3, 0, 0):
            assert compute_new_token_logits(network, [text]).argmax(-1).tolist() == text.new_tokens
    summary, alphas = taught(of, tmp_path, lesson)
    assert summary["loss_temperature"] == 1.0 and summary["alpha"] >= alphas[0]


def test_alpha_is_the_overlap_of_the_distributions_along_the_target_s_text():
    of = models()
    texts = BatchSource(of, 0.8, 6).generate_held_out(examples().held_out, 32, 3)
    assert texts == BatchSource(of, 0.8, 6).generate_held_out(examples().held_out, 32, 3)
    with torch.no_grad():
        p, q = (
            probabilities(compute_new_token_logits(m, texts), SamplingParams(0.8))
            for m in (of.target, of.draft)
        )
    expected = float(torch.minimum(p, q).sum(-1).mean())
    assert measure_alpha(of, texts, 0.8) == pytest.approx(expected, abs=1e-5)
    agree = (p.argmax(-1) == q.argmax(-1)).float().mean()
    assert measure_alpha(of, texts, 0.0) == pytest.approx(float(agree))


# what cannot be


@pytest.mark.parametrize(
    "wrong, said",
    [
        ({"loss": "mse"}, "loss is 'mse'; give one of kl, rkl, jsd, tv, nla, lk"),
        ({"temperature": -1.0}, "temperature is -1.0; give 0"),
        ({"temperature": float("nan")}, "temperature is nan"),
        ({"on_policy": 1.5}, "on_policy is 1.5; give a share"),
        ({"on_policy": 0.6, "target_generated": 0.6}, "give shares that add up to 1 or less"),
        ({"length": 0}, "length is 0; give 1 or more"),
        ({"held_out": 0}, "held_out is 0; give 1 or more"),
    ],
)
def test_an_invalid_lesson(wrong, said):
    with pytest.raises(InputError, match=said):
        Distillation(**wrong)


def test_a_text_that_the_draft_cannot_hold_is_said_first(tmp_path):
    target = llama(V=V, context=32).requires_grad_(False)
    of = make_pair(target, llama(V=V, context=9), None)
    with pytest.raises(InputError, match="a sequence has 10 tokens, but the draft's limit is 9"):
        taught(of, tmp_path)
    with pytest.raises(
        InputError, match="prompt 0 has 4 tokens, but the model's context length is 3"
    ):
        taught(make_pair(llama(V=V, context=3), llama(V=V), None), tmp_path)
