"""`foretoken.attach`: a model whose own `generate` is speculative, and back."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

import foretoken
from foretoken.errors import InputError, RefusedError
from pairs import PROMPTS, random, relative
from tiny import byte_level, llama

PLAIN = {"max_new_tokens": 12, "pad_token_id": 1, "do_sample": False}
IDS = torch.tensor([PROMPTS[1]])


@pytest.fixture
def model() -> Any:
    return random("Llama", 0)


def steps(spec: foretoken.Speculator, model: Any, **options: Any) -> tuple[list[int], int]:
    """The ids that `generate` gives, and how often the Speculator's target has run for them."""
    calls: list[int] = []
    score = spec.target.score
    spec.target.score = lambda *args: calls.append(1) or score(*args)
    try:
        return model.generate(IDS, **PLAIN, **options)[0].tolist(), len(calls)
    finally:
        del spec.target.score


def test_generate_is_speculative_until_detached(model):
    expected = model.generate(IDS, **PLAIN)[0].tolist()
    spec = foretoken.attach(model, relative(model), runtime="transformers")
    assert isinstance(spec, foretoken.Speculator)
    completion, calls = steps(spec, model, num_assistant_tokens=3)
    assert completion == expected and 0 < calls < 12
    foretoken.detach(model)
    assert "generate" not in vars(model) and model.generate.__func__ is type(model).generate
    assert steps(spec, model) == (expected, 0)
    foretoken.detach(model)  # nothing is left to take back


def test_attaching_again_replaces_the_draft(model):
    first = foretoken.attach(model, relative(model))
    second = foretoken.attach(model, "lookup")
    expected = model.generate(IDS, prompt_lookup_num_tokens=2, **PLAIN)[0].tolist()
    assert steps(first, model, prompt_lookup_num_tokens=2) == (expected, 0)
    assert steps(second, model, prompt_lookup_num_tokens=2)[1] > 0
    foretoken.detach(model)
    assert "generate" not in vars(model)


def test_a_call_s_own_custom_generate_goes_first(model):
    foretoken.attach(model, "lookup")
    assert model.generate(IDS, custom_generate=lambda *_, **__: "own", **PLAIN) == "own"


def test_somebody_else_s_generate_is_called_and_comes_back(model):
    calls: list[int] = []
    plain = model.generate
    theirs = vars(model)["generate"] = lambda *a, **k: calls.append(1) or plain(*a, **k)
    spec = foretoken.attach(model, "lookup")
    assert steps(spec, model, num_assistant_tokens=1)[1] > 0 and calls == [1]
    foretoken.detach(model)
    assert model.generate is theirs


def test_a_copy_does_not_generate_with_the_original(model):
    foretoken.attach(model, "lookup")
    copied = copy.deepcopy(model)
    with pytest.raises(InputError, match="Speculator of another model than this Llama"):
        copied.generate(IDS, **PLAIN)
    spec = foretoken.attach(copied, "lookup")
    assert steps(spec, copied, num_assistant_tokens=1)[1] > 0


def test_beams_are_refused_and_load_s_options_are_checked(model):
    foretoken.attach(model, "lookup")
    with pytest.raises(RefusedError, match="^num_beams=2 asks for a beam search"):
        model.generate(IDS, num_beams=2, **PLAIN)
    with pytest.raises(InputError, match="^dtype is 'float'"):
        foretoken.attach(model, "lookup", dtype="float")
    assert "generate" not in vars(model)


def test_what_is_no_model_and_what_is_no_option(model):
    with pytest.raises(InputError, match="^model is 'a folder'; give a model of transformers"):
        foretoken.attach("a folder")  # pyright: ignore[reportArgumentType]
    with pytest.raises(InputError, match="^gamma is no option of attach; give it to model.gen"):
        foretoken.attach(model, "lookup", gamma=3)
    with pytest.raises(InputError, match="^dtyp is no option of attach; did you mean dtype?"):
        foretoken.attach(model, "lookup", dtyp="float64")
    with pytest.raises(InputError, match="^target is no option of attach"):
        foretoken.attach(model, "lookup", target="x")
    assert "generate" not in vars(model)


def test_the_call_s_tokenizer_finds_stop_strings():
    model: Any = llama(320).double()
    model.generation_config.eos_token_id = None
    tokenizer = byte_level()
    ids = tokenizer("It was the first", return_tensors="pt").input_ids
    free = model.generate(ids, **PLAIN)[0, ids.shape[1] :]
    options = {"stop_strings": tokenizer.decode(free[5:7]), "tokenizer": tokenizer} | PLAIN
    expected = model.generate(ids, **options).tolist()
    spec = foretoken.attach(model, "lookup")
    assert spec.tokenizer is None
    assert model.generate(ids, num_assistant_tokens=2, **options).tolist() == expected
