"""`foretoken.attach`: a model whose own `generate` is speculative, and back."""

from __future__ import annotations

import copy
from functools import cache
from typing import Any

import pytest
import torch
from transformers import ImageGPTConfig, ImageGPTForCausalImageModeling

import foretoken
from foretoken.errors import ForeignError, InputError, RefusedError
from pairs import DEVICE, PROMPTS, lively, random, relative, target
from refusals import REFUSALS
from tiny import byte_level, llama

PLAIN = {"max_new_tokens": 12, "pad_token_id": 1, "do_sample": False}
IDS = torch.tensor([PROMPTS[1]], device=DEVICE)
SHORT = {"inputs": torch.tensor([PROMPTS[0]], device=DEVICE)}


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


def test_a_copy_does_not_generate_with_the_original(model, caplog):
    foretoken.attach(model, "lookup")
    copied = copy.deepcopy(model)
    expected = model.generate(IDS, num_assistant_tokens=1, **PLAIN).tolist()
    with caplog.at_level("INFO", "foretoken"):
        assert copied.generate(IDS, **PLAIN).tolist() == expected
    assert "a Speculator of another model than this Llama" in told(caplog)[-1]
    spec = foretoken.attach(copied, "lookup")
    assert steps(spec, copied, num_assistant_tokens=1)[1] > 0


def told(caplog: Any) -> list[str]:
    return [r.getMessage() for r in caplog.records if r.name.startswith("foretoken")]


def outcome(model: Any, options: dict[str, Any]) -> Any:
    """What a call comes to: ids and what a streamer heard, or an error's kind and words."""
    torch.manual_seed(0)
    given = {} if {"inputs", "inputs_embeds", "encoder_outputs"} & options.keys() else SHORT
    try:
        found = model.generate(**(given | PLAIN | options))
    except Exception as error:
        return type(error), str(error)
    ids = found if isinstance(found, torch.Tensor) else found.sequences
    extra = [] if isinstance(found, torch.Tensor) else [*found]
    streamer = options.get("streamer")
    return ids.tolist(), extra, streamer and (streamer.puts, streamer.ended)


@cache
def attached(family: str) -> tuple[Any, Any]:
    """A model, and a copy of it that is attached."""
    model: Any = target(family)
    own = copy.deepcopy(model)
    foretoken.attach(own, relative(own), runtime="transformers")
    return model, own


@pytest.mark.daily(
    "num_beams",
    "top_h",
    "forced_decoder_ids",
    "a cache",
    "embeddings",
    "an order",
    "a streamer of two rows",
)
@pytest.mark.parametrize("refusal", REFUSALS.values(), ids=REFUSALS.keys())
@pytest.mark.filterwarnings("ignore")
def test_what_no_speculator_decodes_is_decoded_by_transformers(refusal, caplog):
    model, own = attached(refusal.family)
    expected = outcome(model, refusal.options(model))
    with caplog.at_level("INFO", "foretoken"):
        assert outcome(own, refusal.options(own)) == expected
    (line,) = told(caplog)
    assert line.startswith(f"transformers decodes this call: {refusal.says}"), line


def test_strict_raises_what_it_does_not_decode():
    own = copy.deepcopy(target("Llama"))
    foretoken.attach(own, relative(own), runtime="transformers", strict=True)
    kind, says = outcome(own, REFUSALS["num_beams"].options(own))
    assert kind is ForeignError and says.startswith("num_beams=3 asks for a beam search")
    with pytest.raises(ForeignError, match="^cache_implementation='paged' is not supported"):
        own.generate(IDS, cache_implementation="paged", **PLAIN)


def test_a_generation_config_that_asks_for_beams_before_and_after(model, caplog):
    plain = copy.deepcopy(model)
    model.generation_config.num_beams = plain.generation_config.num_beams = 3
    expected = outcome(plain, {})
    with pytest.raises(RefusedError, match="sets num_beams=3, which is not supported"):
        foretoken.attach(model, "lookup", strict=True)
    with caplog.at_level("INFO", "foretoken"):
        spec = foretoken.attach(model, "lookup")
        assert outcome(model, {}) == expected
        first, second = told(caplog)
        assert first.startswith("the model's generation config sets num_beams=3, which foretoken")
        assert second.startswith("transformers decodes this call: num_beams=3")
        assert steps(spec, model, num_beams=1, num_assistant_tokens=2)[1] > 0
        model.generation_config.num_beams = 1
        assert steps(spec, model, num_assistant_tokens=2)[1] > 0
        model.generation_config.num_beams = 3
        assert outcome(model, {}) == expected


