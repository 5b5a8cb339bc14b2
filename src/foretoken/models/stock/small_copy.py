"""Small random copies of a model, for the self-check: the same class and structure with few layers,
small sizes and windows of `COPY_WINDOW` tokens. The config is shrunk as far as the family's own
code allows."""

from __future__ import annotations

import copy
import dataclasses
import math
import re
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassFieldValidationError
from transformers import PreTrainedConfig, PreTrainedModel

from foretoken.models.stock.media import get_language_model, make_encoder_input
from foretoken.models.stock.sizes import CONTEXT_LENGTH_FIELDS, get_context_limit

COPY_VOCAB_SIZE = 64
COPY_WINDOW = 8
COPY_HEAD_DIM, MAX_COPY_HEADS = 16, 2  # of a copy: head dim, and maximum number of key heads
OWN_HEAD_DIM = -1  # stands for the head dim of the original config
COPY_STATE_SIZE = 128  # hidden size of a model without attention
# Config fields that are lengths in tokens: windows, chunks, the floor of Llama 4's position scale,
# expert capacity
THRESHOLD_FIELD = re.compile(
    r"(window|chunk)(_size|_len)?$|floor|^local_attention$|^expert_capacity$"
)
# Config field with the length beyond which rotary factors change
ROPE_SWITCH_FIELD = "original_max_position_embeddings"
COPY_CONTEXT = 128  # number of positions that the check needs
# Config fields of state space layers, one tuple for each naming: heads, head dim, expansion of the
# hidden size, groups, state size
STATE_SPACE_FIELDS = (
    ("mamba_n_heads", "mamba_d_head", "mamba_expand", "mamba_n_groups", "mamba_d_state"),
    ("mamba_num_heads", "mamba_head_dim", "expand", "n_groups", "ssm_state_size"),
    ("n_mamba_heads", "mamba_headdim", "mamba_expand", "mamba_ngroups", "mamba_d_state"),
    ("num_heads", "head_dim", "expand", "n_groups", "state_size"),
)
# Config fields by their maximum in a copy: heads and head dims of linear attention, experts
MAX_COPY_SIZES: dict[int, tuple[str, ...]] = {
    MAX_COPY_HEADS: ("linear_num_heads", "linear_num_key_heads"),
    2 * MAX_COPY_HEADS: ("linear_num_value_heads",),
    COPY_HEAD_DIM: ("linear_head_dim", "linear_key_head_dim", "linear_value_head_dim"),
    16: ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"),
}
MAX_COPY_PARAMETERS = 1_000_000_000


def make_small_copy(
    model_class: type[PreTrainedModel],
    config: PreTrainedConfig,
    switch: int = COPY_CONTEXT,
    *,
    try_forward: bool = True,
) -> PreTrainedModel:
    """Return a random model of that class and structure, in float32 on the CPU. Several ways of
    shrinking the config are tried, from the smallest result to the original config; the copy has
    the first config that the model's code accepts.

    switch: See `shrink_config`.
    try_forward: True to accept a copy only after it has run once.

    If no attempt succeeds, raises the error of the family's code in the first attempt.
    """
    problem: Exception | None = None
    for attempt in (
        lambda: shrink_config(config, COPY_HEAD_DIM, switch),
        lambda: shrink_config(config, COPY_HEAD_DIM, switch, keep_ties=True),
        lambda: rebuild_config(
            shrink_config(config, COPY_HEAD_DIM, switch, keep_ties=True), config
        ),
        lambda: rebuild_config(
            shrink_config(config, COPY_HEAD_DIM, switch, keep_ties=True, layers_per_kind=2), config
        ),
        lambda: shrink_config(config, OWN_HEAD_DIM, switch),
        lambda: shrink_config(config, None, switch),
        lambda: rebuild_config(shrink_config(config, None, switch), config),
        lambda: copy.deepcopy(config),
    ):
        try:
            small_config = attempt()
            _require_small(model_class, small_config)
            small: Any = model_class(small_config).float().eval()
            randomize_weights(small)
            ids = torch.ones(1, 2, dtype=torch.long)
            if not try_forward:
                return small
            with torch.inference_mode():
                sources = {"decoder_input_ids": ids} | make_encoder_input(small, ids)
                get_language_model(small)(
                    **(sources if small_config.is_encoder_decoder else {"input_ids": ids})
                )
            return small
        except Exception as error:  # the shrunk sizes may be inconsistent
            problem = problem or error
    assert problem is not None
    raise problem


