"""A twin: the same weights and hooks, other modules and configurations."""

from __future__ import annotations

from functools import partial
from types import MethodType
from typing import Any

import pytest
import torch
from torch import nn
from transformers import PreTrainedModel

import pairs
from foretoken.errors import RefusedError
from foretoken.models.stock.attention import twin
from foretoken.models.stock.selfcheck import on_torch
from foretoken.models.stock.small_copy import randomize_weights
from tiny_families import build


def lively(name: str) -> PreTrainedModel:
    torch.manual_seed(0)
    model = build(name)
    randomize_weights(model)
    return model.double().eval()


def test_a_twin_has_the_very_weights_and_hooks_and_its_own_configuration() -> None:
    model = build("T5")
    seen: list[nn.Module] = []
    model.get_encoder().register_forward_hook(lambda part, args, out: seen.append(part))
    two = twin(model)
    assert all(a is b for a, b in zip(model.parameters(), two.parameters(), strict=True))
    assert all(torch.equal(a, b) for a, b in zip(model.buffers(), two.buffers(), strict=True))
    assert not {id(part) for part in model.modules()} & {id(part) for part in two.modules()}
    assert two.get_encoder().config is not model.get_encoder().config
    assert two.get_encoder().config.to_dict() == model.get_encoder().config.to_dict()
    two.get_encoder().register_forward_hook(lambda part, args, out: seen.append(two))
    ids = torch.ones(1, 2, dtype=torch.long)
    two(input_ids=ids, decoder_input_ids=ids)
    assert seen == [two.get_encoder(), two]  # a hook of the user's is called, and one of its own
    model(input_ids=ids, decoder_input_ids=ids)
    assert seen[2:] == [model.get_encoder()]
    with torch.no_grad():
        model.shared.weight += 1
    assert torch.equal(model.shared.weight, two.shared.weight)


def test_forwards_that_were_wrapped_run_over_the_twin() -> None:
    """As accelerate's offloading does it; what may run the first model by itself is refused."""
    model = lively("Llama")
    expected = pairs.scores(model, [5, 6, 7])
    layer = model.model.layers[0]
    layer._old_forward = layer.forward
    seen: list[nn.Module] = []

    def offloaded(part: nn.Module, *args: Any, **kwargs: Any) -> Any:
        seen.append(part)
        return part._old_forward(*args, **kwargs)

    layer.forward = partial(offloaded, layer)
    two = twin(model)
    assert two.model.layers[0]._old_forward.__self__ is two.model.layers[0]
    runner = on_torch(model)
    runner.start([[5]])
    logits = runner.score([[6, 7]], [2])[0]
    assert torch.allclose(logits, expected[1:]) and seen and layer not in seen
    layer.forward = MethodType(type(layer).forward, layer)
    assert twin(model).model.layers[0].forward.__self__ is not layer
    layer.forward = lambda *args, **kwargs: None
    with pytest.raises(
        RefusedError, match="forward of LlamaDecoderLayer was replaced by <function"
    ):
        on_torch(model)


def test_a_forward_that_was_compiled_is_taken_as_it_was() -> None:
    """Compiled, it would run the user's own modules, and their stock attention."""
    model = lively("Llama")
    expected = pairs.scores(model, [5, 6, 7])
    plain = model.forward
    model.forward = torch.compile(plain, backend="eager")
    runner = on_torch(model)
    runner.start([[5]])
    assert torch.allclose(runner.score([[6, 7]], [2])[0], expected[1:])
    assert twin(model).forward.__self__ is not model
