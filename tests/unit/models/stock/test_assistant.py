"""Our network of Gemma 4's assistants beside transformers' own, whose configuration is patched."""

from __future__ import annotations

import copy
import random
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache

import assistants
from assistants import WIDTH, WINDOW
from foretoken.models.stock.assistant import StockAssistant

pytestmark = pytest.mark.daily

V = 24
LONG = 3 * WINDOW


def text(length: int, seed: int = 0) -> list[int]:
    return random.Random(seed).choices(range(V), k=length)


@torch.inference_mode()
def their_steps(own: Any, net: Any, read: list[int], tokens: list[int], state: Tensor):
    """Logits of transformers' assistant behind each of `tokens`, which follow the text `read`.

    It is handed keys of true positions only, and of the window's: its own mask has two more.
    """
    out = net(input_ids=torch.tensor([read]), return_shared_kv_states=True, use_cache=False)
    lent = dict(out.shared_kv_states)
    lent["sliding_attention"] = tuple(x[:, :, 1 - WINDOW :] for x in lent["sliding_attention"])
    logits: list[Tensor] = []
    for token in tokens:
        embedded = net.get_input_embeddings()(torch.tensor([[token]]))
        made = own(
            inputs_embeds=torch.cat([embedded, state[None, None]], -1),
            position_ids=torch.tensor([[len(read)]]),
            shared_kv_states=lent,
        )
        logits.append(made.logits[0, 0])
        state = made.last_hidden_state[0, 0]
    return torch.stack(logits)


@torch.inference_mode()
def our_steps(model: StockAssistant, net: Any, rows: list[int], tokens: list[list[int]], states):
    """`[rows, steps, V]`"""
    model.begin(rows)
    logits: list[Tensor] = []
    for ids in zip(*tokens, strict=True):
        made, states = model.step(net.get_input_embeddings()(torch.tensor(ids)), states)
        logits.append(made)
    return torch.stack(logits, 1)


@pytest.mark.parametrize("ordered", [False, True])
@pytest.mark.parametrize("length", [1, WINDOW - 1, WINDOW, WINDOW + 1, LONG])
def test_steps_are_those_of_transformers(length: int, ordered: bool) -> None:
    net, own = assistants.target(V), assistants.own_assistant(V, ordered=ordered)
    target, read, tokens = assistants.running(net), text(length), text(3, 9)
    target.start([read])
    ours = StockAssistant(assistants.network(V, ordered=ordered), target)
    state = assistants.last_state(net, read)
    made = our_steps(ours, net, [0], [tokens], state[None])[0]
    theirs = their_steps(own, net, read, tokens, state)
    possible = made > -torch.inf
    assert torch.allclose(made[possible], theirs[possible], atol=1e-5)
    if ordered:  # tokens of two centroids of four; transformers gives the others one low number
        assert possible.sum(1).tolist() == [V // 2] * 3
        assert all(
            len(step[~here].unique()) == 1 for step, here in zip(theirs, possible, strict=True)
        )
    else:
        assert possible.all()


@pytest.mark.parametrize("sharing", [False, True])
def test_a_target_may_share_keys_among_its_layers_or_not(sharing: bool) -> None:
    """transformers' lends none where its own layers share none."""
    net, read = assistants.target(V, sharing=sharing), text(LONG)
    target, cache = assistants.running(net), DynamicCache(config=net.config)
    target.start([read])
    with torch.inference_mode():
        net(input_ids=torch.tensor([read]), past_key_values=cache)
    for kind, layer in {"sliding_attention": 0, "full_attention": 1}.items():
        kept = cache.layers[layer if sharing else layer + 2]
        lent = target.get_shared_kv(kind, [0], LONG + 1 - WINDOW)
        assert torch.allclose(lent.keys, kept.keys[:, :, 1 - WINDOW :], atol=1e-6)
        assert torch.allclose(lent.values, kept.values[:, :, 1 - WINDOW :], atol=1e-6)


def test_a_target_in_another_precision_lends_its_keys() -> None:
    net = copy.deepcopy(assistants.target(V)).to(torch.bfloat16)
    target = assistants.running(net)
    target.start([text(LONG)])
    state = target.take_hidden_states()[0]
    assert state is None  # nobody asked for it
    ours = StockAssistant(assistants.network(V), target)
    ours.begin([0])
    logits, back = ours.step(torch.ones(1, WIDTH, dtype=torch.bfloat16), torch.ones(1, WIDTH))
    assert logits.dtype == back.dtype == torch.float64 and logits.isfinite().all()
