"""Packed linear layers."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

import pairs
import tiny
from foretoken.models.stock import packed
from foretoken.models.stock.attention import make_twin
from foretoken.models.stock.packed import PackedLinear, PackingResult, compute_trial_logits, pack
from foretoken.models.stock.sizes import sketch_weights
from foretoken.models.stock.small_copy import randomize_weights
from tiny_families import FAMILIES, build

pytestmark = [pytest.mark.cpu_only, pytest.mark.daily]
HERE = build("Llama")  # what this machine can do
needs_onednn = pytest.mark.skipif(
    packed.find_packing_objection(HERE) is not None, reason="no oneDNN here"
)
needs_bfloat16 = pytest.mark.skipif(
    packed.find_packing_objection(HERE.bfloat16()) is not None, reason="no bfloat16 in oneDNN here"
)


@pytest.fixture
def all_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packed, "MIN_PACKED_ELEMENTS", 1)


def layers(model: nn.Module, kind: type[nn.Module]) -> int:
    return sum(type(layer) is kind for layer in model.modules())


def relative(result: Tensor, expected: Tensor) -> float:
    return float((result - expected).abs().max() / expected.abs().max())


@needs_onednn
@pytest.mark.parametrize(
    "layer", [nn.Linear(70, 130), nn.Linear(70, 130, bias=False), Conv1D(130, 70)]
)
@pytest.mark.parametrize("rows", [1, 2, 8, 13, 600])
def test_products_are_those_of_the_layer(rows: int, layer: Any) -> None:
    torch.manual_seed(0)
    x = torch.randn(2, rows, 70)
    with torch.no_grad():
        if layer.bias is not None:
            nn.init.normal_(layer.bias)
        packed_layer = PackedLinear(layer)
        assert relative(packed_layer(x), layer(x)) < 1e-6
        assert relative(packed_layer(x[:, ::3]), layer(x[:, ::3].contiguous())) < 1e-6  # strided
        assert packed_layer(x[:, :0]).shape == (2, 0, 130)
        assert packed_layer.weight.dtype == layer.weight.dtype
        assert torch.equal(packed_layer.unpack().weight, layer.weight)


@needs_bfloat16
def test_bfloat16() -> None:
    """Either product is one rounding away from the other."""
    torch.manual_seed(0)
    layer, x = nn.Linear(70, 130).bfloat16(), torch.randn(1, 8, 70).bfloat16()
    with torch.no_grad():
        assert relative(PackedLinear(layer)(x), layer(x)) < 2**-7


@pytest.mark.daily("Llama", "GPT-2", "Mixtral", "T5")
@needs_onednn
@pytest.mark.parametrize("name", FAMILIES)
def test_every_family_says_the_same_when_packed(name: str, all_sizes: None) -> None:
    stock = pairs.target(name)
    model = pairs.relative(stock, noise=0).float()
    before = compute_trial_logits(model)
    expected = [pairs.stock(model, prompt, 12) for prompt in pairs.PROMPTS]
    count = layers(model, nn.Linear) + layers(model, Conv1D)
    assert pack(model) == PackingResult(count, None)
    assert layers(model, PackedLinear) == count
    assert relative(compute_trial_logits(model), before) < 1e-5
    pairs._stock.cache_clear()
    assert [pairs.stock(model, prompt, 12) for prompt in pairs.PROMPTS] == expected
    pair = pairs.speculator(model, pairs.relative(stock).float())
    ours = pair.generate(pairs.PROMPTS, max_new_tokens=12, gamma=3)
    assert [text.tokens for text in ours] == expected


def tied() -> PreTrainedModel:
    model = tiny.llama(tie_word_embeddings=True)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    return model


@needs_onednn
@pytest.mark.parametrize(("spare", "kind"), [(0.0, nn.Linear), (1.0, PackedLinear)])
def test_a_tied_head_is_copied_only_where_it_is_small(
    spare: float, kind: type, all_sizes: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(packed, "MAX_TIED_HEAD_FRACTION", spare)
    model = tied()
    embeddings, expected = model.model.embed_tokens.weight, compute_trial_logits(model)
    assert pack(model).reason is None
    assert type(model.lm_head) is kind
    assert model.model.embed_tokens.weight is embeddings
    assert relative(compute_trial_logits(model), expected) < 1e-5


@needs_onednn
def test_a_layer_with_two_names_is_packed_once(all_sizes: None) -> None:
    model = tiny.llama()
    model.model.layers[1].mlp = model.model.layers[0].mlp
    assert pack(model).layers == 2 * 4 + 3 + 1
    assert model.model.layers[1].mlp.up_proj is model.model.layers[0].mlp.up_proj


@needs_onednn
def test_a_twin_runs_the_very_packed_weights(all_sizes: None) -> None:
    """Copies would take the time and memory of all weights with every run."""
    model = build("Llama").eval()
    assert pack(model).layers
    weights = [part.weight for part in model.modules() if isinstance(part, PackedLinear)]
    twins = [part.weight for part in make_twin(model).modules() if isinstance(part, PackedLinear)]
    assert all(a is b for a, b in zip(weights, twins, strict=True))


def test_what_is_not_a_stock_layer_stays(all_sizes: None) -> None:
    class Own(nn.Linear):
        pass

    model = tiny.llama()
    attention, mlp = model.model.layers[0].self_attn, model.model.layers[0].mlp
    attention.q_proj.__class__ = Own
    attention.k_proj.register_forward_hook(lambda *_: None)
    mlp.up_proj.to(torch.bfloat16)
    mlp.up_proj.register_forward_pre_hook(lambda _, args: (args[0].bfloat16(),))
    mlp.up_proj.register_forward_hook(lambda _m, _i, out: out.float())
    assert pack(model) == PackingResult(2 * 7 + 1 - 3, None)
    assert type(attention.q_proj) is Own
    assert type(attention.k_proj) is type(mlp.up_proj) is nn.Linear


class Reader(nn.Module):
    """Code that goes past the layer to its weight."""

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.layer.weight, self.layer.bias)


def doubled(layer: PackedLinear, x: Tensor) -> Tensor:
    return 2 * torch.ops.mkldnn._linear_pointwise(x, layer.weight, layer.bias, "none", [], "")


@needs_onednn
@pytest.mark.parametrize(("fault", "reason"), [("reads", "does not run"), ("wrong", "differ")])
def test_layers_are_put_back_where_a_trial_fails(
    fault: str, reason: str, all_sizes: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(packed, "MAX_TIED_HEAD_FRACTION", 1.0)
    model = tied()
    if fault == "reads":
        model.model.layers[1].mlp.down_proj = Reader(model.model.layers[1].mlp.down_proj)
    else:
        monkeypatch.setattr(PackedLinear, "forward", doubled)
    expected = compute_trial_logits(model)
    packing = pack(model)
    assert packing.layers == 0
    assert reason in (packing.reason or "")
    assert not layers(model, PackedLinear)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert torch.equal(compute_trial_logits(model), expected)


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda: tiny.llama().double(), "not float64"),
        (lambda: tiny.llama().to("meta"), "on meta"),
        (lambda: tiny.llama(), "large enough"),
    ],
)
def test_a_model_that_cannot_be_packed_stays(make: Any, reason: str) -> None:
    model = make()
    packing = pack(model)
    assert packing.layers == 0
    assert reason in (packing.reason or "") or packed.find_packing_objection(HERE.float())
    assert not layers(model, PackedLinear)


def test_without_onednn_nothing_happens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: False)
    assert pack(tiny.llama()) == PackingResult(0, "this build of torch has no oneDNN")


def test_stirred_t5_keeps_its_mixed_precision(all_sizes: None) -> None:
    """T5 looks at the precision of `wo` before it calls it."""
    model = build("T5").bfloat16()
    randomize_weights(model)
    for block in (*model.encoder.block, *model.decoder.block):
        block.layer[-1].DenseReluDense.wo.float()
    packing = pack(model)
    assert packing.layers or packing.reason
    assert compute_trial_logits(model).isfinite().all()


MEMORY = """
import sys, torch
from pathlib import Path
sys.path[:0] = [{tests!r}]
import tiny
from foretoken.models.stock import packed
def held(name):
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith(name))
torch.set_num_threads(1)
shape = dict(hidden_size=512, intermediate_size=2048, num_hidden_layers=6)
model = tiny.llama(V=4096, **shape)
packed.compute_trial_logits(model)
before = held("VmRSS")
Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew
assert packed.pack(model).reason is None
print(before, held("VmHWM"), held("VmRSS"))
"""


@needs_onednn
@pytest.mark.prove  # a process takes seconds to begin
@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="needs Linux")
def test_packing_holds_no_second_copy() -> None:
    """120 MB of weights, layers of 4 MB, a head of 8: the peak is within some of them."""
    code = MEMORY.format(tests=str(Path(__file__).parents[3]))
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    if "clear_refs" in run.stderr and "ermission" in run.stderr:
        pytest.skip("the peak cannot be reset here")
    assert run.returncode == 0, run.stderr
    before, peak, after = map(float, run.stdout.split())
    assert peak < before + 40
    assert after < before + 25


def test_the_same_target_with_packed_layers():
    network = tiny.llama(20_000)
    before = sketch_weights(network)
    assert pack(network).layers and isinstance(network.lm_head, PackedLinear)
    assert torch.equal(before, sketch_weights(network))
