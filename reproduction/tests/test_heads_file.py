"""The file that heads are kept in, and for which target they are."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from transformers import OpenAIGPTConfig, OpenAIGPTLMHeadModel

import tiny
from foretoken import load
from foretoken.errors import InputError, RefusedError
from foretoken.speculator import Speculator
from reproduction.blockwise import Heads
from reproduction.heads import HeadsDrafter

HEADS = "reproduction.heads:"


@pytest.fixture
def file(tmp_path: Path) -> Path:
    Heads.fresh(tiny.llama(), 2).save(str(tmp_path / "heads.safetensors"))  # a Path will do too
    return tmp_path / "heads.safetensors"


def refused(kind: type[Exception], said: str, *given) -> None:
    with pytest.raises(kind, match=said) as error:
        load(*given)
    assert "\n" not in str(error.value)


def test_untrained_heads_repeat_the_target(file):
    heads = Heads.load(file)
    hidden = torch.randn(5, 32)
    states = heads(hidden, torch.randn(5, 32), 0, 2)
    assert heads.count == 2 and torch.equal(states, hidden[:, None].expand(5, 2, 32))
    assert [path.name for path in file.parent.iterdir()] == [file.name]


def test_they_are_attached_by_path(file):
    spec = load(tiny.llama(), f"{HEADS}{file}")
    assert isinstance(spec.drafter, HeadsDrafter) and spec.draft_name == f"{HEADS}{file}"
    (completion,) = spec.generate([5, 6], max_new_tokens=8, gamma=4)
    assert (
        completion.stats.draft_calls == len(completion.steps) - 2
    )  # none in the first, no room in the last
    assert max(step.drafted for step in completion.steps) == 2
    assert [step.drafted for step in completion.steps][0] == 0
    spec.generate([5, 6], max_new_tokens=8)  # costs are measured, gamma is chosen


def test_another_target_is_refused(file):
    refused(RefusedError, "heads of another target", tiny.llama(seed=1), f"{HEADS}{file}")
    wide = tiny.llama(hidden_size=64)
    refused(RefusedError, "for states of 32 and embeddings of 32", wide, f"{HEADS}{file}")
    tuned = tiny.llama()
    with torch.no_grad():
        tuned.model.layers[1].mlp.down_proj.weight *= 1.02
    refused(RefusedError, "heads of another target", tuned, f"{HEADS}{file}")


@pytest.mark.native
def test_a_folder_on_the_native_decoder(file, tmp_path):
    """torch's weights are gone there: the output layer is read again."""
    folder = tiny.folder(tmp_path / "target", tiny.llama())
    spec = load(folder, f"{HEADS}{file}")
    assert spec.target.runtime == "native"
    plain = load(folder, "none").generate([5, 6], max_new_tokens=12)
    assert spec.generate([5, 6], max_new_tokens=12, gamma=2)[0].tokens == plain[0].tokens


def test_what_is_no_such_file(file, tmp_path):
    target = tiny.llama()
    refused(InputError, "there is no file", target, f"{HEADS}nowhere")
    refused(InputError, "^no file is given", target, HEADS)
    (tmp_path / "broken").write_bytes(b"no safetensors")
    refused(InputError, "cannot be read", target, f"{HEADS}{tmp_path / 'broken'}")
    save_file({"x": torch.zeros(1)}, tmp_path / "other")
    refused(InputError, "no heads of version 1", target, f"{HEADS}{tmp_path / 'other'}")
    tensors = {"inner": torch.zeros(2, 32, 64), "outer": torch.zeros(2, 32, 32)}
    tensors |= {"sketch": torch.zeros(3)}
    for text in ("[]", "[1]", "3", "null", '"version"', "{}"):
        save_file(tensors, tmp_path / "other", {"foretoken.heads": text})
        refused(InputError, "no heads of version 1", target, f"{HEADS}{tmp_path / 'other'}")
    for text in ("{", "[" * 100_000):
        save_file(tensors, tmp_path / "other", {"foretoken.heads": text})
        refused(InputError, "cannot be read", target, f"{HEADS}{tmp_path / 'other'}")
    header = {"foretoken.heads": json.dumps({"version": 1})}
    for kind in (torch.int32, torch.bool, torch.float8_e4m3fn):
        for name, value in tensors.items():
            save_file(tensors | {name: value.to(kind)}, tmp_path / "wrong", header)
            refused(InputError, "holds broken heads", target, f"{HEADS}{tmp_path / 'wrong'}")
    half = tensors | {"sketch": torch.zeros(3, dtype=torch.float16)}
    save_file(half, tmp_path / "wrong", header)
    refused(InputError, "holds broken heads", target, f"{HEADS}{tmp_path / 'wrong'}")
    for outer in (torch.zeros(2, 32, 31), torch.full((2, 32, 32), torch.nan)):
        tensors = {"inner": torch.zeros(2, 32, 64), "outer": outer, "sketch": torch.zeros(3)}
        save_file(tensors, tmp_path / "wrong", header)
        refused(InputError, "holds broken heads", target, f"{HEADS}{tmp_path / 'wrong'}")


def test_a_target_that_exposes_no_hidden_states_is_refused(tmp_path):
    shape = {"n_embd": 32, "n_layer": 1, "n_head": 2, "vocab_size": 64}
    model = OpenAIGPTLMHeadModel(OpenAIGPTConfig(**shape)).eval()
    Heads.fresh(model, 2).save(tmp_path / "heads")
    with pytest.raises(RefusedError, match="exposes no hidden states, which heads read"):
        load(model, f"{HEADS}{tmp_path / 'heads'}", runtime="transformers")


def test_heads_that_were_loaded_for_another_target(file):
    first = load(tiny.llama(), f"{HEADS}{file}")
    for target in tiny.llama(), tiny.llama(seed=1):
        with pytest.raises(InputError, match="^HeadsDrafter .*another target.*load it with"):
            load(target, first.drafter)
    again = Speculator(first.target, first.drafter)
    assert again.generate([5, 6], max_new_tokens=8, gamma=2)[0].stats.drafted
