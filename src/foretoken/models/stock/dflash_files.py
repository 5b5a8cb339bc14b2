"""Builds block drafters from their configs and tensors: z-lab's DFlash and DFlash2, DeepSpec's
DSpark, all also in speculators' layout, SpecForge's Domino, and transformers' assistants of Muse
Glimmer.

The caller opens the files. The ids of target layers in a config mean the outputs of these layers;
in speculators' layout, the ids mean the inputs of the layers.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import Qwen3Config

from foretoken.errors import InputError, RefusedError, format_value
from foretoken.models.hidden_states import FINAL_TAP
from foretoken.models.stock.dflash import (
    BlockLayout,
    BlockNetwork,
    BlocksDraft,
    ConfidenceHead,
    GatedMarkovHead,
    MarkovHead,
    RecurrentMarkovHead,
)
from foretoken.models.stock.dflash2 import CandidateSelector
from foretoken.models.stock.domino import DominoHead
from foretoken.models.stock.pair_files import require_consistent_ids, require_finite_floats

SPECULATORS_MODEL_TYPES = ("dflash", "dflash2", "dspark")
MUSE_MODEL_TYPE = "muse_glimmer_assistant"
DEEPSPEC_ARCHITECTURES = ("Qwen3DSparkModel",)
REQUIRED_SETTINGS = ("hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size")
LAYER_SETTINGS = (
    *REQUIRED_SETTINGS,
    "num_key_value_heads",
    "head_dim",
    "hidden_act",
    "max_position_embeddings",
)
LAYER_SETTINGS += (
    "rms_norm_eps",
    "rope_parameters",
    "rope_theta",
    "rope_scaling",
    "attention_bias",
)
LAYER_SETTINGS += ("layer_types", "use_sliding_window", "sliding_window", "max_window_layers")
DOMINO_PROJECTORS = ("domino", "causal_v5")
TENSOR_PREFIXES = {"encoder.fc.": "fc.", "encoder.output_norm_enc.": "hidden_norm."}
TENSOR_PREFIXES |= {name: f"domino_head.{name}" for name in ("prefix_gru.", "embed_proj.")}
EMBEDDING_AND_HEAD = ("embed_tokens.weight", "lm_head.weight")
# Tensors in the files that are not part of the network
IGNORED_TENSORS = (
    *EMBEDDING_AND_HEAD,
    "d2t",
    "t2d",
    "verifier_norm.weight",
    "verifier_lm_head.weight",
)


@dataclass(frozen=True, slots=True)
class BlockConfig:
    """A draft's parsed config.

    Attributes:
        layout: The layout of a block.
        layers: The config of the layers.
        markov_rank: The rank of the Markov head; 0: there is no such head.
        markov_head_type: "vanilla", "gated" or "rnn".
        has_confidence_head: True if there is a confidence head.
        confidence_with_markov: True if the confidence head's input includes the previous token's
            Markov embedding.
        convolution: The taps and the group size of the layers' convolutions; None: the layers have
            none.
        selector: The rank and the number of candidates of the selector; None: there is none.
        domino: The sizes of the state and of the rank of Domino's head; None: there is none.
        base_first: True if Domino's head leaves the first draft token's logits as they are.
        logit_scale, softcap: Applied to the logits before the selector; a softcap of 0 has no
            effect.
        embedding_scale: Factor of the embeddings of a block.
    """

    layout: BlockLayout
    layers: Qwen3Config
    markov_rank: int
    markov_head_type: str
    has_confidence_head: bool
    confidence_with_markov: bool
    convolution: tuple[int, int] | None
    selector: tuple[int, int] | None
    domino: tuple[int, int] | None
    base_first: bool
    logit_scale: float
    softcap: float
    embedding_scale: float


def parse_block_config(config: dict[str, Any]) -> BlockConfig:
    """Return a draft's parsed config. Raises InputError for missing or invalid settings, and
    RefusedError for unsupported settings."""
    speculators = config.get("speculators_model_type") in SPECULATORS_MODEL_TYPES
    deepspec = not speculators and any("DSpark" in x for x in config.get("architectures") or ())
    if deepspec and not set(config["architectures"]) <= set(DEEPSPEC_ARCHITECTURES):
        named = config["architectures"][0]
        raise RefusedError(f"layers of {named} are not supported; give a draft with Qwen3's layers")
    own = {**config, **(config.get("dflash_config") or {})}
    ids = _require_setting(own, "aux_hidden_state_layer_ids" if speculators else "target_layer_ids")
    min_layer = 0 if speculators else -1  # -1: the embeddings
    if (
        not isinstance(ids, list)
        or not ids
        or not all(type(i) is int and i >= min_layer for i in ids)
    ):
        raise InputError(
            f"the draft's target layers are {ids!r:.60}; give integers of {min_layer} or more"
        )
    taps = tuple(i + (not speculators) for i in ids)
    if not speculators:  # transformers' hidden states of the last layer are after the final norm
        taps = tuple(FINAL_TAP if tap == own.get("num_target_layers") else tap for tap in taps)
    dspark = deepspec or config.get("speculators_model_type") == "dspark"
    dflash2 = config.get("speculators_model_type") == "dflash2"
    is_domino = own.get("projector_type") in DOMINO_PROJECTORS
    from_anchor = bool(own.get("shift_label" if is_domino else "sample_from_anchor", dspark))
    layout = BlockLayout(
        taps,
        block_size=_require_int(own, "block_size", 1 if from_anchor else 2),
        mask_token_id=_require_int(own, "mask_token_id", 0),
        sample_from_anchor=from_anchor,
        window_per_position=not speculators,
        causal_window=speculators and not own.get("sliding_window_non_causal", dflash2),
        causal=bool(own.get("causal", False)),
    )
    layers = _require_setting(config, "transformer_layer_config") if speculators else config
    rank = int(own.get("markov_rank", 256 * dspark) or 0)
    kind = str(own.get("markov_head_type", "vanilla"))
    has_confidence_head = bool(own.get("enable_confidence_head", dspark))
    with_markov = bool(own.get("confidence_head_with_markov", dspark)) and rank > 0
    parsed = _parse_layers_config(layers)
    convolution = _parse_pair(own, "conv_kernel_size", "conv_group_size")
    if convolution and parsed.hidden_size % convolution[1]:
        raise InputError(
            f"the draft's conv_group_size is {convolution[1]}; give a divisor of the hidden size "
            f"{parsed.hidden_size}"
        )
    return BlockConfig(
        layout,
        parsed,
        rank,
        kind,
        has_confidence_head,
        with_markov,
        convolution=convolution,
        selector=_parse_pair(own, "selector_rank", "selector_top_k"),
        domino=_parse_pair(own, "gru_hidden_dim", "emb_dim") if is_domino else None,
        base_first=is_domino and _parse_base_first(own),
        logit_scale=_parse_float(own, "output_multiplier", 1.0),
        softcap=_parse_float(own, "final_logit_softcapping", 0.0),
        embedding_scale=_parse_float(own, "input_embedding_scale", 1.0),
    )


def _parse_pair(config: dict[str, Any], first: str, second: str) -> tuple[int, int] | None:
    """Return two integers of 1 or more; None if the config has neither."""
    if not config.get(first) and not config.get(second):
        return None
    return _require_int(config, first, 1), _require_int(config, second, 1)


def _parse_base_first(config: dict[str, Any]) -> bool:
    count = config.get("pure_draft_prefix_len", 0)
    if type(count) is not int or count not in (0, 1):
        raise RefusedError(
            f"the draft has pure_draft_prefix_len {count!r:.40}, but only 0 and 1 are supported; "
            "give another draft"
        )
    return count == 1


def _parse_float(config: dict[str, Any], name: str, default: float) -> float:
    value = config.get(name)
    if value is None:
        return default
    if type(value) not in (int, float) or not 0 <= value < float("inf"):
        raise InputError(f"the draft's {name} is {value!r:.40}; give a number of 0 or more")
    return float(value)


def _require_setting(config: dict[str, Any], name: str) -> Any:
    value = config.get(name)
    if value is None:
        raise InputError(f"the draft's config has no {name}; give a complete config")
    return value


def _require_int(config: dict[str, Any], name: str, minimum: int) -> int:
    value = _require_setting(config, name)
    if type(value) is not int or value < minimum:
        raise InputError(
            f"the draft's {name} is {value!r:.40}; give an integer of {minimum} or more"
        )
    return value


def _parse_layers_config(config: dict[str, Any]) -> Qwen3Config:
    """Return the config of the draft's layers. Muse Glimmer's layers are the same as Qwen3's."""
    settings = {name: config[name] for name in LAYER_SETTINGS if config.get(name) is not None}
    angles = settings.get("rope_parameters") or {}
    if "sliding_attention" in angles:  # speculators uses these settings in all layers
        settings["rope_parameters"] = angles["sliding_attention"]
    if config.get("model_type") == MUSE_MODEL_TYPE:
        settings["use_sliding_window"] = True
    for name in REQUIRED_SETTINGS:
        _require_setting(config, name)
    return Qwen3Config(**settings)


