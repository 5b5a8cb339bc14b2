"""Builds Gemma 4's assistants from their config and tensors. The caller opens the files."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import CONFIG_MAPPING, PreTrainedConfig

from foretoken.errors import InputError, RefusedError, log_error_kind
from foretoken.models.stock.assistant import Assistant
from foretoken.models.stock.pair_files import require_finite_floats
from foretoken.models.stock.sizes import find_last_kv_layers

ASSISTANT_MODEL_TYPES = ("gemma4_assistant", "gemma4_unified_assistant")
TARGET_MODEL_TYPES = ("gemma4_text", "gemma4_unified_text")
EMBEDDING_KEY, HEAD_KEY = "model.embed_tokens.weight", "lm_head.weight"  # one matrix, stored once


def is_assistant(config: dict[str, Any] | PreTrainedConfig) -> bool:
    """Return whether a config is the config of an assistant of Gemma 4."""
    return _to_dict(config).get("model_type") in ASSISTANT_MODEL_TYPES


def _to_dict(config: dict[str, Any] | PreTrainedConfig) -> dict[str, Any]:
    return config.to_dict() if isinstance(config, PreTrainedConfig) else config


def build_assistant(
    config: dict[str, Any] | PreTrainedConfig,
    tensors: dict[str, Tensor],
    target: PreTrainedConfig,
    dtype: torch.dtype,
) -> Assistant:
    """Return an assistant's network for a target with the config `target`. Raises InputError for an
    invalid config or invalid tensors, and RefusedError for an assistant of another target."""
    assistant_config, sizes = _parse_config(_to_dict(config))
    _require_target(sizes, target)
    with torch.device("meta"):
        network = Assistant(
            assistant_config, find_last_kv_layers(target.get_text_config(decoder=True))
        )
    if HEAD_KEY not in tensors and EMBEDDING_KEY in tensors:
        tensors = {**tensors, HEAD_KEY: tensors[EMBEDDING_KEY]}
    network.load_state_dict(_select_tensors(network, tensors, dtype), assign=True)
    if network.masked_embedding is not None:
        _require_permutation(network.masked_embedding.token_ordering)
    return network.eval().requires_grad_(False)


def _parse_config(fields: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """Return transformers' config of an assistant, and the sizes that its target must have."""
    if not is_assistant(fields):
        raise InputError(
            f"model_type is {fields.get('model_type')!r:.40}; the model_type of an assistant is "
            f"{' or '.join(ASSISTANT_MODEL_TYPES)}"
        )
    try:
        config: Any = CONFIG_MAPPING[fields["model_type"]].from_dict(fields)
        text: Any = config.get_text_config()
        sizes = _collect_sizes(text, {kind: j for j, kind in enumerate(text.layer_types)})
        sizes["states"] = config.backbone_hidden_size
    except Exception as error:  # the file may contain anything
        raise InputError(
            f"the assistant's config is invalid ({log_error_kind(error)}); download it again"
        ) from error
    count, top_k = config.num_centroids, config.centroid_intermediate_top_k
    if config.use_ordered_embeddings and not (0 < top_k <= count and text.vocab_size % count == 0):
        raise InputError(
            f"the assistant's config has {count} centroids for {text.vocab_size} tokens and takes "
            f"the nearest {top_k}; give a num_centroids that divides the number of tokens, and a "
            "centroid_intermediate_top_k from 1 to num_centroids"
        )
    return config, sizes


def _collect_sizes(text: Any, layers: dict[str, int]) -> dict[str, Any]:
    """Return the sizes in which an assistant and its target must agree. layers: for each layer
    type, the index of the layer whose heads are compared."""
    sizes: dict[str, Any] = {"tokens": text.vocab_size}
    for kind, j in layers.items():
        layer = text.per_layer_config[j]
        sizes[f"heads and width of {kind}"] = layer.num_key_value_heads, layer.head_dim
    return sizes


def _require_target(sizes: dict[str, Any], target: PreTrainedConfig) -> None:
    """Raise RefusedError if the target does not have the `sizes` that the assistant needs."""
    text: Any = target.get_text_config(decoder=True)
    if text.model_type not in TARGET_MODEL_TYPES:
        raise RefusedError(
            f"the draft is an assistant for Gemma 4, but the target is {text.model_type}; give "
            "another draft"
        )
    target_sizes = {**_collect_sizes(text, find_last_kv_layers(text)), "states": text.hidden_size}
    wrong = [name for name, size in sizes.items() if size != target_sizes.get(name)]
    if wrong:
        raise RefusedError(
            f"the assistant is for a target with {wrong[0]} {sizes[wrong[0]]}, but this target has "
            f"{target_sizes.get(wrong[0], 'none')}; give the assistant of this target"
        )


def _select_tensors(
    network: Assistant, tensors: dict[str, Tensor], dtype: torch.dtype
) -> dict[str, Tensor]:
    """Return the tensors of the network, in `dtype`. Other tensors of the files are ignored, as
    transformers does."""
    selected: dict[str, Tensor] = {}
    for name, own in network.state_dict().items():
        found = tensors.get(name)
        if found is None:
            raise InputError(f"the assistant's files lack {name}; download it again")
        if found.shape != own.shape or found.is_floating_point() != own.is_floating_point():
            raise InputError(
                f"the assistant's {name} is {found.dtype} {tuple(found.shape)}, but its config "
                f"needs {tuple(own.shape)}; give files that are not quantized, or download it again"
            )
        if found.is_floating_point():
            require_finite_floats("the assistant", name, found)
        selected[name] = found.to(dtype) if found.is_floating_point() else found.long()
    return selected


def _require_permutation(order: Tensor) -> None:
    if not torch.equal(order.sort().values, torch.arange(len(order), device=order.device)):
        raise InputError(
            "the assistant's masked_embedding.token_ordering is not a permutation of its tokens; "
            "download it again"
        )
