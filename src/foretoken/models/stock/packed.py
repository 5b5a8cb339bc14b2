"""Linear layers of a torch model on a CPU, packed once for products with few rows.

oneDNN lays the weights out so that a pass over 8 tokens costs little more than one over 1. The
packed weight replaces the original, so only a model that we loaded ourselves may be packed. Does
not know caches, tokens or who owns a model.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from foretoken.errors import log_error_kind

if TYPE_CHECKING:  # which takes seconds to import
    from transformers import PreTrainedModel

PACKING_ROWS = 8  # a verified block; the layout serves 1 to 512 rows alike
MIN_PACKED_ELEMENTS = (
    2**19
)  # elements; smaller weights stay in a core's cache, and oneDNN's call costs 15 us
MAX_TIED_HEAD_FRACTION = (
    0.1  # of the model's bytes, for a packed head beside the embeddings that it is tied to
)
MAX_LOGIT_DRIFT = {torch.float32: 1e-4, torch.bfloat16: 0.1}  # of the spread of a trial's logits

LinearLayer = nn.Linear | Conv1D


@dataclass(frozen=True, slots=True)
class PackingResult:
    """The outcome for a model's linear layers."""

    layers: int  # how many are packed
    reason: str | None  # why none is packed


@torch.no_grad()
def pack(model: PreTrainedModel) -> PackingResult:
    """Pack the linear layers of `model` in place, one after the other.

    Only the weight at hand is in memory twice, and a head tied to the embeddings if it is at most
    `MAX_TIED_HEAD_FRACTION` of the model; a larger tied head is not packed. A trial token must
    have the same logits before and after; otherwise, or if the family's code reads weights by
    itself, all layers are unpacked. For a model that is not trained, before it is run: runners
    keep its layers.
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
            reason = f"packed, its logits differ by {drift:.1e} of their spread"
    except Exception as error:  # unknown code on an unknown processor raises anything
        reason = f"it does not run packed: its code raised {log_error_kind(error)}"
    if reason is None:
        return PackingResult(
            len(groups), None if groups else "no layer is large enough to gain by it"
        )
    for names in groups:
        layer: Any = model.get_submodule(names[0])
        replace_layer(model, names, layer.unpack())
    model.tie_weights()
    return PackingResult(0, reason)


class PackedLinear(nn.Module):
    """The layer, without gradients. Only dtype and shape of `weight` can be read: T5 reads the
    dtype."""

    weight: Tensor  # [out, in], in oneDNN's layout

    def __init__(self, layer: Any) -> None:
        super().__init__()
        self.transposed = isinstance(layer, Conv1D)  # holds its weight as [in, out]
        weight = layer.weight.t() if self.transposed else layer.weight
        self.out_features, self.in_features = weight.shape
        packed = torch.ops.mkldnn._reorder_linear_weight(weight.detach(), PACKING_ROWS)
        self.register_buffer("weight", packed, persistent=False)
        self.bias = layer.bias

    def forward(self, x: Tensor) -> Tensor:
        return torch.ops.mkldnn._linear_pointwise(x, self.weight, self.bias, "none", [], "")

    def unpack(self) -> LinearLayer:
        """The original layer, to the bit."""
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
    """Why this model cannot be packed here, or None."""
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
    """Layers to pack, each as all its names: a reference would keep its weight in memory."""
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
    """A stock linear layer, large enough, with ordinary weights here and nothing attached."""
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
    """Logits behind one token."""
    one = torch.ones(1, 1, dtype=torch.long)
    text = {"decoder_input_ids": one} if model.config.is_encoder_decoder else {}
    outputs = model(input_ids=one, attention_mask=one, use_cache=False, return_dict=True, **text)
    return outputs.logits.float()
