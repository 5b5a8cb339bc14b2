"""A small random copy of a model: the same class and structure with few layers, narrow widths and
windows of `WINDOW` tokens.

A configuration is shrunk as far as the family's own code allows. Does not know what a copy is for.
"""

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

from foretoken.models.stock.media import encoder_input, writer
from foretoken.models.stock.sizes import LIMITS, context_limit

VOCABULARY = 64
WINDOW = 8
HEAD, HEADS = 16, 2  # width of a head, and how many keys and values have at most
OWN = -1  # a head as wide as it is
STATES = 128  # hidden size of a model without attention
# Names of lengths: windows, chunks, floors of a scale that grows with the position, room in experts
THRESHOLD = re.compile(r"(window|chunk)(_size|_len)?$|floor|^local_attention$|^expert_capacity$")
SWITCH = "original_max_position_embeddings"  # where the factors of rotary positions change
CONTEXT = 128  # positions that the check needs
# Names of a state space layer's heads, their width, the factor of the hidden size, groups, state
STATE_SPACES = (
    ("mamba_n_heads", "mamba_d_head", "mamba_expand", "mamba_n_groups", "mamba_d_state"),
    ("mamba_num_heads", "mamba_head_dim", "expand", "n_groups", "ssm_state_size"),
    ("n_mamba_heads", "mamba_headdim", "mamba_expand", "mamba_ngroups", "mamba_d_state"),
    ("num_heads", "head_dim", "expand", "n_groups", "state_size"),
)
# Names of linear attention's heads and their widths, and of experts, by what the copy has at most
FEWER: dict[int, tuple[str, ...]] = {
    HEADS: ("linear_num_heads", "linear_num_key_heads"),
    2 * HEADS: ("linear_num_value_heads",),
    HEAD: ("linear_head_dim", "linear_key_head_dim", "linear_value_head_dim"),
    16: ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"),
}
LARGEST = 1_000_000_000  # parameters of a small copy


def small_copy(
    kind: type[PreTrainedModel],
    config: PreTrainedConfig,
    switch: int = CONTEXT,
    *,
    reads_text: bool = True,
) -> PreTrainedModel:
    """A random model of that class and structure, in float32 on the CPU: as narrow as its code
    allows, at most the configuration as it is. Raises whatever its code raises. reads_text: it is
    tried on some."""
    problem: Exception | None = None
    for attempt in (
        lambda: shrunk(config, HEAD, switch),
        lambda: shrunk(config, HEAD, switch, ties=True),
        lambda: remade(shrunk(config, HEAD, switch, ties=True), config),
        lambda: remade(shrunk(config, HEAD, switch, ties=True, each=2), config),
        lambda: shrunk(config, OWN, switch),
        lambda: shrunk(config, None, switch),
        lambda: remade(shrunk(config, None, switch), config),
        lambda: copy.deepcopy(config),
    ):
        try:
            own = attempt()
            _require_small(kind, own)
            small: Any = kind(own).float().eval()
            randomize_weights(small)
            ids = torch.ones(1, 2, dtype=torch.long)
            if not reads_text:
                return small
            with torch.inference_mode():
                sources = {"decoder_input_ids": ids} | encoder_input(small, ids)
                writer(small)(**(sources if own.is_encoder_decoder else {"input_ids": ids}))
            return small
        except Exception as error:  # narrow widths may not fit each other
            problem = problem or error
    assert problem is not None
    raise problem


def _require_small(kind: type[PreTrainedModel], config: PreTrainedConfig) -> None:
    """MemoryError for a copy that is no small one: of a large model it would take all memory."""
    with torch.device("meta"):
        size = sum(weight.numel() for weight in kind(config).parameters())
    if size > LARGEST:
        raise MemoryError(f"the copy has {size} parameters")


def shrunk(
    config: PreTrainedConfig,
    head: int | None,
    switch: int = CONTEXT,
    *,
    ties: bool = False,
    each: int = 1,
) -> PreTrainedConfig:
    """The configuration of the small copy.

    Args:
        config: The model's.
        head: The width of a head, OWN for the one it has; None: all widths stay.
        switch: From which length on texts are read with the other rotary factors.
        ties: Sizes that equal the hidden size, or a head's, stay equal.
        each: Layers of each kind; there are two at least.
    """
    config = copy.deepcopy(config)
    config._attn_implementation = None
    for part in parts(config):
        shrink(part, head, switch, ties, each)
    return config


def parts(config: PreTrainedConfig) -> Iterator[PreTrainedConfig]:
    """The configuration and those in it."""
    yield config
    for name in config.sub_configs:
        part = getattr(config, name, None)
        if isinstance(part, PreTrainedConfig):
            yield from parts(part)