def build_blocks_draft(
    config: dict[str, Any],
    tensors: dict[str, Tensor],
    hidden_size: int,
    embedding: nn.Module,
    head: nn.Module,
) -> BlocksDraft:
    """Build a draft from its config and tensors.

    Args:
        config: The draft's config.
        tensors: The draft's tensors, by name.
        hidden_size: The target's hidden size.
        embedding, head: The target's embedding and output layer, modules with a `weight`. The
            draft's own embedding and output layer, if there are any, are used instead.

    Returns:
        The draft.

    Raises:
        InputError: A setting or tensor is missing, or does not fit the target.
        RefusedError: The draft has unsupported settings or unknown tensors.
    """
    parsed = parse_block_config(config)
    layout, H = parsed.layout, parsed.layers.hidden_size
    tensors = {_rename_key(name): tensor for name, tensor in tensors.items()}
    V = _get_weight(embedding).shape[0]
    ids = _compute_output_ids(layout, tensors, V)
    embedding, head = _choose_embedding_and_head(tensors, embedding, head)
    outputs = _get_weight(head).shape[0] if ids is None else len(ids)
    for end, name in ((embedding, "embedding"), (head, "output layer")):
        if _get_weight(end).shape[1] != H or (end is head and _get_weight(end).shape[0] != outputs):
            found = tuple(_get_weight(end).shape)
            raise InputError(
                f"the {name} has shape {found}, but the draft has hidden size {H} and a "
                f"vocabulary of {outputs} tokens; give a draft for this target"
            )
    with torch.device("meta"):
        network = build_network(parsed, hidden_size, V, outputs)
    _load_tensors(network, tensors)
    return BlocksDraft(network.requires_grad_(False).eval(), embedding, head, ids)