def test_a_config_that_forces_one_of_several_ids_is_left_to_transformers():
    """It makes them equally likely at the last place."""
    model = llama(64, eos_token_id=None)
    model.generation_config.forced_eos_token_id = [9, 5]
    options = {"max_new_tokens": 4, "do_sample": False, "pad_token_id": 1}
    prompt = torch.tensor([[5, 17, 33]])
    plain = model.generate(prompt, **options)
    spec = foretoken.attach(model, "lookup", runtime="transformers")
    assert plain[0, -1] == 5 and model.generate(prompt, **options).equal(plain)
    assert spec.ends.forced_eos is None
    (own,) = spec.generate([prompt[0].tolist()], max_new_tokens=4)
    assert own.tokens[:3] == plain[0, 3:-1].tolist()


def test_what_transformers_refuses_of_a_custom_generate_alone(caplog):
    """It hides the call's tokenizer from one."""
    model: Any = llama(320).double()
    tokenizer = byte_level()
    model.generation_config.eos_token_id = None
    ids = tokenizer("It was the first", return_tensors="pt").input_ids
    free = model.generate(ids, **PLAIN)[0, ids.shape[1] :]
    words = [tokenizer.decode([token]) for token in free]
    model.generation_config.stop_strings = [next(w for w in words[1:] if w.isascii())]
    expected = model.generate(ids, tokenizer=tokenizer, **PLAIN).tolist()
    assert len(expected[0]) < ids.shape[1] + 12
    foretoken.attach(model, "lookup")
    with caplog.at_level("INFO", "foretoken"):
        assert model.generate(ids, tokenizer=tokenizer, **PLAIN).tolist() == expected
    assert "stop strings" in told(caplog)[-1]


@pytest.mark.parametrize(
    "options", [{"num_assistant_tokens": -1}, {"forced_eos_token_id": 64}, {"temperature": -1.0}]
)
def test_a_caller_s_mistakes_stay_errors(model, options):
    foretoken.attach(model, "lookup")
    with pytest.raises(ValueError):
        model.generate(IDS, **(PLAIN | {"do_sample": True} | options))


def test_a_start_without_a_logit_is_left_to_transformers(caplog):
    """ImageGPT's: the last id, which no image holds."""
    caplog.set_level("INFO", "foretoken")
    shape = {"n_embd": 16, "n_layer": 1, "n_head": 1, "n_positions": 32}
    images = lively(ImageGPTForCausalImageModeling, ImageGPTConfig(vocab_size=20, **shape))
    ids, options = torch.tensor([[19]]), {"max_new_tokens": 5, "do_sample": False}
    own = images.generate(ids, **options)
    foretoken.attach(images, "lookup")
    assert torch.equal(images.generate(ids, **options), own)
    assert "row 0 of input_ids holds ids outside 0..18" in told(caplog)[-1]
    with pytest.raises(InputError, match="ids outside 0..18"):
        images.generate(torch.tensor([[20]]), **options)


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


def test_load_s_options_are_checked(model):
    foretoken.attach(model, "lookup")
    with pytest.raises(InputError, match="^dtype is 'float'"):
        foretoken.attach(model, "lookup", dtype="float")
    assert "generate" not in vars(model)
    with pytest.raises(InputError, match="^strict is 'yes'"):
        foretoken.attach(model, "lookup", strict="yes")  # pyright: ignore[reportArgumentType]


def test_what_is_no_model_and_what_is_no_option(model):
    with pytest.raises(InputError, match="^model is 'a folder'"):
        foretoken.attach("a folder")  # pyright: ignore[reportArgumentType]
    with pytest.raises(InputError, match="^gamma is not an option of attach"):
        foretoken.attach(model, "lookup", gamma=3)
    with pytest.raises(InputError, match="^dtyp is not an option of attach"):
        foretoken.attach(model, "lookup", dtyp="float64")
    with pytest.raises(InputError, match="^target is not an option of attach"):
        foretoken.attach(model, "lookup", target="x")
    assert "generate" not in vars(model)
