"""The loop that every training shares: its rate, its checkpoint, and what a full disk does."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from foretoken.errors import InputError
from foretoken.train.loop import (
    TrainingLoop,
    compute_learning_rate,
    make_optimizers,
    make_run_folder,
)
from foretoken.train.recipe import TrainingRecipe
from tiny import llama, t5

RECIPE = TrainingRecipe(steps=6, batch=1, learning_rate=1e-3, warmup=1, save_every=2)


def loop(folder: Path, V: int = 32, **settings) -> TrainingLoop:
    model = llama(V=V, hidden_size=16, num_hidden_layers=1)
    return TrainingLoop(folder, model, RECIPE, settings)


def advanced(run: TrainingLoop, to: int) -> TrainingLoop:
    """Learns to continue any token with the step's number."""
    while run.step < to:
        run.advance(
            lambda step: -run.model(torch.tensor([[3]])).logits.log_softmax(-1)[..., step].sum()
        )
        if run.is_due:
            run.save(loss=float(run.step))
    return run


def same(a: TrainingLoop, b: TrainingLoop) -> bool:
    others = b.model.state_dict()
    return all(torch.equal(w, others[name]) for name, w in a.model.state_dict().items())


def test_a_full_disk_leaves_the_last_checkpoint_whole(tmp_path, full_disk):
    advanced(loop(tmp_path, V=4096), 2)  # so large that it fills up amid a tensor
    before = (tmp_path / "checkpoint.pt").read_bytes()
    said = "checkpoint.pt cannot be written: .*too large; free space"
    with full_disk(len(before) // 2), pytest.raises(OSError, match=said):
        advanced(loop(tmp_path, V=4096), 4)
    assert (tmp_path / "checkpoint.pt").read_bytes() == before
    assert {path.name for path in tmp_path.iterdir()} == {"checkpoint.pt", "log.csv"}
    assert advanced(loop(tmp_path, V=4096), 6).step == 6


def test_a_checkpoint_of_other_settings_or_another_model_is_refused(tmp_path):
    loop(tmp_path, loss="lk").save()
    with pytest.raises(InputError, match="began with loss lk, not tv"):
        loop(tmp_path, loss="tv")
    with pytest.raises(InputError, match="is not a checkpoint of this model"):
        loop(tmp_path, V=33, loss="lk")
    (tmp_path / "checkpoint.pt").write_bytes(b"broken")
    with pytest.raises(InputError, match="is not a checkpoint of this model"):
        loop(tmp_path, loss="lk")


def test_a_checkpoint_that_does_not_say_its_precision_is_of_float32(tmp_path):
    run = loop(tmp_path)
    del run.settings["bfloat16"]
    run.save()
    loop(tmp_path)
    with pytest.raises(InputError, match="began with bfloat16 False, not True"):
        TrainingLoop(tmp_path, run.model, replace(RECIPE, bfloat16=True))


def test_another_recipe_is_refused_and_more_steps_are_not(tmp_path):
    model = advanced(loop(tmp_path), 4).model
    for name in ("batch", "learning_rate", "warmup", "seed"):
        with pytest.raises(InputError, match=f"began with {name} .*, not 9"):
            TrainingLoop(tmp_path, model, replace(RECIPE, **{name: 9}))
    with pytest.raises(InputError, match="has 4 steps, so steps 3 .*"):
        TrainingLoop(tmp_path, model, replace(RECIPE, steps=3))
    assert TrainingLoop(tmp_path, model, replace(RECIPE, steps=9)).step == 4


def test_a_run_that_diverges_stops_with_its_last_checkpoint(tmp_path):
    run = advanced(loop(tmp_path), 2)
    before = (tmp_path / "checkpoint.pt").read_bytes()
    weight = run.model.get_input_embeddings().weight
    said = "diverged at step 2: (loss|slope) is nan; give a learning_rate below 0.001 and"
    for loss in (weight.sum() * torch.nan, (weight.sum() * 0).sqrt() * 0):  # 0 has the slope nan
        with pytest.raises(InputError, match=said):
            run.advance(lambda step, loss=loss: loss)
    with pytest.raises(InputError, match="diverged at step 2: held_out is nan"):
        run.save(loss=1.0, held_out=float("nan"))
    assert (tmp_path / "checkpoint.pt").read_bytes() == before and same(run, loop(tmp_path))


def test_a_file_is_no_folder_of_a_run(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(InputError, match="file is a file"):
        make_run_folder(tmp_path / "file")
    assert make_run_folder(tmp_path / "a" / "b").is_dir()


@pytest.mark.parametrize("model", [llama(), llama(tie_word_embeddings=False), t5()])
def test_embeddings_and_head_are_not_for_muon(model):
    muon, adam = (o.param_groups[0]["params"] for o in make_optimizers(model, 1e-3))
    assert all(p.ndim == 2 for p in muon)
    ids = {id(p) for p in muon} | {id(p) for p in adam}
    assert ids == {id(p) for p in model.parameters()} and len(ids) == len(muon) + len(adam)
    outer = (model.get_input_embeddings().weight, model.get_output_embeddings().weight)
    assert not {id(p) for p in outer} & {id(p) for p in muon}


@pytest.mark.parametrize(
    "wrong",
    [
        {"steps": 0},
        {"batch": -1},
        {"learning_rate": 0.0},
        {"learning_rate": float("inf")},
        {"warmup": -1},
        {"patience": -1},
        {"seed": -1},
        {"save_every": 0},
    ],
)
def test_a_recipe_that_cannot_be_followed(wrong):
    ((name, value),) = wrong.items()
    with pytest.raises(InputError, match=f"{name} is {value}; give"):
        replace(RECIPE, **wrong)


def test_the_rate_rises_stays_and_falls():
    recipe = TrainingRecipe(steps=100, warmup=10, decay=0.25, learning_rate=1.0)
    rates = [compute_learning_rate(step, recipe) for step in range(100)]
    assert rates[0] == 0.1 and rates[9] == rates[75] == 1.0
    assert rates[:10] == sorted(rates[:10]) and rates[75:] == sorted(rates[75:], reverse=True)
    assert 0 < rates[-1] < 0.05


def test_the_best_weights_are_kept_and_a_run_that_gets_no_better_stalls(tmp_path):
    run = loop(tmp_path)
    run.recipe = replace(RECIPE, patience=2, save_every=1)
    assert not run.is_stalled and not run.best
    scores = iter([1.0, 3.0, 2.0, 3.0])
    for loss in run.run_steps(lambda step: run.model(torch.tensor([[3]])).logits.square().sum()):
        run.record_score(next(scores))
        run.save(loss=loss)
        if run.step == 2:
            best = {name: w.clone() for name, w in run.model.state_dict().items()}
    assert run.step == 4 and run.best["step"] == 2 and run.best["score"] == 3
    again = TrainingLoop(tmp_path, run.model, replace(RECIPE, patience=2, save_every=1))
    assert again.is_stalled and not list(again.run_steps(lambda step: torch.zeros(1)))
    assert all(torch.equal(w, best[name]) for name, w in again.best["weights"].items())