def _require_small(model_class: type[PreTrainedModel], config: PreTrainedConfig) -> None:
    """Raise MemoryError if a model of this config has too many parameters, before the model takes
    all memory."""
    with torch.device("meta"):
        size = sum(weight.numel() for weight in model_class(config).parameters())
    if size > MAX_COPY_PARAMETERS:
        raise MemoryError(f"the copy has {size} parameters")


def shrink_config(
    config: PreTrainedConfig,
    head_dim: int | None,
    switch: int = COPY_CONTEXT,
    *,
    keep_ties: bool = False,
    layers_per_kind: int = 1,
) -> PreTrainedConfig:
    """Return the config of a small copy.

    Args:
        config: The model's config.
        head_dim: The copy's head dim; `OWN_HEAD_DIM`: the original's; None: no size changes.
        switch: The length beyond which the long rotary factors apply.
        keep_ties: True if sizes that equal the hidden size or the head dim must stay equal to it.
        layers_per_kind: Number of layers of each kind; the copy has at least two layers.
    """
    config = copy.deepcopy(config)
    config._attn_implementation = None
    for part in iterate_configs(config):
        shrink_in_place(part, head_dim, switch, keep_ties, layers_per_kind)
    return config


def iterate_configs(config: PreTrainedConfig) -> Iterator[PreTrainedConfig]:
    """Yield the config and its sub-configs, recursively."""
    yield config
    for name in config.sub_configs:
        part = getattr(config, name, None)
        if isinstance(part, PreTrainedConfig):
            yield from iterate_configs(part)


def rebuild_config(config: PreTrainedConfig, original: PreTrainedConfig) -> PreTrainedConfig:
    """Return a config that its class makes from the settings of `config`. Optional integers that
    have the same value as in `original` are left out, so that the class derives them again from the
    shrunk settings."""
    settings = {
        each.name: getattr(config, each.name)
        for each in dataclasses.fields(config)
        if each.name in vars(config) and not _is_derived(each, config, original)
    }
    for name in config.sub_configs:
        if isinstance(settings.get(name), PreTrainedConfig):
            settings[name] = rebuild_config(settings[name], getattr(original, name))
    return type(config)(**settings)


def _is_derived(
    field: dataclasses.Field[Any], config: PreTrainedConfig, before: PreTrainedConfig
) -> bool:
    value = getattr(config, field.name)
    return field.default is None and type(value) is int and value == get_setting(before, field.name)


def get_setting(part: PreTrainedConfig, name: str) -> Any:
    """Return a setting; None if it is missing, or if it differs between layers."""
    try:
        return getattr(part, name, None)
    except Exception:  # transformers raises for settings that differ between layers
        return None


def shrink_in_place(
    part: PreTrainedConfig, head_dim: int | None, switch: int, keep_ties: bool, layers_per_kind: int
) -> None:
    settings: dict[str, Any] = {
        "vocab_size": COPY_VOCAB_SIZE,
        "decoder_vocab_size": COPY_VOCAB_SIZE,
    }
    settings["vocab_size_per_layer_input"] = COPY_VOCAB_SIZE
    settings |= dict.fromkeys(find_thresholds(part), COPY_WINDOW)
    settings[ROPE_SWITCH_FIELD] = switch
    settings |= {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 1}
    settings |= {"decoder_start_token_id": 0, "forced_eos_token_id": 1}
    limit = max(COPY_CONTEXT, get_context_limit(part) or 0)
    settings |= dict.fromkeys(CONTEXT_LENGTH_FIELDS, limit)
    if get_setting(part, "num_hidden_layers") is not None:
        shorten_layers(part, layers_per_kind)
    if head_dim is not None and get_setting(part, "num_attention_heads"):
        settings |= compute_widths(part, head_dim)
    elif head_dim is not None and get_setting(part, "hidden_size"):  # a model without attention
        settings |= {
            "hidden_size": COPY_STATE_SIZE,
            "num_heads": MAX_COPY_HEADS,
        } | _compute_recurrent_sizes(part, COPY_STATE_SIZE)
    if keep_ties:
        settings |= compute_tied_sizes(part, settings)
    layers_own = getattr(vars(part).get("_heterogeneity_spec"), "per_layer_attributes", ())
    for name, value in settings.items():
        before = get_setting(part, name)
        if name in layers_own or before is None:
            continue
        # a property that is derived from other settings
        with suppress(AttributeError, NotImplementedError):
            try:
                setattr(part, name, value)
            except StrictDataclassFieldValidationError:  # the setting is a list
                setattr(part, name, [value] * len(before))
    ropes: dict[str, Any] = getattr(part, "rope_parameters", None) or {}
    for rope in (ropes, *(value for value in ropes.values() if isinstance(value, dict))):
        shrink_rope(rope, head_dim == COPY_HEAD_DIM, switch)


