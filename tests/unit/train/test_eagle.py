"""An EAGLE-3 draft learns its target's own texts; what it is taught at each depth is what it says
there in use; a run that was killed ends where one that was not does."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import PreTrainedModel
from typer.testing import CliRunner

import foretoken
import tiny
from foretoken import cli
from foretoken.errors import InputError, RefusedError
from foretoken.models.shown import FINAL
from foretoken.models.stock.pairs import StockPairs
from foretoken.train.corpus import Example, Examples
from foretoken.train.eagle import EagleLesson, Student, frequent, fresh, train_eagle
from foretoken.train.kept_states import KeptTexts
from foretoken.train.loop import TrainingRecipe
from foretoken.train.own_texts import own_texts

V, DEPTHS = 64, 3
LESSON = EagleLesson(draft_vocab=40, depths=DEPTHS)
RECIPE = TrainingRecipe(steps=6, batch=4, learning_rate=3e-3, warmup=2, save_every=2)
ROOM = 10**8


class BrokenOff(BaseException):
    pass


def network(seed: int = 0) -> PreTrainedModel:
    return tiny.llama(V, num_hidden_layers=6, seed=seed).requires_grad_(False)


def examples(target: PreTrainedModel, folder: Path, count: int = 24) -> Examples:
    """The target's own texts of up to 20 tokens."""
    prompts = [Example([1 + i % 60, 1 + 7 * i % 60], []) for i in range(count)]
    asked = Examples(prompts[4:], prompts[:4], "prompts")
    spec = foretoken.load(target, "none")
    options: dict[str, Any] = {"length": 20, "temperatures": (1.0, 0.0), "seed": 0}
    return own_texts(spec, asked, folder, **options, report=lambda n: None)


def train(out: Path, target: PreTrainedModel, *, kill_at: int | None = None) -> dict[str, Any]:
    texts = examples(target, out.with_name(f"{out.name}.texts"))

    def report(step: int, loss: float, alpha: list[float] | None) -> None:
        assert loss > 0 and (alpha is None) == bool(step % 2)
        if step == kill_at:
            raise BrokenOff

    seen: list[int] = []
    options: dict[str, Any] = {"most": ROOM, "computed": seen.append}
    summary = train_eagle(target, texts, out, LESSON, RECIPE, report, **options)
    assert seen[-1] == 24
    return summary


def test_a_run_that_was_killed_ends_as_an_unbroken_one(tmp_path: Path) -> None:
    target = network()
    whole = train(tmp_path / "whole", target)
    for kill_at in (1, 5):  # before the first checkpoint, and between two
        with pytest.raises(BrokenOff):
            train(tmp_path / "killed", target, kill_at=kill_at)
        assert not (tmp_path / "killed").exists()
    rest = train(tmp_path / "killed", target)
    files = [load_file(tmp_path / name / "model.safetensors") for name in ("whole", "killed")]
    assert files[0].keys() == files[1].keys()
    assert all(torch.equal(files[0][name], files[1][name]) for name in files[0])
    assert {**rest, "seconds": 0} == {**whole, "seconds": 0}


def test_states_of_another_target_are_refused(tmp_path: Path) -> None:
    train(tmp_path / "draft", network())
    with pytest.raises(InputError, match="holds states of another target or of other texts"):
        train(tmp_path / "draft", network(seed=1))


def test_the_file_is_a_draft_in_the_format_of_speculators(tmp_path: Path) -> None:
    target = network()
    train(tmp_path / "draft", target)
    target.save_pretrained(tmp_path / "target")
    config = json.loads((tmp_path / "draft/config.json").read_text())
    assert config["speculators_model_type"] == "eagle3" and config["draft_vocab_size"] == 40
    verifier = config["speculators_config"]["verifier"]
    assert verifier["architectures"] == ["LlamaForCausalLM"]
    tensors = load_file(tmp_path / "draft/model.safetensors")
    ids = torch.arange(40) + tensors["d2t"]
    assert tensors["t2d"].nonzero().flatten().tolist() == ids.tolist()
    spec = foretoken.load(tmp_path / "target", tmp_path / "draft", runtime="transformers")
    (text,) = spec.generate([[5, 9]], max_new_tokens=12, gamma=3)
    (plain,) = spec.generate([[5, 9]], max_new_tokens=12, gamma=0)
    assert text.tokens == plain.tokens and text.stats.drafted


