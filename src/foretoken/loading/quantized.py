"""Checkpoints whose weights are stored in few bits (a `quantization_config` in their config): read
as plain weights, each the value that is stored, where transformers can do so.

Does not know how they are rounded afterwards, nor GGUF files, whose config says nothing of it.
"""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any

import torch
import transformers

from foretoken.errors import InputError, RefusedError, one_line

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel


PLAIN = {torch.float64, torch.float32, torch.bfloat16, torch.float16}


def plain(config: PreTrainedConfig, name: str) -> dict[str, Any]:
    """Return options of `from_pretrained` that make plain weights; {} where they are so. Raises
    RefusedError for a method that transformers only runs by kernels of its own."""
    stored = getattr(config, "quantization_config", None)
    if stored is None:
        return {}
    settings: dict[str, Any] = stored if isinstance(stored, dict) else stored.to_dict()
    method = str(settings.get("quant_method") or "a method that it does not name")
    library: Any = transformers  # whose parts are imported when they are named
    kind = library.quantizers.auto.AUTO_QUANTIZATION_CONFIG_MAPPING.get(method)
    if kind is None or "dequantize" not in inspect.signature(kind).parameters:
        raise RefusedError(
            f"{name} is quantized by {method}, from which transformers makes no plain weights; "
            "give the model that it was made from, or a GGUF file of it"
        )
    try:
        return {"quantization_config": kind(dequantize=True)}
    except ImportError as error:  # it says what to install
        raise InputError(f"{name} is quantized by {method}: {one_line(error)}") from None


def forget(network: PreTrainedModel, dtype: torch.dtype, name: str) -> None:
    """Let a network with plain weights be used as such, in this dtype: transformers takes it for
    quantized, and leaves what it made plain in another one. Raises InputError where weights are
    not plain, as where their scales are missing."""
    for key, weight in network.named_parameters():
        if weight.dtype not in PLAIN:
            kind = str(weight.dtype).removeprefix("torch.")
            raise InputError(
                f"{name} holds {key} in {kind} without what its values follow from; "
                "give a complete checkpoint"
            )
    if (quantizer := getattr(network, "hf_quantizer", None)) is not None:
        quantizer.remove_quantization_config(network)
    network.to(dtype)  # pyright: ignore[reportArgumentType]
