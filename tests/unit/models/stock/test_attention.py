"""Ragged attention runs in a twin: the model that was given is never touched, by no thread and no
Ctrl-C; and decoders that count positions themselves reach their context's very end."""

from __future__ import annotations

from functools import partial
from threading import Thread
from types import MethodType
from typing import Any

import pytest
import torch
from torch import nn
from transformers import PreTrainedModel

import pairs
import tiny
from foretoken import load
from foretoken.errors import RefusedError
from foretoken.models.stock import positions
from foretoken.models.stock.attention import make_twin
from foretoken.models.stock.selfcheck import build_torch_model
from foretoken.models.stock.small_copy import randomize_weights
from foretoken.speculator import Speculator
from interrupts import interrupted
from tiny_families import build


def state(model: PreTrainedModel) -> list[Any]:
    """All that a forward could leave changed, apart from the weights."""
    parts = list(model.modules())
    configs = [dict(vars(part.config)) for part in parts if isinstance(part, PreTrainedModel)]
    hooks = [(*part._forward_hooks, *part._forward_pre_hooks) for part in parts]
    return [configs, hooks, [part.training for part in parts]]


def lively(name: str, **settings: Any) -> PreTrainedModel:
    torch.manual_seed(0)
    model = build(name)
    if settings:
        model = type(model)(type(model.config)(**(model.config.to_diff_dict() | settings)))
    randomize_weights(model)
    return model.double().eval()


@pytest.mark.prove
@pytest.mark.parametrize(
    ("name", "step"),
    [("Llama", 15), ("BART", 151), pytest.param("BART", 7, marks=pytest.mark.prove)],
)
def test_a_ctrl_c_anywhere_leaves_the_model_as_it_was(name: str, step: int) -> None:
    """Also in the making of a twin, which takes most of the lines."""
    model = lively(name)
    before = state(model)
    runner = build_torch_model(model)
    source = [[5, 6]] if runner.encoder_decoder else None

    def use() -> None:
        runner.permute([])
        runner.start([[1, 2, 3]], source)
        runner.score([[4]], [1])

    for file, more in (("stock/attention.py", step), ("contextlib.py", 2)):
        nth = 1
        while interrupted(use, nth, (file,)):
            assert state(model) == before, f"line {nth} of {file}"
            nth += more
        assert nth > 30, f"{file} is not on the way"
    use()


def test_threads_may_run_one_network_at_once() -> None:
    """Two speculators over one network in memory: nothing is shared but the weights."""
    model = pairs.target("Llama")
    before = state(model)
    speculators = [load(model, "none") for _ in range(2)]
    alone = [
        speculators[0].generate([prompt], max_new_tokens=24)[0].tokens for prompt in pairs.PROMPTS
    ]
    texts: dict[int, list[list[int]]] = {}

    def work(i: int) -> None:
        texts[i] = [one.tokens for one in speculators[i].generate(pairs.PROMPTS, max_new_tokens=24)]

    threads = [Thread(target=work, args=(i,)) for i in range(2)]
    for thread in threads:
        thread.start()
    for _ in range(8):
        assert pairs.scores(model, pairs.PROMPTS[0]).isfinite().all()  # the stock model, meanwhile
    for thread in threads:
        thread.join()
    assert texts == {0: alone, 1: alone} and state(model) == before


def test_what_runs_is_left_behind_by_nothing_that_matters() -> None:
    """A Ctrl-C on the way out may leave the context variable set: the next run has its own."""
    model = lively("BART")
    runner, other = build_torch_model(model), build_torch_model(model)
    runner.start([[1, 2, 3]], [[5, 6]])
    expected = runner.score([[4]], [1]).clone()
    token = positions.FORWARD_CONTEXT.set(
        positions.ForwardContext(runner.cache.self_attention_cache, None)
    )
    try:
        other.start([[1, 2, 3]], [[5, 6]])
        assert torch.equal(other.score([[4]], [1]), expected)
    finally:
        positions.FORWARD_CONTEXT.reset(token)


ROPES = {
    "dynamic": {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 10000.0},
    "longrope": {
        "rope_type": "longrope",
        "rope_theta": 10000.0,
        "factor": 2.0,
        "short_factor": [1.0] * 4,
        "long_factor": [3.0] * 4,
        "original_max_position_embeddings": 128,
    },
}


def generated(model: PreTrainedModel, prompt: list[int], tokens: int = 12) -> list[int]:
    """transformers' own greedy text."""
    ids = torch.tensor([prompt])
    options = {
        "do_sample": False,
        "max_new_tokens": tokens,
        "pad_token_id": 0,
        "eos_token_id": None,
    }
    return model.generate(ids, attention_mask=torch.ones_like(ids), **options)[
        0, len(prompt) :
    ].tolist()


