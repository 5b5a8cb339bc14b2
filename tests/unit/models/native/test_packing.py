"""Weights in panels are the same numbers: of every kind of block that GGUF files have, of numbers,
and rounded; and their products are those of the numbers, but for the rounding of states."""

from __future__ import annotations

import copy
import ctypes
from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, quants
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import CohereConfig, CohereForCausalLM

from foretoken.errors import RefusedError
from foretoken.kernels import library, reference
from foretoken.models.native import description
from foretoken.models.native.conversion import NativeConversion
from foretoken.models.native.packing import STORAGE_KINDS, Panels, pack
from foretoken.models.native.pages import PagedSequence
from foretoken.models.native.passes import SequencePart
from tiny import llama

pytestmark = pytest.mark.cpu_only
SHAPE = (80, 512)
SLACK = np.zeros(8192, np.uint8)  # prefetches read behind the last panel
# how each kind is stored, and its bits a weight; then where a block holds numbers in float16: its
# other bytes may be any
WRITTEN = {
    "Q4_0": ("int4", 4.5),
    "Q4_1": ("int4", 5),
    "Q5_0": ("int5", 5.5),
    "Q5_1": ("int5", 6),
    "Q8_0": ("int8", 8.5),
    "TQ1_0": ("int4", 4.5),
    "TQ2_0": ("int4", 4.5),
    "MXFP4": ("fp4", 4.5),
    "F16": ("float16", 16),
    "BF16": ("bfloat16", 16),
    "F32": ("float32", 32),
}
PACKED = {
    "Q2_K": ("int4", 5.125, (80, 82)),
    "Q3_K": ("int4", 4.5625, (108,)),
    "Q4_K": ("int4", 4.625, (0, 2)),
    "Q5_K": ("int5", 5.625, (0, 2)),
    "Q6_K": ("int6", 6.5625, (208,)),
    "IQ4_NL": ("code4", 4.5, (0,)),
    "IQ4_XS": ("code4", 4.3125, (0,)),
    "NVFP4": ("fp4", 5, ()),
}


@pytest.fixture(autouse=True, scope="module")
def there() -> None:
    try:
        library.load_library()
    except RefusedError as error:
        pytest.skip(str(error))