def _compute_output_ids(layout: BlockLayout, tensors: dict[str, Tensor], V: int) -> Tensor | None:
    """Return the target's id of each output of the draft, `[Vd]`; None if each id is the output's
    index. Raises InputError if such an id, or the mask token's id, is not in the target's
    vocabulary."""
    ids = None
    if "d2t" in tensors:  # the differences between target ids and output indices
        ids = torch.arange(len(tensors["d2t"])) + tensors["d2t"].long().cpu()
        if "lm_head.weight" not in tensors:
            raise InputError(
                "the draft's files have d2t but no lm_head.weight; give a complete draft"
            )
        require_consistent_ids("the draft", ids, tensors.get("t2d"))
    max_id = layout.mask_token_id if ids is None else max(layout.mask_token_id, int(ids.max()))
    if not 0 <= layout.mask_token_id <= max_id < V:
        raise InputError(
            f"the draft has the mask_token_id {format_value(layout.mask_token_id)} and ids up to "
            f"{format_value(max_id)}, but the target has {V} tokens; give a draft for this target"
        )
    return ids


def require_fit(
    config: dict[str, Any], tensors: dict[str, Tensor], hidden: int, V: int, layers: int
) -> None:
    """Raise the errors of `build_blocks_draft` for a target with this hidden size, vocabulary size
    and number of layers, without building the draft."""
    parsed = parse_block_config(config)
    tensors = {_rename_key(name): tensor for name, tensor in tensors.items()}
    if parsed.layers.hidden_size != hidden and EMBEDDING_AND_HEAD[0] not in tensors:
        raise InputError(
            f"the draft's hidden size is {parsed.layers.hidden_size}, but the target's embeddings "
            f"have size {hidden}; give a draft for this target"
        )
    if max(parsed.layout.taps) > layers:
        raise InputError(
            f"the draft takes hidden states after layer {max(parsed.layout.taps)}, but the target "
            f"has {layers} layers; give a draft for this target"
        )
    text = config.get("transformer_layer_config") or config
    for name, own in (("vocab_size", V), ("num_target_layers", layers)):
        if text.get(name, own) != own:
            raise InputError(
                f"the draft is for a target with {name} {text[name]!r:.40}, but this target has "
                f"{own}; give a draft for this target"
            )
    if not 0 < parsed.layers.num_hidden_layers <= len(tensors):
        raise InputError(
            f"the draft has num_hidden_layers {parsed.layers.num_hidden_layers}, but it must be at "
            f"least 1 and at most {len(tensors)}, the number of tensors in its files; give the "
            "config and the weights of one draft"
        )
    ids = _compute_output_ids(parsed.layout, tensors, V)
    outputs = V if ids is None else len(ids)
    with torch.device("meta"):
        network = build_network(parsed, hidden, V, outputs)
    _load_tensors(network, tensors)
    for name in network.state_dict():  # only here, since this loads all weights
        require_finite_floats("the draft", name, tensors[name])


def build_network(
    parsed: BlockConfig, hidden_size: int, vocab_size: int, outputs: int
) -> BlockNetwork:
    """Return the network of a config, with random weights, for a target with this hidden size and
    vocabulary size. outputs: the number of output tokens of the draft."""
    _require_one_head(parsed)
    H, width = parsed.layers.hidden_size, len(parsed.layout.taps) * hidden_size
    confidence = (
        ConfidenceHead(H, parsed.markov_rank * parsed.confidence_with_markov)
        if parsed.has_confidence_head
        else None
    )
    chain = _build_markov_head(parsed, vocab_size, outputs)
    return BlockNetwork(
        parsed.layers,
        parsed.layout,
        width,
        chain,
        confidence,
        _build_selector(parsed, vocab_size, outputs),
        _build_domino_head(parsed, outputs),
        parsed.convolution,
        parsed.embedding_scale,
    )


