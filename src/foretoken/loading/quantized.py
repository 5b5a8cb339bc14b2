"""Checkpoints whose weights are stored in few bits (a `quantization_config` in their config): read
as plain weights, each the value that is stored, where transformers can do so.

Does not know how they are rounded afterwards, nor GGUF files, whose config says nothing of it.
"""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any

from foretoken.errors import RefusedError

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel


def plain(config: PreTrainedConfig, name: str) -> dict[str, Any]:
    """Return options of `from_pretrained` that make plain weights; {} where they are so. Raises
    RefusedError for a method that transformers only runs by kernels of its own."""
    stored = getattr(config, "quantization_config", None)
    if stored is None:
        return {}
    from transformers.quantizers.auto import AUTO_QUANTIZATION_CONFIG_MAPPING as KINDS  # late

    settings: dict[str, Any] = stored if isinstance(stored, dict) else stored.to_dict()
    method = str(settings.get("quant_method"))
    kind: Any = KINDS.get(method)
    if kind is None or "dequantize" not in inspect.signature(kind).parameters:
        raise RefusedError(
            f"{name} is quantized by {method}, from which transformers makes no plain weights; "
            "give the model that it was made from, or a GGUF file of it"
        )
    return {"quantization_config": kind(dequantize=True)}


def forget(network: PreTrainedModel) -> None:
    """Let a network with plain weights be used as such: transformers takes it for quantized."""
    quantizer = getattr(network, "hf_quantizer", None)
    if quantizer is not None:
        quantizer.remove_quantization_config(network)