def values(kind: str, seed: int = 0) -> np.ndarray:
    """Weights as a file holds them in blocks of this kind."""
    name, random = GGMLQuantizationType[kind], np.random.default_rng(seed)
    if kind in WRITTEN:
        weight = random.normal(0, 0.02, SHAPE).astype(np.float32)
        return quants.dequantize(quants.quantize(weight, name), name).astype(np.float32)
    size, length = GGML_QUANT_SIZES[name]
    raw = random.integers(0, 256, (SHAPE[0], SHAPE[1] // size, length), dtype=np.uint8)
    if kind in ("Q4_K", "Q5_K"):  # the least integer of a block is 0, as in most blocks of a file
        raw[..., -128::32] = 0
        if kind == "Q5_K":
            raw[..., 16] = 0
    if kind == "NVFP4":
        raw[..., :4] = random.integers(40, 72, (*raw.shape[:2], 4))  # scales, in eight bits
    for place in PACKED[kind][2]:
        scale = random.uniform(1e-3, 2e-2, (*raw.shape[:2], 1)).astype(np.float16)
        raw[..., place : place + 2] = scale.view(np.uint8)
    return quants.dequantize(raw.reshape(SHAPE[0], -1), name).astype(np.float32)


def record(panels: Panels) -> tuple[library.WeightRecord, Any]:
    data = np.concatenate([panels.data, SLACK])
    kind = STORAGE_KINDS[panels.kind]
    made = library.WeightRecord(
        kind, panels.outputs, panels.inputs, panels.form, data.ctypes.data, None, None
    )
    return made, data


def unpacked(panels: Panels, instructions: str) -> np.ndarray:
    """All rows as the kernels look them up."""
    weight, _data = record(panels)
    rows = np.zeros((panels.outputs, panels.inputs), np.float32)
    for i, row in enumerate(rows):
        call = library.load_library().foretoken_unpack
        call(instructions.encode(), ctypes.byref(weight), i, ctypes.c_void_p(row.ctypes.data))
    return rows


def multiplied(panels: Panels, x: np.ndarray) -> np.ndarray:
    weight, _data = record(panels)
    return run_product(weight, x)


def run_product(weight: library.WeightRecord, x: np.ndarray) -> np.ndarray:
    y = np.zeros((len(x), weight.outputs), np.float32)
    call, name = library.load_library().foretoken_product, library.choose_instruction_set().encode()
    first, last = (ctypes.c_void_p(array.ctypes.data) for array in (x, y))
    call(name, ctypes.byref(weight), first, len(x), 1, last)
    return y


@pytest.mark.daily("Q4_0", "Q8_0", "BF16", "Q4_K", "IQ4_NL", "MXFP4")
@pytest.mark.parametrize("kind", [*WRITTEN, *PACKED])
def test_blocks_of_files_stay_what_they_are(kind: str) -> None:
    weight = values(kind)
    panels = pack(weight, 8, rounding=False)
    stored, bits = (WRITTEN[kind] if kind in WRITTEN else PACKED[kind])[:2]
    assert (panels.kind, panels.data.nbytes * 8 / weight.size) == (stored, bits)
    for name in library.list_instruction_sets():
        assert np.array_equal(unpacked(panels, name), weight)


@settings(max_examples=40, deadline=None)
@given(
    kind=st.sampled_from([*WRITTEN, *PACKED]),
    seed=st.integers(0, 2**32),
    rows=st.integers(1, SHAPE[0]),
    place=st.integers(0, SHAPE[1] - 1),
    extreme=st.sampled_from([None, 0.0, -0.0, 1e-40, 3e38, 1.0]),
)
def test_any_weight_packs_to_itself(
    kind: str, seed: int, rows: int, place: int, extreme: float | None
) -> None:
    weight = values(kind, seed)[:rows].copy()
    if extreme is not None:
        weight[rows // 2, place] = extreme
        weight[rows // 3] = 0
    panels = pack(weight, 8, rounding=False)
    assert np.array_equal(unpacked(panels, library.choose_instruction_set())[:rows], weight)


@pytest.mark.parametrize("name", library.INSTRUCTION_SETS)
def test_four_bits_are_the_reference_s(name: str) -> None:
    if name not in library.list_instruction_sets():
        pytest.skip(f"this processor has no {name}")
    random = np.random.default_rng(0)
    groups = random.standard_normal((5000, 32)) * 10.0 ** random.integers(-9, 5, (5000, 1))
    groups = groups.astype(np.float32)
    groups[:4] = 0
    groups[1, 7], groups[2, 3:5], groups[3] = 3, (-2, 2), 1e-40
    integers, scales = np.zeros(groups.shape, np.int8), np.zeros((len(groups), 1), np.float32)
    pointers = [ctypes.c_void_p(x.ctypes.data) for x in (groups, integers, scales)]
    call, count = library.load_library().foretoken_round_weights, ctypes.c_int64(len(groups))
    call(name.encode(), pointers[0], count, *pointers[1:])
    with np.errstate(over="ignore"):
        expected, short = reference.round_weights(groups)
    assert np.array_equal(integers, expected) and np.array_equal(scales, short.astype(np.float32))


@pytest.mark.parametrize("bits", [4, 8])
def test_other_weights_are_rounded(bits: int) -> None:
    weight = np.random.default_rng(0).standard_normal((100, 96)).astype(np.float32)
    weight[7] *= np.float32(1e-7)  # scales that float16 does not have
    panels = pack(weight[:7], bits)
    assert (panels.kind, panels.form) == (f"int{bits}", 0)
    made = unpacked(pack(weight, bits), library.choose_instruction_set())[:100]
    groups, error = weight.reshape(-1, 32), np.abs(made - weight).reshape(-1, 32).max(1)
    if bits == 4:
        k, scale = reference.round_weights(groups)
        assert np.array_equal(made.reshape(-1, 32), k * scale.astype(np.float32))
    else:  # half a step, and what float16 is off at the ends
        assert (error <= np.abs(groups).max(1) * (0.5 / 127 + 2**-11)).all()
    odd = weight[:, :90].copy()  # no full block
    assert pack(odd, bits).kind == "float32"


def test_a_weight_may_have_parts_of_several_kinds() -> None:
    """As queries and keys in Q4_K with values in Q6_K, which a layer multiplies as one."""
    sizes = {"hidden_size": 512, "intermediate_size": 512, "num_hidden_layers": 2}
    network = llama(100, num_attention_heads=8, num_key_value_heads=4, head_dim=64, **sizes)
    kinds = {"q_proj": "Q4_K", "k_proj": "Q4_K", "v_proj": "Q6_K", "o_proj": "Q5_K"}
    kinds |= {"gate_proj": "IQ4_XS", "up_proj": "Q3_K", "down_proj": "Q5_0"}
    with torch.inference_mode():
        for name, weight in network.named_parameters():
            kind = kinds.get(name.split(".")[-2])
            if kind is not None:
                rows = [values(kind, seed) for seed in range(-(-len(weight) // SHAPE[0]))]
                weight.copy_(torch.from_numpy(np.concatenate(rows)[: len(weight)]) / 256)
        expected = network(torch.arange(40)[None]).logits[0]
    model = NativeConversion(None, "int8", lambda: network).load_model()
    layer = model.passes.facts["layers"][0]
    first, rest = layer["qkv"], layer["qkv"]["rest"]
    assert (first["kind"], rest["kind"], layer["up"]["kind"]) == ("int4", "int6", "int4")
    assert (first["outputs"], rest["outputs"], rest["rest"]) == (1024, 256, None)
    part = SequencePart(PagedSequence(model.pool), 0, list(range(40)), 40, 0)
    made = model.passes.run([part], 1, 40, return_tapped=False).logits[0]
    assert ((made - expected).norm(dim=1) / expected.norm(dim=1)).median() < 0.02
    passes = model.passes
    record, _kept = description.make_network_record(
        passes.facts, passes.layout.layers, passes.memory, 1, 1
    )
    x = np.random.default_rng(0).standard_normal((3, 512)).astype(np.float32)
    attention: Any = network.model.layers[0].self_attn
    parts = [attention.q_proj, attention.k_proj, attention.v_proj]
    each = [multiplied(pack(part.weight.detach().numpy(), 8), x) for part in parts]
    assert np.array_equal(run_product(record.layer[0].qkv, x), np.concatenate(each, 1))


def test_parts_beside_one_another_may_be_stored_in_any_way() -> None:
    """Where attention and MLP read one state, it is rounded if any of their products asks for it,
    here the last one alone."""
    sizes = {"hidden_size": 64, "num_hidden_layers": 2, "intermediate_size": 64, "vocab_size": 64}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256}
    network = CohereForCausalLM(CohereConfig(**sizes, **heads)).eval()
    dice = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for layer in network.model.layers:
            integers = torch.randint(-8, 8, (64, 2, 32), generator=dice)
            scales = (torch.rand(64, 2, 1, generator=dice) * 0.1).half()
            layer.mlp.up_proj.weight.copy_((integers * scales.float()).view(64, 64))
        expected = network(torch.arange(1, 21)[None]).logits[0]
    model = NativeConversion(None, "float32", lambda: copy.deepcopy(network)).load_model()
    layer = model.passes.facts["layers"][0]
    assert [layer[name]["kind"] for name in ("qkv", "gate", "up")] == ["float32", "float32", "int4"]
    model.start([[]])
    made = model.score([list(range(1, 21))], [20])[0]
    assert ((made - expected).norm(dim=1) / expected.norm(dim=1)).max() < 0.05