def remade(config: PreTrainedConfig, before: PreTrainedConfig) -> PreTrainedConfig:
    """The same settings given to the configuration's class, which derives others from them: those
    that it need not be given, and that are as in `before`."""
    settings = {
        each.name: getattr(config, each.name)
        for each in dataclasses.fields(config)
        if each.name in vars(config) and not _derived(each, config, before)
    }
    for name in config.sub_configs:
        if isinstance(settings.get(name), PreTrainedConfig):
            settings[name] = remade(settings[name], getattr(before, name))
    return type(config)(**settings)


def _derived(
    field: dataclasses.Field[Any], config: PreTrainedConfig, before: PreTrainedConfig
) -> bool:
    value = getattr(config, field.name)
    return field.default is None and type(value) is int and value == value_of(before, field.name)


def value_of(part: PreTrainedConfig, name: str) -> Any:
    """A setting; None where it is missing or where each layer has its own."""
    try:
        return getattr(part, name, None)
    except Exception:  # transformers' own kinds
        return None


def shrink(part: PreTrainedConfig, head: int | None, switch: int, ties: bool, each: int) -> None:
    settings: dict[str, Any] = {"vocab_size": VOCABULARY, "decoder_vocab_size": VOCABULARY}
    settings["vocab_size_per_layer_input"] = VOCABULARY
    settings |= dict.fromkeys(thresholds(part), WINDOW)
    settings[SWITCH] = switch
    settings |= {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 1}
    settings |= {"decoder_start_token_id": 0, "forced_eos_token_id": 1}
    limit = max(CONTEXT, context_limit(part) or 0)
    settings |= dict.fromkeys(LIMITS, limit)
    if value_of(part, "num_hidden_layers") is not None:
        shorten(part, each)
    if head is not None and value_of(part, "num_attention_heads"):
        settings |= widths(part, head)
    elif head is not None and value_of(part, "hidden_size"):  # layers of states only
        settings |= {"hidden_size": STATES, "num_heads": HEADS} | _recurrent(part, STATES)
    if ties:
        settings |= tied(part, settings)
    layers_own = getattr(vars(part).get("_heterogeneity_spec"), "per_layer_attributes", ())
    for name, value in settings.items():
        before = value_of(part, name)
        if name in layers_own or before is None:
            continue
        with suppress(AttributeError, NotImplementedError):  # one that follows from others
            try:
                setattr(part, name, value)
            except StrictDataclassFieldValidationError:  # there are several
                setattr(part, name, [value] * len(before))
    ropes: dict[str, Any] = getattr(part, "rope_parameters", None) or {}
    for rope in (ropes, *(value for value in ropes.values() if isinstance(value, dict))):
        shrink_rope(rope, head == HEAD, switch)


def thresholds(part: PreTrainedConfig) -> list[str]:
    """The settings that say from which length of a text, or at which distance, a model behaves
    otherwise, where its texts get there: then the check is to get there too."""
    limit = getattr(part, "max_position_embeddings", None) or math.inf
    numbers = {k: v for k, v in vars(part).items() if isinstance(v, int) and WINDOW < v < limit}
    return [name for name in numbers if THRESHOLD.search(name)]


