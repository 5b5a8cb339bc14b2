"""Decoders on ONNX Runtime: what transformers computes, in any blocks and any company, with weights
as they are or rounded, and with nothing lost to a Ctrl-C."""

from __future__ import annotations

import copy
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from transformers import PreTrainedModel

import avx2
import foretoken
import tiny
from foretoken.errors import InputError, RefusedError
from foretoken.models import store
from foretoken.models.blocks import Blocks, found
from foretoken.models.onnx.conversion import OnnxConversion, form
from foretoken.models.onnx.export import export
from foretoken.models.onnx.model import OnnxModel
from foretoken.models.onnx.products import rounded, stored, with_sums
from foretoken.models.stock.selfcheck import TOLERANCE, check, deviation, small_copy, stir
from interrupts import interrupted
from tiny_families import build

pytestmark = pytest.mark.cpu_only
WHERE = ("onnx/model.py", "onnx/slots.py", "onnx/passes.py", "models/rows.py")  # to interrupt
WIDTHS: dict[str, Any] = {"vocab_size": 64, "hidden_size": 64, "num_hidden_layers": 2}
WIDTHS |= {"num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 96}
WIDTHS |= {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 1}
LIKE_LLAMA = ["Llama", "Qwen2", "Qwen3", "Mistral", "Gemma 2", "Gemma 3", "Phi-3"]
MORE = ["Cwm", "Exaone4", "Gemma", "Granite", "Olmo2", "Olmo3", "SeedOss", "SmolLM3"]
OTHERS = ["GPT-2", "OPT", "T5"]
LAYER_NORMS: list[tuple[str, dict[str, Any]]] = [("Phi", {}), ("Cohere", {}), ("Starcoder2", {})]
LAYER_NORMS += [("StableLm", {"use_parallel_residual": flag}) for flag in (True, False)]
LAYER_NORMS += [("GPTNeoX", {"use_parallel_residual": flag}) for flag in (True, False)]
EXPERTS = {"num_experts": 8, "num_experts_per_tok": 3, "num_local_experts": 8}
EXPERTS |= {"moe_intermediate_size": 32, "shared_expert_intermediate_size": 64}
WITH_EXPERTS = ["Qwen3Moe", "Qwen2Moe", "Mixtral", "Olmoe", "GraniteMoe", "GptOss"]


def converted(network: PreTrainedModel, dtype: str = "float32", **how: Any) -> OnnxModel:
    return OnnxConversion(None, dtype, lambda: copy.deepcopy(network).float(), **how).model()


@cache
def network() -> PreTrainedModel:
    return tiny.llama(64, head_dim=16, intermediate_size=64)


@cache
def with_experts(name: str = "Qwen2Moe", **settings: Any) -> PreTrainedModel:
    library: Any = transformers
    config = getattr(library, f"{name}Config")(**WIDTHS | EXPERTS | {"head_dim": 16} | settings)
    torch.manual_seed(0)
    made = getattr(library, f"{name}ForCausalLM")(config).eval()
    stir(made)
    return made


NETWORKS = {"dense": network, "experts": with_experts}


@pytest.fixture(scope="module")
def model() -> OnnxModel:
    return converted(network())


@pytest.fixture(autouse=True)
def emptied(model: OnnxModel) -> None:
    model.leave(list(range(len(model.lengths))))


@pytest.mark.parametrize("name", LIKE_LLAMA)
def test_families_are_exact(name: str) -> None:
    """Ragged blocks, rollbacks, joins and leaves, past windows, of the self-check."""
    assert check(build(name), form()).delta < TOLERANCE


@pytest.mark.parametrize("name", MORE)
def test_more_families_are_exact(name: str) -> None:
    library: Any = transformers
    config = getattr(library, f"{name}Config")(**WIDTHS)
    small = small_copy(getattr(library, f"{name}ForCausalLM"), config)
    assert deviation(small, converted(small)) < TOLERANCE


@pytest.mark.parametrize(("name", "settings"), LAYER_NORMS)
def test_families_with_layer_norms_are_exact(name: str, settings: dict[str, Any]) -> None:
    """Heads that are turned in part, parts that read the same states, and MLPs without gates."""
    library: Any = transformers
    small = small_copy(
        getattr(library, f"{name}ForCausalLM"),
        getattr(library, f"{name}Config")(**WIDTHS | settings),
    )
    with torch.no_grad():
        for weight in small.parameters():
            if weight.ndim == 1:
                weight.normal_(1)
    assert deviation(small, converted(small)) < TOLERANCE
    assert deviation(small, converted(small, "int8")) < 0.2


@pytest.mark.parametrize("name", OTHERS)
def test_other_families_are_refused(name: str) -> None:
    with pytest.raises(RefusedError, match="ONNX Runtime"):
        converted(build(name))


@pytest.mark.parametrize("name", WITH_EXPERTS)
def test_families_with_experts_are_exact(name: str) -> None:
    assert deviation(with_experts(name), converted(with_experts(name))) < TOLERANCE


def test_layers_without_experts_stand_among_those_with_some() -> None:
    own: Any = with_experts()
    config = copy.deepcopy(own.config)
    config.mlp_only_layers, config.norm_topk_prob = [0], not config.norm_topk_prob
    other = type(own)(config).eval()
    stir(other)
    assert deviation(other, converted(other)) < TOLERANCE


def test_experts_that_are_chosen_in_another_way_are_refused() -> None:
    odd: Any = copy.deepcopy(with_experts())
    gate = odd.model.layers[1].mlp.gate
    stock = gate.forward
    gate.forward = lambda states: (*stock(states)[:1], stock(states)[1] * 2, stock(states)[2])
    with pytest.raises(RefusedError, match="experts chosen by a Qwen2MoeTopKRouter"):
        converted(odd)


def test_gates_of_experts_that_have_a_limit_are_refused() -> None:
    """Only large numbers show it."""
    odd: Any = copy.deepcopy(with_experts())
    experts = odd.model.layers[1].mlp.experts
    stock = experts._apply_gate
    experts._apply_gate = lambda both: stock(both.clamp(max=10))
    with pytest.raises(RefusedError, match="gates of Qwen2MoeExperts"):
        converted(odd)


def test_a_parameter_that_is_not_read_is_refused() -> None:
    odd: Any = copy.deepcopy(network())
    odd.model.layers[1].self_attn.gain = torch.nn.Parameter(torch.ones(1))
    with pytest.raises(RefusedError, match=r"layers\.1\.self_attn\.gain"):
        converted(odd)


@pytest.mark.parametrize("kind", NETWORKS)
@pytest.mark.parametrize("dtype", ["float32", "int8", "int4"])
def test_a_tokens_logits_do_not_depend_on_its_company(dtype: str, kind: str) -> None:
    """To the bit, in blocks of any size, beside other rows, after a rollback, and from a cached
    prefix, for a model that says so; within rounding for one that says that it does not: int4 on a
    processor with AVX2 alone."""
    model, text = (
        converted(NETWORKS[kind](), dtype),
        [(7 * i * i + 3 * i) % 61 + 2 for i in range(90)],
    )
    atol = 0.0 if model.batch_invariant else 0.1  # activations are rounded to eight bits
    model.start([[]])
    expected = model.score([text], [len(text)])[0].clone()
    model.leave([0])
    for width in [1, 2, 3, 8, 33, 65]:
        model.start([[], text[:40]])
        for at in range(0, len(text) - len(text) % width, width):
            block, beside = text[at : at + width], text[: at % 5]
            if at % 3 == 0:  # draft tokens that are taken back
                model.score([[5, 6, 7], beside], [3, 0])
                model.set_lengths([at, 40])
            made = model.score([block, beside], [len(block), 0])[0]
            same = expected[at : at + len(block)]
            assert torch.allclose(made[: len(block)], same, rtol=0, atol=atol), (width, at)
            model.set_lengths([at + len(block), 40])
        model.leave([0, 1])
    model.remember(True)
    model.start([text[:64]])
    model.leave([0])
    model.start([text[:70]])
    assert model.recalled == [64]
    last = model.score([text[70:]], [20])[0]
    assert torch.allclose(last, expected[70:], rtol=0, atol=atol)
    model.leave([0])


@pytest.mark.prove
def test_other_processors_kernels(tmp_path: Path) -> None:
    """The tests of this file hold with the kernels that ONNX Runtime takes with AVX2 alone."""
    command = [sys.executable, "-m", "pytest", "-q", "-m", "not prove", __file__]
    done = subprocess.run(command, env=avx2.environment(tmp_path), capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-2000:]


def test_a_lone_token_attends_behind_itself_without_a_trace(model: OnnxModel) -> None:
    """Also where that outgrows the room that there was."""
    for length in (254, 255, 256):
        model.start([[3] * (length % 60 + 1)])
        model.leave([0])
    model.start([[5, 6, 7]])
    one = model.score([[8]], [1])[0, 0].clone()
    model.set_lengths([3])
    assert torch.allclose(model.score([[8, 9]], [2])[0, 0], one, atol=1e-5)
    assert model.lengths == [5]


@pytest.mark.parametrize("kind", NETWORKS)
@pytest.mark.parametrize(("dtype", "within"), [("int8", 0.05), ("int4", 0.5)])
def test_rounding_is_near(dtype: str, within: float, kind: str) -> None:
    # all experts: rounding may make a token choose others
    own = network() if kind == "dense" else with_experts(num_experts_per_tok=8)
    assert deviation(own, converted(own, dtype)) < within


def test_experts_in_blocks_are_kept_as_they_are() -> None:
    """Weights of four bits are rounded again in no precision."""
    own: Any = copy.deepcopy(with_experts())
    for weight in own.model.layers.parameters():
        if weight.ndim > 1:
            blocks = rounded(weight.detach().reshape(-1, weight.shape[-1]).numpy(), 4)
            weight.data = torch.tensor(blocks.integers * blocks.scales).reshape(weight.shape)
    logits = list[torch.Tensor]()
    for dtype in ("int4", "int8"):
        made = converted(own, dtype)
        made.start([[]])
        logits.append(made.score([[5, 6, 7, 8]], [4]).clone())
    assert torch.allclose(*logits, atol=1e-3)


@pytest.mark.parametrize("bits", [4, 8])
def test_rounded_weights_are_the_nearest_blocks(bits: int) -> None:
    weight = np.random.default_rng(0).standard_normal((6, 64), dtype=np.float32)
    blocks = rounded(weight, bits)
    again = (blocks.integers * blocks.scales).reshape(6, 64)
    assert np.abs(again - weight).max() < (0.35 if bits == 4 else 0.02)
    kept = found(again.astype(np.float32))
    assert kept is not None and kept.bits <= bits


@pytest.mark.parametrize("offset", [0.0, 0.0058])
@pytest.mark.parametrize(("low", "high"), [(-8, 7), (0, 15), (-16, 15), (-100, 100)])
def test_weights_in_blocks_are_kept_as_they_are(low: int, high: int, offset: float) -> None:
    """Blocks of four bits also in float32: the same numbers as transformers computes with."""
    if offset and high > 15 or low == -16 and not offset:
        pytest.skip("no format has such blocks")
    dice = np.random.default_rng(0)
    own: Any = copy.deepcopy(network())
    bits = set[int]()
    for part in own.model.layers.modules():
        if isinstance(part, torch.nn.Linear):
            out, inner = part.weight.shape
            k = dice.integers(low, high + 1, (out, inner // 32, 32))
            k[..., 0], k[..., 1] = low, high
            scales = np.float16({15: 0.01, 31: 0.005, 200: 0.001}[high - low]) * dice.integers(
                1, 9, (out, inner // 32, 1)
            )
            weight = (k * scales.astype(np.float16).astype(np.float32)) + np.float16(offset)
            weight = weight.astype(np.float32).reshape(out, inner)
            blocks = found(weight)
            assert blocks is not None and (blocks.offsets is None) == (offset == 0)
            bits.add(blocks.bits)
            part.weight.data = torch.tensor(weight)
    assert deviation(own, converted(own)) < TOLERANCE
    rounding = converted(own, "int8")
    assert deviation(own, rounding) < 0.2  # states are rounded, weights are not
    assert {f"int{each}" for each in bits} == {rounding.computed}  # of four bits: as int4 has it


@pytest.mark.parametrize(("count", "size"), [(18, 32), (48, 32), (5, 16)])
@pytest.mark.parametrize("bits", [4, 8])
def test_offsets_become_weights_of_sums(bits: int, count: int, size: int) -> None:
    dice = np.random.default_rng(0)
    low, high = (-8, 8) if bits == 4 else (-16, 16)
    k = dice.integers(low, high, (6, count, size), np.int8)
    k[..., 0] = 9 if bits == 8 else -8  # five bits are kept in eight
    scales = dice.uniform(0.01, 0.02, (6, count, 1)).astype(np.float32)
    offsets = dice.uniform(-0.06, 0.06, (6, count, 1)).astype(np.float32)
    kept = stored(Blocks(k, scales, offsets), bits)
    within = with_sums(kept, offsets[..., 0], bits)
    assert within is not None
    copies, read = within
    centred = read.integers.astype(np.float32) - read.zeros[..., None]
    weights = (centred * read.scales[..., None]).reshape(6, -1)
    of_sums = weights[:, count * size :][:, : copies * count].reshape(6, copies, count).sum(1)
    weights = weights[:, : count * size] + of_sums.repeat(size, 1)
    error = np.abs(weights - (k * scales + offsets).reshape(6, -1)).max()
    assert error < 0.02 * (0.01 if bits == 4 else 0.02)
    offsets[0, 0] = 1000 * scales[0, 0]  # no zero point takes so much
    assert with_sums(kept, offsets[..., 0], bits) is None


def test_some_layers_over_the_targets_rows(model: OnnxModel) -> None:
    drafting = OnnxConversion(None, "float32", network, some=(1,)).companion(model)
    model.start([[5, 6, 7]])
    drafting.start([[5, 6, 7]])
    before = model.score([[8]], [1]).clone()
    model.set_lengths([3])
    drafting.score([[9, 9]], [2])
    assert drafting.lengths == [5] and model.lengths == [3]
    assert torch.allclose(model.score([[8]], [1]), before, atol=1e-6)
    drafting.leave([0])


def test_what_was_read_serves_others_of_the_same_salt(model: OnnxModel) -> None:
    text = [(5 * i) % 59 + 2 for i in range(80)]
    model.remember(True)
    try:
        model.start([text])
        assert model.known([*text[:50], 1]) == 50  # of a row that is still there
        model.leave([0])
        assert model.known(text) == 80 and model.known(text[:20]) == 0  # too short to copy
        model.salted("other")
        assert model.known(text) == 0
        model.salted("")
        model.start([[*text[:60], 1, 1], [*text[:60], 1, 2]])
        assert model.recalled == [60, 61]
        model.leave([0, 1])
    finally:
        model.remember(False)
    assert model.known(text) == 0


def test_kept_texts_give_way_to_newer_ones(
    model: OnnxModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("foretoken.models.onnx.model.CACHED_BYTES", 100 * model.slots.token_bytes)
    model.remember(True)
    for first in (2, 3, 4):
        model.start([[first] * 40])
        model.leave([0])
    assert [model.known([first] * 40) for first in (2, 3, 4)] == [0, 40, 40]
    model.remember(False)


def test_texts_that_hold_nan_are_not_shared() -> None:
    sick: Any = copy.deepcopy(network())
    with torch.no_grad():
        sick.get_input_embeddings().weight[9] = torch.nan
    model = converted(sick)
    model.remember(True)
    model.start([[5] * 40 + [9]])
    assert model.known([5] * 40 + [9]) == 0
    model.leave([0])
    assert model.known([5] * 40) == 0


def test_what_does_not_fit_is_said(model: OnnxModel) -> None:
    assert model.context is not None
    with pytest.raises(InputError, match="shorten it"):
        model.start([[2] * (model.context + 1)])


def test_rows_that_are_there_twice_part(model: OnnxModel) -> None:
    model.start([[5, 6, 7], [8, 9]])
    expected = model.score([[3], [4]], [1, 1]).clone()
    model.set_lengths([3, 2])
    model.permute([0, 0, 1])
    model.score([[11], [12], [13]], [1, 1, 1])
    model.set_lengths([3, 3, 2])
    model.leave([1])
    assert torch.equal(model.score([[3], [4]], [1, 1]), expected)


@pytest.mark.parametrize("length", [252, 253, 254, 255])
def test_a_long_row_beside_a_wide_block(length: int) -> None:
    """The padded block of a pass reaches beyond the last tokens of its longest row."""
    model = converted(tiny.llama(64, 600, head_dim=16, intermediate_size=64))
    long, short = [2 + i % 9 for i in range(length)], [5, 6, 7]
    assert model.slots.unit == 256
    model.start([long, short])
    together = model.score([[3], [4] * 20], [1, 20])[0, 0].clone()
    model.leave([0, 1])
    model.start([long])
    assert torch.allclose(model.score([[3]], [1])[0, 0], together, atol=1e-4)


@pytest.mark.prove
def test_a_ctrl_c_anywhere_leaves_rows_that_can_go() -> None:
    came, nth = True, 0
    model = converted(network())
    model.remember(True)

    def use() -> None:
        model.start([[2] * 40, [3] * 5])
        model.permute([0, 0, 1])
        model.score([[4], [5, 6], [7] * 40], [1, 1, 1])
        model.leave([1])

    while came:
        nth += 1
        came = interrupted(use, nth, WHERE)
        model.leave(list(range(len(model.lengths))))
        assert model.lengths == model.slots.places == model.texts == model.salts == []
        model.start([[5, 6, 7]])
        alone = model.score([[8]], [1])[0, 0].clone()
        model.leave([0])
        expected = network()(torch.tensor([[5, 6, 7, 8]])).logits[0, -1]
        assert torch.allclose(alone, expected, atol=1e-4), f"line {nth}"
    assert nth > 100


@pytest.mark.onnx
def test_a_folder_is_converted_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    network().save_pretrained(tmp_path / "model")
    asked: dict[str, Any] = {"runtime": "onnx", "dtype": "int8"}
    first = foretoken.load(tmp_path / "model", "none", **asked)
    assert first.target.runtime == "onnx" and first.target.computed == "int8"
    (entry,) = store.entries()
    assert entry.dtype == "int8 (onnx)" and {each.name for each in entry.folder.iterdir()} == {
        "decoder.onnx",
        "decoder.weights",
        "embeddings.npy",
        "facts.json",
    }
    monkeypatch.setattr("foretoken.models.onnx.export.export", None)  # it is not made again
    again = foretoken.load(tmp_path / "model", "none", **asked)
    prompt = [[5, 6, 7]]
    limits: dict[str, Any] = {"max_new_tokens": 8, "temperature": 0}
    (one,), (two,) = (spec.generate(prompt, **limits) for spec in (first, again))
    assert list(one.tokens) == list(two.tokens)


@pytest.mark.onnx
def test_what_onnx_runtime_has_not_is_refused_by_name(tmp_path: Path) -> None:
    network().save_pretrained(tmp_path)
    for how, said in (
        ({"dtype": "bfloat16"}, "ONNX Runtime has no bfloat16"),
        ({"kv_dtype": "int8"}, "kv_dtype='int8' runs on OpenVINO only, not on onnx"),
    ):
        options: dict[str, Any] = {"runtime": "onnx", **how}
        with pytest.raises(RefusedError, match=said):
            foretoken.load(tmp_path, "none", **options)


@pytest.mark.onnx
@pytest.mark.parametrize("kind", NETWORKS)
@pytest.mark.parametrize("dtype", ["float32", "int8"])
def test_a_text_is_the_same_to_the_bit(tmp_path: Path, dtype: str, kind: str) -> None:
    """Greedy text is that of plain decoding, whatever is guessed and whoever is beside."""
    NETWORKS[kind]().save_pretrained(tmp_path)
    spec = foretoken.load(tmp_path, "lookup", dtype=dtype, runtime="onnx")
    assert spec.exact == "bitwise"
    prompts = [[5, 6, 7] * 6, [8, 9], [3] * 40]
    how: dict[str, Any] = {"max_new_tokens": 30, "temperature": 0, "ignore_eos": True}
    alone = [spec.generate([prompt], gamma=0, **how)[0].tokens for prompt in prompts]
    for gamma in (1, 3, 7):
        assert [each.tokens for each in spec.generate(prompts, gamma=gamma, **how)] == alone


@pytest.mark.parametrize("wrong", [0, 1])
def test_logits_that_depend_on_the_pass_are_found_out(model: OnnxModel, wrong: int) -> None:
    """A model that computes a lone token otherwise, or every size."""
    own, run = converted(network()), type(model.passes).run

    def off(passes: Any, slots: Any, parts: Any, given: Any = None) -> Any:
        bound = run(passes, slots, parts, given)
        size = len(bound.arrays["flat"])
        bound.arrays["logits"][:] += 1e-6 * (size if wrong else size == 1)
        return bound

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(model.passes), "run", off)
        assert not own.batch_invariant


def test_long_rope_is_refused() -> None:
    long = build("Phi-3")
    config = copy.deepcopy(long.config)
    config.rope_parameters = {
        "rope_type": "longrope",
        "rope_theta": 1e4,
        "short_factor": [1.0] * 4,
        "long_factor": [2.0] * 4,
    }
    config.original_max_position_embeddings, config.max_position_embeddings = 64, 128
    kind: Any = type(long)
    other = kind(config)
    stir(other)
    with pytest.raises(RefusedError, match="same rotary positions"):
        converted(other)


def test_embeddings_take_half_the_bytes_where_that_rounds_none(tmp_path: Path) -> None:
    half: Any = copy.deepcopy(network())
    half.get_input_embeddings().weight.data = half.get_input_embeddings().weight.bfloat16().float()
    export(half, tmp_path)
    assert np.load(tmp_path / "embeddings.npy").dtype == np.uint16
    assert deviation(half, converted(half)) < TOLERANCE
