"""Parameters, bytes and operations, counted by hand and, as FLOPs, by torch."""

from __future__ import annotations

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import GPT2Config, GPT2LMHeadModel

from foretoken import load
from foretoken.drafters.lm import LMDrafter
from foretoken.drafters.lookup import LookupDrafter
from foretoken.measurement.footprint import compute_drafter_footprint, compute_model_footprint
from foretoken.models.stock.model import CausalModel, Seq2SeqModel
from table import TableModel
from tiny import folder, llama, t5
from tiny_families import build


def test_llama_by_hand():
    footprint_of = compute_model_footprint(CausalModel(llama(320)), "name", "float32")
    layer = 32 * 32 + 2 * 32 * 16 + 32 * 32 + 3 * 32 * 48  # q, k and v, o; gate, up, down
    products = 2 * layer + 320 * 32
    assert footprint_of.parameters == products + 320 * 32 + 5 * 32  # embedding, norms
    assert footprint_of.operations == 2 * products and footprint_of.pass_bytes == 4 * products
    assert footprint_of.weight_bytes == 4 * footprint_of.parameters
    half = compute_model_footprint(CausalModel(llama(320)), "name", "bfloat16")
    assert half.weight_bytes == footprint_of.weight_bytes // 2
    quarter = compute_model_footprint(
        CausalModel(llama(320)), "name", "int4"
    )  # groups of 64, head in 8 bits
    assert quarter.pass_bytes == 2 * layer * (0.5 + 2 / 64) + 320 * 32


@pytest.mark.parametrize("name", ["Llama", "GPT-2", "Gemma 3"])
def test_operations_are_those_that_torch_counts(name):
    network = build(name)
    ids = torch.tensor([[5]])
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        network(input_ids=ids, use_cache=False)
    flops = counter.get_flop_counts()["Global"]
    attention = [n for op, n in flops.items() if "attention" in str(op) or "bmm" in str(op)]
    expected = compute_model_footprint(CausalModel(network), name, "float32").operations
    assert sum(flops.values()) - sum(attention) == expected


def TableModelOf(network):
    """A Model that holds that network; it is not run."""
    model = TableModel(lambda text: [1.0], 1)
    model.model = network
    return model


def test_an_encoder_is_not_run_again():
    footprint_of = compute_model_footprint(Seq2SeqModel(t5(64)), "name", "float32")
    attention, feed = 4 * 32 * 32, 2 * 32 * 48
    decoder = 2 * (2 * attention + feed) + 64 * 32  # two layers; the head, tied
    assert abs(footprint_of.operations // 2 - decoder) <= 32 * 4  # relative positions' few weights


def test_experts_that_a_token_does_not_meet_are_not_read():
    footprint_of = compute_model_footprint(TableModelOf(build("Mixtral")), "name", "float32")
    layer = 32 * 32 + 2 * 32 * 16 + 32 * 32 + 4 * 32 + 2 * 3 * 32 * 48  # 2 experts of 4
    assert footprint_of.operations == 2 * (2 * layer + 64 * 32)


def test_a_model_that_left_its_network_is_counted_from_its_folder(tmp_path):
    where = folder(tmp_path / "model", llama(320))
    model = TableModel(lambda text: [1.0], 1)
    model.runtime = "other"
    footprint_of = compute_model_footprint(model, str(where), "float32")
    assert (
        footprint_of.parameters
        == compute_model_footprint(CausalModel(llama(320)), "", "float32").parameters
    )
    assert compute_model_footprint(model, str(tmp_path / "no"), "float32").parameters is None


def test_drafters():
    lookup = compute_drafter_footprint(LookupDrafter(), "lookup", "float32")
    assert (lookup.runtime, lookup.operations, lookup.parameters) == ("python", 0, None)
    drafter = LMDrafter(CausalModel(llama(320)), 320)
    assert compute_drafter_footprint(drafter, "d", "float32").parameters == 320 * 32 * 2 + 15520


@pytest.mark.native
@pytest.mark.parametrize(("dtype", "bits"), [("int8", 8), ("int4", 4)])
def test_the_bytes_of_panels_are_their_own(tmp_path, dtype, bits):
    """With scales, and the output layer in eight bits: 34 bytes for 32 weights, or 18."""
    network = llama(320, hidden_size=256, intermediate_size=512, head_dim=64)
    where = folder(tmp_path / "model", network)
    model = load(where, "none", dtype=dtype, runtime="native").target
    sizes = compute_model_footprint(model, str(where), dtype)
    layers = sizes.operations // 2 - 320 * 256
    expected = layers * (bits + 0.5) / 8 + 320 * 256 * 8.5 / 8
    assert expected <= sizes.pass_bytes < expected + 2**15  # norms, and room for prefetches
    assert sizes.weight_bytes == sizes.pass_bytes + 320 * 256 * 4


@pytest.mark.parametrize(
    ("dim", "ff", "layers", "heads", "millions"), [(768, 3072, 12, 12, 97), (256, 1024, 2, 4, 6)]
)
def test_the_papers_networks_have_the_size_it_says(dim, ff, layers, heads, millions):
    """Section 4.2, GELU and 8k tokens: 97M and 6M, which takes an output layer of its own."""
    sizes = {"n_embd": dim, "n_inner": ff, "n_layer": layers, "n_head": heads}
    own = {"vocab_size": 8000, "n_positions": 128, "activation_function": "gelu"}
    counts = {}
    for tied in (False, True):
        with torch.device("meta"):
            network = GPT2LMHeadModel(GPT2Config(**sizes, **own, tie_word_embeddings=tied))
        counts[tied] = round(
            compute_model_footprint(TableModelOf(network), "name", "float32").parameters / 1e6
        )
    assert counts[False] == millions
    assert counts[True] == millions - round(8000 * dim / 1e6)
