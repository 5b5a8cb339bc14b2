"""A draft learns its target's own texts; a run that was killed ends where one that was not does."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import GraniteConfig, GraniteForCausalLM, PreTrainedModel
from typer.testing import CliRunner

import foretoken
import tiny
from foretoken import cli
from foretoken.errors import InputError, RefusedError
from foretoken.train.corpus import Example, Examples
from foretoken.train.dspark import DSparkLesson
from foretoken.train.eagle import EagleLesson
from foretoken.train.generated_data import generate_references
from foretoken.train.hidden_state_dataset import HiddenStateDataset
from foretoken.train.recipe import TrainingRecipe
from foretoken.train.student import Lesson, teach
from students import ROOM, V, examples, network

EAGLE = EagleLesson(draft_vocab=40, depths=3)
DSPARK = DSparkLesson(draft_vocab=40, block=3, rank=4, anchors=5)
BOTH = pytest.mark.parametrize("lesson", [EAGLE, DSPARK], ids=["eagle", "dspark"])
RECIPE = TrainingRecipe(steps=6, batch=4, learning_rate=3e-3, warmup=2, save_every=2)


class BrokenOff(BaseException):
    pass


def train(
    out: Path, target: PreTrainedModel, lesson: Lesson = EAGLE, *, kill_at: int | None = None
) -> dict[str, Any]:
    texts = examples(target, out.with_name(f"{out.name}.texts"))

    def report(step: int, loss: float, alpha: list[float] | None) -> None:
        assert loss > 0 and (alpha is None) == bool(step % 2)
        if step == kill_at:
            raise BrokenOff

    seen: list[int] = []
    options: dict[str, Any] = {"max_bytes": ROOM, "report_states": seen.append}
    summary = teach(target, texts, out, lesson, RECIPE, report, **options)
    assert seen[-1] == 24
    return summary


@BOTH
def test_a_run_that_was_killed_ends_as_an_unbroken_one(tmp_path: Path, lesson: Lesson) -> None:
    target = network()
    whole = train(tmp_path / "whole", target, lesson)
    for kill_at in (1, 5):  # before the first checkpoint, and between two
        with pytest.raises(BrokenOff):
            train(tmp_path / "killed", target, lesson, kill_at=kill_at)
        assert not (tmp_path / "killed").exists()
    rest = train(tmp_path / "killed", target, lesson)
    files = [load_file(tmp_path / name / "model.safetensors") for name in ("whole", "killed")]
    assert files[0].keys() == files[1].keys()
    assert all(torch.equal(files[0][name], files[1][name]) for name in files[0])
    assert {**rest, "seconds": 0} == {**whole, "seconds": 0}
    check_format(tmp_path, target, "eagle3" if lesson is EAGLE else "dspark", files[0])
    with pytest.raises(InputError, match="holds states of another target, of other data"):
        train(tmp_path / "whole", network(seed=1), lesson)
    with pytest.raises(InputError, match="outputs of other prompts"):
        examples(target, tmp_path / "whole.texts", 20)


def check_format(folder: Path, target: PreTrainedModel, kind: str, tensors: Any) -> None:
    """Check that a draft is in the format of speculators, and drafts."""
    target.save_pretrained(folder / "target")
    config = json.loads((folder / "whole/config.json").read_text())
    assert config["speculators_model_type"] == kind and config["draft_vocab_size"] == 40
    verifier = config["speculators_config"]["verifier"]
    assert verifier["architectures"] == ["LlamaForCausalLM"]
    ids = torch.arange(40) + tensors["d2t"]
    assert tensors["t2d"].nonzero().flatten().tolist() == ids.tolist()
    spec = foretoken.load(folder / "target", folder / "whole", runtime="transformers")
    (text,) = spec.generate([[5, 9]], max_new_tokens=12, gamma=3)
    (plain,) = spec.generate([[5, 9]], max_new_tokens=12, gamma=0)
    assert text.tokens == plain.tokens and text.stats.drafted


def test_states_have_the_room_that_was_given(tmp_path: Path) -> None:
    target = network()
    texts = examples(target, tmp_path / "texts")
    whole = HiddenStateDataset(tmp_path / "whole", target, (2, 3, 3), ROOM)
    learnt, held_out = whole.compute_missing(texts, lambda n: None)
    size = sum(file.stat().st_size for file in (tmp_path / "whole").glob("*.safetensors"))
    half = HiddenStateDataset(tmp_path / "half", target, (2, 3, 3), size // 2)
    some, exam = half.compute_missing(texts, lambda n: None)
    files = [*(tmp_path / "half").glob("*.safetensors")]
    assert sum(file.stat().st_size for file in files) <= size // 2 + 400 * len(files)
    assert len(some) < len(learnt) and len(exam) < len(held_out) and some and exam
    with pytest.raises(InputError, match="more room for states"):
        HiddenStateDataset(tmp_path / "none", target, (2, 3, 3), 10).compute_missing(
            texts, lambda n: None
        )


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
    for name in ("layers", "block", "rank", "anchors"):
        with pytest.raises(InputError, match=f"{name} is 0; give 1 or more"):
            DSparkLesson(**{name: 0})
    spec = foretoken.load(tiny.t5(V), "none", runtime="transformers")
    with pytest.raises(RefusedError, match="cannot generate training text"):
        asked = Examples([Example([1], [])], [Example([1], [])], "")
        options = {"length": 4, "temperatures": (1.0,), "seed": 0, "report": lambda n: None}
        generate_references(spec, asked, tmp_path, **options)


@pytest.mark.parametrize("kind, size", [("eagle", "depths"), ("dspark", "block")])
def test_the_command_writes_texts_and_trains(tmp_path: Path, kind: str, size: str) -> None:
    target = tiny.llama(320, num_hidden_layers=6)
    target.save_pretrained(tmp_path / "target")
    tiny.byte_level().save_pretrained(tmp_path / "target")
    lines = [json.dumps({"source": word}) for word in tiny.TEXT.split() * 2]
    (tmp_path / "prompts.jsonl").write_text("\n".join(lines[:32]))
    options = {"steps": 2, "batch": 4, "save-every": 1, "length": 8, "draft-vocab": 50}
    options |= {"target": tmp_path / "target", "data": tmp_path / "prompts.jsonl", size: 2}
    options |= {"out": tmp_path / "draft", "runtime": "transformers", "temperatures": "0,1"}
    asked = [str(part) for name, value in options.items() for part in (f"--{name}", value)]
    asked.append("--bfloat16")
    made = CliRunner().invoke(cli.app, ["train", kind, *asked])
    assert made.exit_code == 0, made.output
    assert "alpha by depth" in made.stdout and f"--draft {tmp_path / 'draft'}" in made.stdout
    for more, said in (
        (("--states", "0"), "states is 0"),
        (("--states", "inf"), "states is inf"),
        ((f"--{size}", "0"), f"{size} is 0"),
        (
            ("--out", str(tmp_path / "target")),
            "is not empty, but has no run to resume; give another --out",
        ),
        (("--out", str(tmp_path / "prompts.jsonl")), "is a file; give a folder as --out"),
        (("--length", "7"), "holds outputs with length 8, not 7; give length 8, or another --out"),
    ):
        wrong = CliRunner().invoke(cli.app, ["train", kind, *asked, *more])
        assert isinstance(wrong.exception, InputError) and said in str(wrong.exception)


def test_texts_are_shorter_than_the_depths(tmp_path: Path) -> None:
    target = network()
    texts = Examples([Example([5], [6]), Example([7, 8], [9, 1])], [Example([2], [3, 4])], "few")
    options: dict[str, Any] = {"max_bytes": ROOM, "report_states": lambda n: None}
    lesson = EagleLesson(draft_vocab=8, depths=6)
    summary = teach(target, texts, tmp_path / "draft", lesson, RECIPE, lambda *_: None, **options)
    assert len(summary["alpha"]) == 6


def test_a_target_that_scales_its_logits_is_refused(tmp_path: Path) -> None:
    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_attention_heads": 2}
    sizes |= {"num_key_value_heads": 2, "num_hidden_layers": 4}
    config = GraniteConfig(vocab_size=V, **sizes, logits_scaling=8.0, attn_implementation="sdpa")
    texts = HiddenStateDataset(tmp_path, GraniteForCausalLM(config).eval(), (2, 2, 2), ROOM)
    some = Examples([Example([5, 6], [7, 8])], [Example([9], [10])], "texts")
    biased = network()
    biased.lm_head.bias = torch.nn.Parameter(torch.randn(V))
    with pytest.raises(RefusedError, match="by a cap, a scale or a bias"):
        HiddenStateDataset(tmp_path / "biased", biased, (2, 2, 2), ROOM).compute_missing(
            some, lambda n: None
        )
    with pytest.raises(RefusedError, match="GraniteForCausalLM changes the products of its"):
        texts.compute_missing(some, lambda n: None)
