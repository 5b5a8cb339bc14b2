"""Whatever a model runs on, it shows what its output layer read at the positions of its logits."""

from __future__ import annotations

import pytest
import torch

import pairs
from foretoken.loading.facts import ModelFacts, Placement
from foretoken.loading.runtimes.place import place
from foretoken.models.graphs import GraphModel
from foretoken.models.stock.model import CausalModel, Seq2SeqModel

FORMS = {
    "causal": ("Llama", CausalModel),
    "seq2seq": ("T5", Seq2SeqModel),
    "seq2seq with a bias": ("BART", Seq2SeqModel),
    "graphs": ("Llama", GraphModel),
}


def shows_what_the_head_reads(model, network) -> None:
    """The output layer makes the logits of it, ragged and even, with rows that joined and left."""
    output, dtype = network.get_output_embeddings(), network.dtype
    sources = [[5, 6, 7], [9, 8], [4]] if model.encoder_decoder else None
    model.start([[3, 4], [], [7, 8, 9]], sources)
    for blocks, need in (
        ([[5, 6, 7], [8], [9, 10]], [3, 1, 1]),
        ([[5], [], [6, 7]], [1, 0, 2]),
        ([[5, 6], [8, 9], [9, 10]], [2, 2, 2]),
    ):
        logits = model.score(blocks, need)
        hidden = model.hidden
        assert hidden.shape == (3, max(need), output.in_features)
        for b, n in enumerate(need):
            with torch.inference_mode():
                outputs = output(hidden[b, :n].to(dtype))
            assert torch.allclose(outputs, logits[b, :n].to(dtype), atol=1e-4)
    model.leave([1])
    model.score([[5, 6], [8]], [1, 1])
    assert model.hidden.shape == (2, 1, output.in_features)


@pytest.mark.parametrize("name", FORMS)
def test_on_torch(name):
    family, form = FORMS[name]
    network = pairs.target(family)
    shows_what_the_head_reads(form(network), network)


@pytest.mark.native
@pytest.mark.parametrize("family", ["Llama", "T5"])
def test_on_the_native_decoder(family):
    network = pairs.random(family, 0)
    placed = place(ModelFacts(network), Placement(runtime="native"))
    shows_what_the_head_reads(placed.model, network)