def _require_one_head(parsed: BlockConfig) -> None:
    """Raise RefusedError for several heads, of which only one would be used."""
    dspark = parsed.markov_rank > 0 or parsed.has_confidence_head
    if dspark + (parsed.selector is not None) + (parsed.domino is not None) > 1:
        raise RefusedError(
            "the draft has several heads; only DSpark's heads, a candidate selector or Domino's "
            "head is supported; give another draft"
        )


def _build_domino_head(parsed: BlockConfig, outputs: int) -> DominoHead | None:
    if parsed.domino is None:
        return None
    return DominoHead(parsed.layers.hidden_size, *parsed.domino, outputs, parsed.base_first)


def _build_selector(parsed: BlockConfig, V: int, outputs: int) -> CandidateSelector | None:
    if parsed.selector is None:
        return None
    if parsed.layout.sample_from_anchor or outputs != V:
        raise RefusedError(
            "a candidate selector is supported only without sample_from_anchor and with the "
            "target's whole vocabulary; give another draft"
        )
    rank, top_k = parsed.selector
    if top_k > V:
        raise InputError(
            f"the draft's selector_top_k is {top_k}, but the target has {V} tokens; give a draft "
            "for this target"
        )
    return CandidateSelector(
        V, parsed.layers.hidden_size, rank, top_k, parsed.logit_scale, parsed.softcap
    )


def _rename_key(name: str) -> str:
    for old, new in TENSOR_PREFIXES.items():
        if name.startswith(old):
            return new + name.removeprefix(old)
    return name


def _get_weight(module: Any) -> Tensor:
    return module.weight


def _choose_embedding_and_head(
    tensors: dict[str, Tensor], embedding: nn.Module, head: nn.Module
) -> tuple[nn.Module, nn.Module]:
    """Return the draft's embedding and output layer. If the draft has none of its own, or only a
    copy of the target's, return the target's."""
    target_weight, ends = _get_weight(embedding), (embedding, head)
    own = [tensors.get(name) for name in EMBEDDING_AND_HEAD]
    # drafts use the embeddings without this norm
    if own[0] is None and hasattr(embedding, "embed_norm"):
        own[0] = target_weight
    first, last = (
        None if new is None or _is_same_weight(new, old) else new.to(target_weight)
        for new, old in zip(own, ends, strict=True)
    )
    if first is not None:
        embedding = nn.Embedding.from_pretrained(first)
    if last is not None:
        head = nn.Linear(last.shape[1], last.shape[0], bias=False, device="meta")
        head.weight = nn.Parameter(last, requires_grad=False)
    return embedding, head


def _is_same_weight(new: Tensor, module: nn.Module) -> bool:
    old = _get_weight(module)
    plain = not hasattr(module, "embed_norm")
    return plain and new.shape == old.shape and torch.equal(new.to(old), old)


def _build_markov_head(parsed: BlockConfig, V: int, outputs: int) -> MarkovHead | None:
    if not parsed.markov_rank:
        return None
    H = parsed.layers.hidden_size
    match parsed.markov_head_type:
        case "vanilla":
            return MarkovHead(V, outputs, parsed.markov_rank)
        case "gated":
            return GatedMarkovHead(V, outputs, parsed.markov_rank, H)
        case "rnn":
            return RecurrentMarkovHead(V, outputs, parsed.markov_rank, H)
        case kind:
            raise RefusedError(
                f"unknown markov_head_type {kind!r:.40}; supported are vanilla, gated and rnn"
            )


def _load_tensors(network: nn.Module, tensors: dict[str, Tensor]) -> None:
    """Assign the tensors to the network, without copying them. Raises InputError for a missing
    tensor or a tensor of another shape, and RefusedError for an unknown tensor."""
    places = network.state_dict()
    for name, place in places.items():
        if name not in tensors:
            raise InputError(f"the draft's files have no {name}; give a complete draft")
        if tensors[name].shape != place.shape:
            raise InputError(
                f"the draft's {name} has shape {tuple(tensors[name].shape)}, but its config and "
                f"the target need {tuple(place.shape)}; give a draft for this target"
            )
    unknown = sorted(tensors.keys() - places.keys() - set(IGNORED_TENSORS))
    if unknown:
        raise RefusedError(
            f"the draft's files have an unknown tensor, {unknown[0]}; give another draft"
        )
    network.load_state_dict({name: tensors[name] for name in places}, assign=True)