def ours(spec: Speculator, prompt: list[int], tokens: int = 12) -> list[int]:
    return spec.generate([prompt], max_new_tokens=tokens, gamma=3)[0].tokens


@pytest.mark.parametrize("name", ROPES)
def test_frequencies_that_a_forward_replaces_are_each_ones_own(name: str) -> None:
    """For long texts these put other buffers in place, or other numbers in them, and note that."""
    contexts = {"dynamic": 128, "longrope": 256}
    rope = {"rope_parameters": dict(ROPES[name]), "eos_token_id": None}
    model, other = (tiny.llama(64, context=contexts[name], **rope).double() for _ in range(2))
    short, long = [5, 17, 33, 9], [(7 * i + 3) % 60 for i in range(200)]
    spec = load(model, "lookup")
    expected = generated(other, short)
    for network in (model, other):
        generated(network, long)
    pieces = spec.stream(short, max_new_tokens=12, gamma=3)
    tokens = list(next(pieces).tokens)
    assert generated(model, long) == generated(other, long)  # beside ours
    tokens += [token for piece in pieces for token in piece.tokens]
    assert tokens == expected == generated(model, short) == ours(spec, short)


def test_a_run_follows_what_has_become_of_the_network() -> None:
    """What the user switches, puts in or takes out between two runs is there in the next."""
    model = tiny.llama(64, eos_token_id=None).double()
    spec = load(model, "lookup")
    layer, prompt = model.model.layers[0], [5, 17, 33]
    plain = ours(spec, prompt)

    class Adapted(nn.Module):
        active = True

        def __init__(self, inner: nn.Module) -> None:
            super().__init__()
            self.inner = inner

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.inner(x) * (3.0 if self.active else 1.0)

    layer.mlp.up_proj = Adapted(layer.mlp.up_proj)
    adapted = ours(spec, prompt)
    assert adapted == generated(model, prompt) != plain
    layer.mlp.up_proj.active = False
    assert ours(spec, prompt) == plain
    layer.self_attn.scaling = 0.01
    assert ours(spec, prompt) == generated(model, prompt)
    hook = model.lm_head.register_forward_pre_hook(lambda part, args: (args[0].flip(-1),))
    assert ours(spec, prompt) == generated(model, prompt)
    hook.remove()
    more = model.lm_head.register_forward_pre_hook(
        lambda part, args, kwargs: ((args[0].flip(-1),), kwargs), with_kwargs=True
    )
    assert ours(spec, prompt) == generated(model, prompt)
    more.remove()
    assert ours(spec, prompt) == generated(model, prompt)
    model.set_output_embeddings(nn.Linear(32, 64, bias=False).double())
    assert ours(spec, prompt) == generated(model, prompt)
    layer.mlp.forward = lambda x: x
    with pytest.raises(RefusedError, match="forward of LlamaMLP was replaced"):
        ours(spec, prompt)
    del layer.mlp.forward
    assert ours(spec, prompt) == generated(model, prompt)


def test_a_twin_has_the_very_weights_and_hooks_and_its_own_configuration() -> None:
    model = build("T5")
    seen: list[nn.Module] = []
    model.get_encoder().register_forward_hook(lambda part, args, out: seen.append(part))
    two = make_twin(model)
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
    two = make_twin(model)
    assert two.model.layers[0]._old_forward.__self__ is two.model.layers[0]
    runner = build_torch_model(model)
    runner.start([[5]])
    logits = runner.score([[6, 7]], [2])[0]
    assert torch.allclose(logits, expected[1:]) and seen and layer not in seen
    layer.forward = MethodType(type(layer).forward, layer)
    assert make_twin(model).model.layers[0].forward.__self__ is not layer
    layer.forward = lambda *args, **kwargs: None
    with pytest.raises(
        RefusedError, match="forward of LlamaDecoderLayer was replaced by <function"
    ):
        build_torch_model(model)


def test_a_forward_that_was_compiled_is_taken_as_it_was() -> None:
    """Compiled, it would run the user's own modules, and their stock attention."""
    model = lively("Llama")
    expected = pairs.scores(model, [5, 6, 7])
    plain = model.forward
    model.forward = torch.compile(plain, backend="eager")
    runner = build_torch_model(model)
    runner.start([[5]])
    assert torch.allclose(runner.score([[6, 7]], [2])[0], expected[1:])
    assert make_twin(model).forward.__self__ is not model