def find_thresholds(part: PreTrainedConfig) -> list[str]:
    """Return the config fields that set a length or distance, within the model's context, beyond
    which the model's attention or scaling changes. In a copy these lengths are small, so that the
    check's sequences exceed them."""
    limit = getattr(part, "max_position_embeddings", None) or math.inf
    numbers = {
        k: v for k, v in vars(part).items() if isinstance(v, int) and COPY_WINDOW < v < limit
    }
    return [name for name in numbers if THRESHOLD_FIELD.search(name)]


def shrink_rope(rope: dict[str, Any], narrow: bool, switch: int) -> None:
    """Shrink rope parameters in place, including lists that have one factor for each pair of a
    head's dimensions."""
    if rope.get(ROPE_SWITCH_FIELD) is not None:
        # For a dynamic rope this length is the context limit, so it must exceed the check's
        # sequences
        kind = rope.get("rope_type")
        rope[ROPE_SWITCH_FIELD] = {"longrope": switch, "dynamic": COPY_CONTEXT}.get(
            str(kind), 2 * COPY_WINDOW
        )
    pairs = int(COPY_HEAD_DIM * rope.get("partial_rotary_factor", 1.0)) // 2
    for name in ("short_factor", "long_factor"):
        if narrow and isinstance(rope.get(name), list):
            factors = rope[name]
            rope[name] = [factors[i * len(factors) // pairs] for i in range(pairs)]


def shorten_layers(part: PreTrainedConfig, layers_per_kind: int) -> None:
    """Shorten the config to `layers_per_kind` layers of each kind, but at least two layers. Layers
    that share an earlier layer's KV cache are a kind of their own."""
    count = part.num_hidden_layers
    stack = get_setting(part, "num_layers_per_stack")  # layers of a stack that runs several times
    if stack:
        part.num_hidden_layers, part.num_layers_per_stack = 2 * count // stack, 2
        return
    lists = {k: v for k, v in vars(part).items() if isinstance(v, list) and len(v) == count}
    readers = get_setting(part, "num_kv_shared_layers") or 0
    kinds = [
        repr([i >= count - readers, *(values[i] for values in lists.values())])
        for i in range(count)
    ]
    picked = [i for i in range(count) if i < 2 or kinds[:i].count(kinds[i]) < layers_per_kind]
    if readers:
        part.num_kv_shared_layers = sum(i >= count - readers for i in picked)
    pattern = get_setting(part, "block_types")  # kinds of layers that repeat in this order
    if isinstance(pattern, list) and 1 < len(pattern) < count:
        picked = [*range(len(pattern))]
    for name, values in lists.items():
        setattr(part, name, [values[i] for i in picked])
    sizes: dict[str, Any] = dict.fromkeys(
        ("encoder_layers", "decoder_layers", "num_layers", "num_decoder_layers", "num_blocks"),
        len(picked),
    )
    # If a period gives the kinds of layers, the second layer is of the rarer kind
    sizes |= {f"{kind}_layer_period": 2 for kind in ("attn", "expert")}
    sizes |= {f"{kind}_layer_offset": 1 for kind in ("attn", "expert")}
    for name, value in ({"attn_layer_indices": [1]} | sizes).items():
        if getattr(part, name, None) is not None:
            setattr(part, name, value)
    with suppress(AttributeError, NotImplementedError):  # a property derived from the lists
        part.num_hidden_layers = len(picked)


def compute_widths(part: PreTrainedConfig, head_dim: int) -> dict[str, Any]:
    """Return settings for a few heads, of this head dim, with at most two query heads per key
    head."""
    heads = part.num_attention_heads
    key_heads = get_setting(part, "num_key_value_heads") or heads
    few = min(key_heads, MAX_COPY_HEADS)
    queries = few * min(heads // key_heads, 2)
    if head_dim == OWN_HEAD_DIM:
        head_dim = get_setting(part, "head_dim") or part.hidden_size // heads
    settings: dict[str, Any] = dict.fromkeys(
        ("num_attention_heads", "encoder_attention_heads", "decoder_attention_heads"), queries
    )
    settings |= {"num_key_value_heads": few, "head_dim": head_dim, "d_kv": head_dim}
    settings |= dict.fromkeys(("hidden_size", "d_model", "word_embed_proj_dim"), head_dim * queries)
    settings |= _compute_special_head_dims(part, queries) | _compute_recurrent_sizes(
        part, head_dim * queries
    )
    for largest, names in MAX_COPY_SIZES.items():
        counts = {name: get_setting(part, name) for name in names}
        settings |= {k: min(n, largest) for k, n in counts.items() if type(n) is int}
    inner = ("intermediate_size", "ffn_dim", "encoder_ffn_dim", "decoder_ffn_dim", "d_ff")
    return settings | dict.fromkeys((*inner, "n_inner", "moe_intermediate_size"), 32)


def _compute_recurrent_sizes(part: PreTrainedConfig, width: int) -> dict[str, Any]:
    """Return settings for the heads of state space layers in a model of hidden size `width`: heads
    times head dim must equal a multiple of the hidden size."""
    for heads, size, expand, groups, state in STATE_SPACE_FIELDS:
        if get_setting(part, heads) and get_setting(part, size) and get_setting(part, state):
            inner = width * (get_setting(part, expand) or 1)
            few = {
                heads: MAX_COPY_HEADS,
                size: inner // MAX_COPY_HEADS,
                groups: 1,
                state: COPY_HEAD_DIM,
            }
            return few | {"mamba_d_ssm": inner, "mamba_dt_rank": MAX_COPY_HEADS}
    return {}


def compute_tied_sizes(part: PreTrainedConfig, settings: dict[str, Any]) -> dict[str, Any]:
    """Return settings for all other sizes that equal the hidden size or the head dim, so that they
    stay equal."""
    sizes = {name: get_setting(part, name) for name in ("hidden_size", "head_dim")}
    return {
        other: settings[name]
        for name, size in sizes.items()
        if name in settings
        for other, value in vars(part).items()
        if type(value) is int
        and value == size
        and value > COPY_VOCAB_SIZE
        and other not in settings
    }


def _compute_special_head_dims(part: PreTrainedConfig, queries: int) -> dict[str, Any]:
    """Return settings for heads whose dimensions are divided: into dimensions with and without
    rotary embeddings (latent attention), or into one section for each position axis. In the second
    case the head dim stays as it is."""
    ropes: dict[str, Any] = get_setting(part, "rope_parameters") or {}
    if get_setting(part, "qk_rope_head_dim"):
        share = ropes.get("partial_rotary_factor") or 0.5  # of a head's dimensions that are rotated
        latent = {
            "qk_rope_head_dim": COPY_HEAD_DIM,
            "qk_nope_head_dim": round(COPY_HEAD_DIM / share) - COPY_HEAD_DIM,
        }
        latent |= {"qk_head_dim": round(COPY_HEAD_DIM / share), "v_head_dim": 8}
        latent |= (
            {"head_dim": round(COPY_HEAD_DIM / share)} if "partial_rotary_factor" in ropes else {}
        )
        return latent | {"q_lora_rank": 16, "kv_lora_rank": 16}
    if not ropes.get("mrope_section"):
        return {}
    width = getattr(part, "head_dim", None) or part.hidden_size // part.num_attention_heads
    return {"head_dim": width, "hidden_size": width * queries}


def randomize_weights(model: PreTrainedModel) -> None:
    """Draw random weights in place. These weights are larger than the usual initial weights, with
    which logits would be nearly uniform."""
    with torch.no_grad():
        for weight in model.parameters():
            if weight.ndim > 1:
                weight.normal_(std=weight.shape[-1] ** -0.5)
