"""The additions of DFlash2, against a second reading of their description: loops over positions,
and scores of all pairs of candidates."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import tiny
from blocks import ADDED, DFLASH2, draft, speculators, tensors
from foretoken.models.stock.dflash2 import CandidateSelector, ConvolutionLayer, GroupedConvolution
from foretoken.models.stock.dflash_files import build_network, parse_block_config
from foretoken.models.stock.small_copy import randomize_weights

pytestmark = pytest.mark.daily

V, H, GROUP = 40, 32, 8
TARGET = tiny.llama(V, seed=5)


def random(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(len(shape)))


def convolved(x: Tensor, base: Tensor, deltas: Tensor) -> Tensor:
    """One block `[n, H]`, one number after another."""
    out = torch.zeros_like(x)
    for i in range(len(x)):
        for t in range(min(i + 1, len(base))):
            for c in range(x.shape[1]):
                out[i, c] += (base[t, c] + deltas[i, t, c // GROUP]) * x[i - t, c]
    return out


@pytest.mark.parametrize("taps", [1, 2, 3])
def test_a_convolution_sees_its_block_alone_and_only_backwards(taps: int) -> None:
    part = GroupedConvolution(H, taps, GROUP)
    randomize_weights(part)
    x = random(3, 4, H)
    found = part(x, lambda inside: 2 * inside)
    for b in range(3):
        deltas = part.kernel_projection(x[b]).view(4, 2, taps, H // GROUP)
        inside = convolved(x[b], part.base_kernel[0], deltas[:, 0])
        expected = convolved(2 * inside, part.base_kernel[1], deltas[:, 1])
        assert torch.allclose(found[b], expected, atol=1e-4)


def test_an_identity_leaves_dflash_as_it_is() -> None:
    """Kernels of 1 and no deltas, as training begins with."""
    given = tensors(DFLASH2, TARGET)
    for name, weight in given.items():
        if name.endswith("base_kernel"):
            weight.zero_()[:, 0] = 1
        elif name.endswith("kernel_projection.weight"):
            weight.zero_()
    plain = {name: x for name, x in given.items() if "_conv" not in name}
    without = {**DFLASH2["dflash_config"], "conv_kernel_size": 0, "conv_group_size": 0}
    results: list[Tensor] = []
    for config, files in ((DFLASH2, given), ({**DFLASH2, "dflash_config": without}, plain)):
        model = draft(config, TARGET, files)
        model.start(1)
        model.append_context([random(6, H)])
        results.append(model.predict_block([9], [4])[0])
    assert torch.allclose(*results, atol=1e-5)


@pytest.mark.parametrize(("scale", "softcap"), [(1.0, 0.0), (0.5, 2.0)])
def test_the_chain_is_a_walk_over_the_scores_of_all_pairs(scale: float, softcap: float) -> None:
    selector = CandidateSelector(V, H, 4, 3, scale, softcap)
    randomize_weights(selector)
    states, logits, anchor = random(5, H), 3 * random(5, V, 1)[..., 0], 7
    best = logits.topk(3)
    values = best.values * scale
    values = torch.tanh(values / softcap) * softcap if softcap else values
    before = anchor
    for i in range(5):
        places = [anchor] * 3 if i == 0 else best.indices[i - 1].tolist()
        edges = torch.zeros(3, 3)
        for p, previous in enumerate(places):
            for c, token in enumerate(best.indices[i].tolist()):
                gate = selector.predecessor_codebook[previous] * selector.hidden_projection(
                    states[i]
                )
                edges[p, c] = values[i, c] + gate @ selector.successor_codebook[token]
        row = edges[places.index(before)]
        found = selector(states[i : i + 1], logits[i : i + 1], torch.tensor([before]))[0]
        assert torch.allclose(found[best.indices[i]], row, atol=1e-5)
        assert found.isneginf().sum() == V - 3
        before = int(best.indices[i, row.argmax()])


def test_both_layouts_of_a_network_give_the_same_block() -> None:
    layers = {k: x for k, x in DFLASH2.items() if k not in ("dflash_config", "architectures")}
    other = speculators("dflash2", transformer_layer_config=layers, **ADDED)
    given = tensors(DFLASH2, TARGET)
    assert given.keys() == tensors(other, TARGET).keys()
    results: list[Tensor] = []
    for config in (DFLASH2, other):
        model = draft(config, TARGET, given)
        model.start(1)
        model.append_context([random(2, H)])  # shorter than the window, whose ends differ
        states, logits = model.predict_block([9], [4])
        chained = model.condition_on_previous(states[:, 1], logits[:, 1], torch.tensor([4]), None)
        results.append(chained[0])
    assert torch.equal(*results)


def test_embeddings_are_scaled() -> None:
    config = {**DFLASH2, "dflash_config": {**DFLASH2["dflash_config"], "input_embedding_scale": 3}}
    network = build_network(parse_block_config(config), H, V, V)
    assert network.embedding_scale == 3.0 and isinstance(network.layers[0], ConvolutionLayer)