@torch.no_grad()
def test_every_depth_is_taught_what_the_draft_says_there(tmp_path: Path) -> None:
    """Along a text, each place: the draft in use reads true pairs up to there, then tokens of the
    text with states of its own."""
    target = network()
    texts = KeptTexts(tmp_path / "states", target, (2, 3, 3), ROOM)
    learnt, held_out = texts.make(examples(target, tmp_path / "texts"), lambda n: None)
    ids = frequent(learnt, 40)
    student = Student(fresh(target, len(ids), LESSON, 0), ids, target)
    some = [texts.read(n) for n in sorted(learnt)[:3]]
    taught = [student.compared(*x) for x in student.depths(some, DEPTHS)]
    model, said = StockPairs(student.network), [[] for _ in range(DEPTHS)]
    for text in some:
        tokens, states = text.ids.tolist(), model.joined(text.taps.float())
        for i in range(len(tokens) - 1):
            model.permute([])
            model.start([[]])
            read = student.embedding(text.ids[1 : i + 2])
            model.give(torch.cat([read, states[: i + 1]], -1), [i + 1])
            logits = model.score([tokens[1 : i + 2]], [1])
            for k in range(DEPTHS):
                if i + k + 1 >= len(tokens):
                    break
                if k:
                    read = student.embedding(text.ids[i + k + 1 : i + k + 2])
                    model.give(torch.cat([read, model.hidden[0]], -1), [1])
                    logits = model.score([[tokens[i + k + 1]]], [1])
                if i + k + 2 >= text.prompt:
                    said[k].append(logits[0, 0].log_softmax(-1))
    for k in range(DEPTHS):
        torch.testing.assert_close(taught[k][1], torch.stack(said[k]), atol=1e-4, rtol=0)
    whole = [target(text.ids[None]).logits[0].log_softmax(-1)[:, ids] for text in some]
    due = [x[max(1, t.prompt - 1) :] for x, t in zip(whole, some, strict=True)]
    torch.testing.assert_close(taught[0][0], torch.cat(due), atol=0.1, rtol=0)  # kept in bfloat16
    assert FINAL not in texts.taps


def test_states_have_the_room_that_was_given(tmp_path: Path) -> None:
    target = network()
    texts = examples(target, tmp_path / "texts")
    whole = KeptTexts(tmp_path / "whole", target, (2, 3, 3), ROOM)
    learnt, held_out = whole.make(texts, lambda n: None)
    size = sum(file.stat().st_size for file in (tmp_path / "whole").glob("*.safetensors"))
    half = KeptTexts(tmp_path / "half", target, (2, 3, 3), size // 2)
    some, exam = half.make(texts, lambda n: None)
    files = [*(tmp_path / "half").glob("*.safetensors")]
    assert sum(file.stat().st_size for file in files) <= size // 2 + 400 * len(files)
    assert len(some) < len(learnt) and len(exam) < len(held_out) and some and exam
    with pytest.raises(InputError, match="more room for states"):
        KeptTexts(tmp_path / "none", target, (2, 3, 3), 10).make(texts, lambda n: None)


def test_texts_behind_other_prompts_are_refused(tmp_path: Path) -> None:
    target = network()
    first = examples(target, tmp_path / "texts")
    again = examples(target, tmp_path / "texts")
    assert [list(x.reference) for x in first.train] == [list(x.reference) for x in again.train]
    with pytest.raises(InputError, match="texts behind other prompts"):
        examples(target, tmp_path / "texts", 20)


def test_options_that_are_invalid(tmp_path: Path) -> None:
    for options, said in (
        ({"draft_vocab": 0}, "draft_vocab is 0"),
        ({"depths": 0}, "depths is 0"),
        ({"decay": 1.5}, "decay is 1.5"),
        ({"loss": "best"}, "loss is 'best'"),
        ({"intermediate": 0}, "intermediate is 0"),
    ):
        with pytest.raises(InputError, match=said):
            EagleLesson(**options)
    spec = foretoken.load(tiny.t5(V), "none", runtime="transformers")
    with pytest.raises(RefusedError, match="no text of its own"):
        asked = Examples([Example([1], [])], [Example([1], [])], "")
        options = {"length": 4, "temperatures": (1.0,), "seed": 0, "report": lambda n: None}
        own_texts(spec, asked, tmp_path, **options)


def test_the_command_writes_texts_and_trains(tmp_path: Path) -> None:
    target = tiny.llama(320, num_hidden_layers=6)
    target.save_pretrained(tmp_path / "target")
    tiny.byte_level().save_pretrained(tmp_path / "target")
    lines = [json.dumps({"source": word}) for word in tiny.TEXT.split() * 2]
    (tmp_path / "prompts.jsonl").write_text("\n".join(lines[:32]))
    options = {"steps": 2, "batch": 4, "save-every": 1, "length": 8, "draft-vocab": 50}
    options |= {"target": tmp_path / "target", "data": tmp_path / "prompts.jsonl", "depths": 2}
    options |= {"out": tmp_path / "draft", "runtime": "transformers", "temperatures": "0,1"}
    asked = [str(part) for name, value in options.items() for part in (f"--{name}", value)]
    made = CliRunner().invoke(cli.app, ["train", "eagle", *asked])
    assert made.exit_code == 0, made.output
    assert "alpha by depth" in made.stdout and f"--draft {tmp_path / 'draft'}" in made.stdout
    wrong = CliRunner().invoke(cli.app, ["train", "eagle", *asked, "--states", "0"])
    assert isinstance(wrong.exception, InputError) and "states is 0" in str(wrong.exception)
