"""Packs the linear layers of a torch model on a CPU once, for matrix products with few rows.

In oneDNN's layout, a forward pass over 8 tokens takes little longer than a pass over one token. The
packed weight replaces the original weight, so only a model that foretoken has loaded itself may be
packed.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from foretoken.errors import log_error_kind

if TYPE_CHECKING:  # transformers takes seconds to import
    from transformers import PreTrainedModel

PACKING_ROWS = 8  # rows to pack for: tokens of a block; the layout is the same for 1 to 512 rows
MIN_PACKED_ELEMENTS = 2**19  # smaller weights fit a core's cache, and a oneDNN call costs 15 us
# An output layer that is tied to the embeddings is packed if it is at most this fraction of the
# model's bytes
MAX_TIED_HEAD_FRACTION = 0.1
MAX_LOGIT_DRIFT = {torch.float32: 1e-4, torch.bfloat16: 0.1}  # relative to the logits' spread

LinearLayer = nn.Linear | Conv1D


@dataclass(frozen=True, slots=True)
class PackingResult:
    """The number of linear layers that were packed; if it is 0, `reason` states why."""

    layers: int
    reason: str | None


@torch.no_grad()
def pack(model: PreTrainedModel) -> PackingResult:
    """Pack the linear layers of `model` in place, one after the other.

    While a layer is packed, its weight is in memory twice. An output layer that is tied to the
    embeddings stays in memory twice, so it is packed only if it is at most `MAX_TIED_HEAD_FRACTION`
    of the model. Packing must not change the logits of a trial token by more than rounding; if it
    does, or if the family's code fails with packed weights, all layers are unpacked again. Pack
    before the model gets a backend, whose twin would retain the original layers. A packed model
    cannot be trained.
    """
    reason = find_packing_objection(model)
    if reason is not None:
        return PackingResult(0, reason)
    groups: list[list[str]] = []
    try:
        before = compute_trial_logits(model)
        for names in find_packable_layers(model):
            replace_layer(model, names, PackedLinear(model.get_submodule(names[0])))
            groups.append(names)
        drift = float(
            (compute_trial_logits(model) - before).abs().max() / (before.max() - before.min())
        )
        if not drift <= MAX_LOGIT_DRIFT[model.dtype]:
            reason = f"with packed weights, its logits differ by {drift:.1e} of their spread"
    except Exception as error:  # a family's code may raise any exception
        reason = f"it does not run with packed weights: its code raised {log_error_kind(error)}"
    if reason is None:
        return PackingResult(
            len(groups), None if groups else "no layer is large enough to gain from packing"
        )
    for names in groups:
        layer: Any = model.get_submodule(names[0])
        replace_layer(model, names, layer.unpack())
    model.tie_weights()
    return PackingResult(0, reason)


class PackedLinear(nn.Module):
    """A linear layer with a packed weight, without gradients. Other code may use only the dtype and
    shape of `weight` (T5 uses the dtype)."""

    weight: Tensor  # [out, in], in oneDNN's layout

    def __init__(self, layer: Any) -> None:
        super().__init__()
        self.transposed = isinstance(layer, Conv1D)  # its weight is [in, out]
        weight = layer.weight.t() if self.transposed else layer.weight
        self.out_features, self.in_features = weight.shape
        packed = torch.ops.mkldnn._reorder_linear_weight(weight.detach(), PACKING_ROWS)
        self.register_buffer("weight", packed, persistent=False)
        self.bias = layer.bias

    def forward(self, x: Tensor) -> Tensor:
        return torch.ops.mkldnn._linear_pointwise(x, self.weight, self.bias, "none", [], "")

    def unpack(self) -> LinearLayer:
        """Return the original layer, with bit-identical weights."""
        weight = self.weight.to_dense()
        with torch.device("meta"):
            layer = (
                Conv1D(self.out_features, self.in_features)
                if self.transposed
                else nn.Linear(self.in_features, self.out_features, bias=False)
            )
        layer.weight = nn.Parameter(weight.t().contiguous() if self.transposed else weight, False)
        layer.bias = self.bias
        return layer


def find_packing_objection(model: PreTrainedModel) -> str | None:
    """Return why this model cannot be packed on this machine; None if it can."""
    if model.device.type != "cpu":
        return f"it is on {model.device}"
    if model.dtype not in MAX_LOGIT_DRIFT:
        return f"oneDNN packs float32 and bfloat16, not {str(model.dtype).removeprefix('torch.')}"
    ops = torch.ops.mkldnn
    needed = ("_reorder_linear_weight", "_linear_pointwise", "_is_mkldnn_bf16_supported")
    if not torch.backends.mkldnn.is_available() or not all(hasattr(ops, name) for name in needed):
        return "this build of torch has no oneDNN"
    if model.dtype is torch.bfloat16 and not ops._is_mkldnn_bf16_supported():
        return "oneDNN has no bfloat16 on this processor"
    return None


def find_packable_layers(model: PreTrainedModel) -> list[list[str]]:
    """Return, for each layer to pack, all of the layer's names in the model. Names are returned
    because references to the layers would retain the original weights in memory."""
    uses = Counter(id(p) for m in model.modules() for p in m.parameters(recurse=False))
    max_head_bytes = MAX_TIED_HEAD_FRACTION * sum(p.nbytes for p in model.parameters())
    head = model.get_output_embeddings()
    names: dict[int, list[str]] = {}
    for name, layer in model.named_modules(remove_duplicate=False):
        if is_packable(layer):
            weight: Any = layer.weight
            if uses[id(weight)] == 1 or (layer is head and weight.nbytes <= max_head_bytes):
                names.setdefault(id(layer), []).append(name)
    return list(names.values())


def is_packable(layer: nn.Module) -> bool:
    """Return whether this is an unmodified linear layer that is large enough, with ordinary CPU
    weights and without hooks."""
    if type(layer) not in (nn.Linear, Conv1D) or layer._forward_hooks or layer._forward_pre_hooks:
        return False
    weight: Any = layer.weight
    bias: Any = layer.bias
    ordinary = type(weight) is nn.Parameter and weight.device.type == "cpu"
    same_dtype = bias is None or getattr(bias, "dtype", None) == weight.dtype
    return (
        ordinary
        and same_dtype
        and weight.dtype in MAX_LOGIT_DRIFT
        and weight.numel() >= MIN_PACKED_ELEMENTS
    )


def replace_layer(model: PreTrainedModel, names: list[str], layer: nn.Module) -> None:
    for name in names:
        parent, _, attribute = name.rpartition(".")
        setattr(model.get_submodule(parent), attribute, layer)


@torch.no_grad()
def compute_trial_logits(model: PreTrainedModel) -> Tensor:
    """Return the logits after a single trial token."""
    one = torch.ones(1, 1, dtype=torch.long)
    ids = {"decoder_input_ids": one} if model.config.is_encoder_decoder else {}
    outputs = model(input_ids=one, attention_mask=one, use_cache=False, return_dict=True, **ids)
    return outputs.logits.float()