def shrink_rope(rope: dict[str, Any], narrow: bool, switch: int) -> None:
    """The same for rotary positions, whose factors are one for each pair of a head's values."""
    if rope.get(SWITCH) is not None:
        kind = rope.get("rope_type")  # texts end at a dynamic one's, and the check's are longer
        rope[SWITCH] = {"longrope": switch, "dynamic": CONTEXT}.get(str(kind), 2 * WINDOW)
    pairs = int(HEAD * rope.get("partial_rotary_factor", 1.0)) // 2
    for name in ("short_factor", "long_factor"):
        if narrow and isinstance(rope.get(name), list):
            factors = rope[name]
            rope[name] = [factors[i * len(factors) // pairs] for i in range(pairs)]


def shorten(part: PreTrainedConfig, each: int) -> None:
    """Keep so many layers of each kind, at least two; of those that read earlier layers' keys,
    too."""
    count = part.num_hidden_layers
    stack = value_of(part, "num_layers_per_stack")  # which runs several times
    if stack:
        part.num_hidden_layers, part.num_layers_per_stack = 2 * count // stack, 2
        return
    lists = {k: v for k, v in vars(part).items() if isinstance(v, list) and len(v) == count}
    readers = value_of(part, "num_kv_shared_layers") or 0
    kinds = [
        repr([i >= count - readers, *(values[i] for values in lists.values())])
        for i in range(count)
    ]
    picked = [i for i in range(count) if i < 2 or kinds[:i].count(kinds[i]) < each]
    if readers:
        part.num_kv_shared_layers = sum(i >= count - readers for i in picked)
    pattern = value_of(part, "block_types")  # which layers repeat, for as many as there are
    if isinstance(pattern, list) and 1 < len(pattern) < count:
        picked = [*range(len(pattern))]
    for name, values in lists.items():
        setattr(part, name, [values[i] for i in picked])
    sizes: dict[str, Any] = dict.fromkeys(
        ("encoder_layers", "decoder_layers", "num_layers", "num_decoder_layers", "num_blocks"),
        len(picked),
    )
    # kinds by number: the second layer is of the rarer one
    sizes |= {f"{kind}_layer_period": 2 for kind in ("attn", "expert")}
    sizes |= {f"{kind}_layer_offset": 1 for kind in ("attn", "expert")}
    for name, value in ({"attn_layer_indices": [1]} | sizes).items():
        if getattr(part, name, None) is not None:
            setattr(part, name, value)
    with suppress(AttributeError, NotImplementedError):  # one that follows from the lists
        part.num_hidden_layers = len(picked)


def widths(part: PreTrainedConfig, head: int) -> dict[str, Any]:
    """Return settings of a few heads, as many queries per key as before but two at most."""
    heads = part.num_attention_heads
    key_heads = value_of(part, "num_key_value_heads") or heads
    few = min(key_heads, HEADS)
    queries = few * min(heads // key_heads, 2)
    if head == OWN:
        head = value_of(part, "head_dim") or part.hidden_size // heads
    settings: dict[str, Any] = dict.fromkeys(
        ("num_attention_heads", "encoder_attention_heads", "decoder_attention_heads"), queries
    )
    settings |= {"num_key_value_heads": few, "head_dim": head, "d_kv": head}
    settings |= dict.fromkeys(("hidden_size", "d_model", "word_embed_proj_dim"), head * queries)
    settings |= _fixed(part, queries) | _recurrent(part, head * queries)
    for most, names in FEWER.items():
        counts = {name: value_of(part, name) for name in names}
        settings |= {k: min(n, most) for k, n in counts.items() if type(n) is int}
    inner = ("intermediate_size", "ffn_dim", "encoder_ffn_dim", "decoder_ffn_dim", "d_ff")
    return settings | dict.fromkeys((*inner, "n_inner", "moe_intermediate_size"), 32)


def _recurrent(part: PreTrainedConfig, width: int) -> dict[str, Any]:
    """Heads of state space layers, which divide a multiple of the hidden size among them."""
    for heads, size, expand, groups, state in STATE_SPACES:
        if value_of(part, heads) and value_of(part, size) and value_of(part, state):
            inner = width * (value_of(part, expand) or 1)
            few = {heads: HEADS, size: inner // HEADS, groups: 1, state: HEAD}
            return few | {"mamba_d_ssm": inner, "mamba_dt_rank": HEADS}
    return {}


def tied(part: PreTrainedConfig, settings: dict[str, Any]) -> dict[str, Any]:
    """Return settings of the other sizes that equal the hidden size, or a head's."""
    sizes = {name: value_of(part, name) for name in ("hidden_size", "head_dim")}
    return {
        other: settings[name]
        for name, size in sizes.items()
        if name in settings
        for other, value in vars(part).items()
        if type(value) is int and value == size and value > VOCABULARY and other not in settings
    }


def _fixed(part: PreTrainedConfig, queries: int) -> dict[str, Any]:
    """Widths of heads with parts of their own: those that positions turn and those they do not
    (latent attention), or one for each axis (sections, whose heads stay as wide as they are)."""
    ropes: dict[str, Any] = value_of(part, "rope_parameters") or {}
    if value_of(part, "qk_rope_head_dim"):
        share = ropes.get("partial_rotary_factor") or 0.5  # of a head, that positions turn
        latent = {"qk_rope_head_dim": HEAD, "qk_nope_head_dim": round(HEAD / share) - HEAD}
        latent |= {"qk_head_dim": round(HEAD / share), "v_head_dim": 8}
        latent |= {"head_dim": round(HEAD / share)} if "partial_rotary_factor" in ropes else {}
        return latent | {"q_lora_rank": 16, "kv_lora_rank": 16}
    if not ropes.get("mrope_section"):
        return {}
    width = getattr(part, "head_dim", None) or part.hidden_size // part.num_attention_heads
    return {"head_dim": width, "hidden_size": width * queries}


def randomize_weights(model: PreTrainedModel) -> None:
    """Draw larger weights than the usual initial ones, whose logits are nearly flat."""
    with torch.no_grad():
        for weight in model.parameters():
            if weight.ndim > 1:
                weight.normal_(std=weight.shape[-1] ** -0.5)
