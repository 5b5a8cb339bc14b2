"""Models in memory inside what torch.compile, data parallelism, adapters and pipelines make."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from transformers import TextGenerationPipeline

import foretoken
from foretoken.errors import InputError
from foretoken.loading.sources import unwrap_model
from loads import refused
from tiny import byte_level, llama

# torch's own, when torch.compile is first imported
pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit.script_method:DeprecationWarning")
IDS, PLAIN = [5, 6, 7, 5, 6], {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 1}


class Lora(nn.Module):
    """As PEFT's models: the network's weights are not all there is."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.base_model = model

    def merge_and_unload(self) -> nn.Module:
        return self.base_model


def twice(model: Any) -> Any:
    return torch.compile(nn.DataParallel(model))


WRAPPERS: list[Callable[[Any], Any]] = [torch.compile, nn.DataParallel, twice]


@pytest.mark.daily("twice")
@pytest.mark.parametrize("wrap", WRAPPERS)
def test_target_and_draft_are_the_models_inside(wrap: Callable[[Any], Any]) -> None:
    target, draft = llama(64), llama(64, seed=1)
    spec = foretoken.load(wrap(target), wrap(draft))
    assert spec.target_name == spec.draft_name == "LlamaForCausalLM"
    assert spec.target.model is target and spec.drafter.model.model is draft
    tokens = spec.generate([IDS], max_new_tokens=8, gamma=2, ignore_eos=True)[0].tokens
    plain = foretoken.load(target, "none").generate([IDS], max_new_tokens=8, ignore_eos=True)[0]
    assert tokens == plain.tokens


def test_a_compiled_model_s_own_generate_is_speculative_until_detached() -> None:
    model = llama(64)
    compiled: Any = torch.compile(model)
    expected = model.generate(torch.tensor([IDS]), **PLAIN).tolist()
    spec = foretoken.load(compiled, "lookup")
    assert (
        compiled.generate(torch.tensor([IDS]), custom_generate=spec, **PLAIN).tolist() == expected
    )
    spec = foretoken.attach(compiled, llama(64, seed=1), runtime="transformers")
    assert spec.target.model is model
    calls: list[int] = []
    score = spec.target.score
    spec.target.score = lambda *args: calls.append(1) or score(*args)
    for way in (compiled, model):
        assert way.generate(torch.tensor([IDS]), **PLAIN).tolist() == expected
    assert calls
    foretoken.detach(compiled)
    assert "generate" not in vars(model)


def test_parts_may_be_compiled() -> None:
    model, plain = llama(64), llama(64)
    model.model.layers[0] = torch.compile(model.model.layers[0])
    spec = foretoken.load(model, "lookup")
    expected = plain.generate(torch.tensor([IDS]), **PLAIN)[0, len(IDS) :].tolist()
    assert list(spec.generate([IDS], max_new_tokens=8)[0].tokens) == expected


def test_what_is_more_than_the_model_inside_is_refused_with_the_remedy() -> None:
    model, adapted = llama(64), Lora(llama(64))
    pipeline = TextGenerationPipeline(model=llama(320), tokenizer=byte_level())
    for target in (adapted, torch.compile(adapted)):
        refused(InputError, r"^target is a Lora, .*: give target.merge_and_unload\(\)$", target)
        refused(InputError, r": give draft.merge_and_unload\(\)$", model, target)
        with pytest.raises(InputError, match=r": give model.merge_and_unload\(\)$"):
            foretoken.attach(target)
    refused(InputError, "^target is a TextGenerationPipeline .*", pipeline)
    refused(InputError, "target is Linear.*", nn.Linear(2, 2))


def test_others_are_left_as_they_are() -> None:
    model = llama(64)
    for value in (model, None, "a/b", foretoken.LookupDrafter(), foretoken.LookupDrafter):
        assert unwrap_model(value, "draft") is value
