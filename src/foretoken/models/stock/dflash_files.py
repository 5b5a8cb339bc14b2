"""Files of drafts by blocks: z-lab's DFlash, DeepSpec's DSpark, both as speculators writes them,
and transformers' assistants of Muse Glimmer.

Knows configs and tensors, no folders. The numbers that name a target's layers mean the layer whose
output is read, but for speculators', which mean the one whose input is.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import Qwen3Config

from foretoken.errors import InputError, RefusedError, shown
from foretoken.models.hidden_states import FINAL_TAP
from foretoken.models.stock.dflash import (
    BlockForm,
    BlockNetwork,
    BlocksDraft,
    Confidence,
    GatedMarkov,
    Markov,
    RecurrentMarkov,
)
from foretoken.models.stock.pair_files import require_agreement, require_numbers

SPECULATORS = ("dflash", "dspark")
MUSE = "muse_glimmer_assistant"
DEEPSPEC = ("Qwen3DSparkModel",)
WIDTHS = ("hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size")
SETTINGS = (*WIDTHS, "num_key_value_heads", "head_dim", "hidden_act", "max_position_embeddings")
SETTINGS += ("rms_norm_eps", "rope_parameters", "rope_theta", "rope_scaling", "attention_bias")
SETTINGS += ("layer_types", "use_sliding_window", "sliding_window", "max_window_layers")
RENAMED = {"encoder.fc.": "fc.", "encoder.output_norm_enc.": "hidden_norm."}
ENDS = ("embed_tokens.weight", "lm_head.weight")
UNREAD = (*ENDS, "d2t", "t2d", "verifier_norm.weight", "verifier_lm_head.weight")  # of the network


@dataclass(frozen=True, slots=True)
class BlockConfig:
    """A draft's config, read: the layers' own, and the rest.

    rank, kind: of the Markov head, rank 0 where there is none; sure: there is a confidence head,
    which reads the token before too where it is `sure_of_token`.
    """

    form: BlockForm
    layers: Qwen3Config
    rank: int
    kind: str
    sure: bool
    sure_of_token: bool


def block_config(config: dict[str, Any]) -> BlockConfig:
    """Read a config. Raises InputError for what it lacks, and RefusedError for what is not known
    here."""
    speculators = config.get("speculators_model_type") in SPECULATORS
    deepspec = not speculators and any("DSpark" in x for x in config.get("architectures") or ())
    if deepspec and not set(config["architectures"]) <= set(DEEPSPEC):
        named = config["architectures"][0]
        raise RefusedError(f"layers of {named} are not known here; give a draft of Qwen3's layers")
    own = {**config, **(config.get("dflash_config") or {})}
    ids = _asked(own, "aux_hidden_state_layer_ids" if speculators else "target_layer_ids")
    least = 0 if speculators else -1  # whose output is the embeddings
    if not isinstance(ids, list) or not ids or not all(type(i) is int and i >= least for i in ids):
        raise InputError(
            f"the draft reads behind layers {ids!r:.60}; give whole numbers from {least} on"
        )
    taps = tuple(i + (not speculators) for i in ids)
    if not speculators:  # transformers' last states are behind the final norm
        taps = tuple(FINAL_TAP if tap == own.get("num_target_layers") else tap for tap in taps)
    dspark = deepspec or config.get("speculators_model_type") == "dspark"
    from_anchor = bool(own.get("sample_from_anchor", dspark))
    form = BlockForm(
        taps,
        size=_whole(own, "block_size", 1 if from_anchor else 2),
        mask=_whole(own, "mask_token_id", 0),
        from_anchor=from_anchor,
        by_place=not speculators,
        causal=speculators and not own.get("sliding_window_non_causal", False),
    )
    layers = _asked(config, "transformer_layer_config") if speculators else config
    rank = int(own.get("markov_rank", 256 * dspark) or 0)
    kind = str(own.get("markov_head_type", "vanilla"))
    sure = bool(own.get("enable_confidence_head", dspark))
    of_token = bool(own.get("confidence_head_with_markov", dspark)) and rank > 0
    return BlockConfig(form, _layers(layers), rank, kind, sure, of_token)


def _asked(config: dict[str, Any], name: str) -> Any:
    value = config.get(name)
    if value is None:
        raise InputError(f"the draft's config has no {name}; give a whole one")
    return value


def _whole(config: dict[str, Any], name: str, least: int) -> int:
    value = _asked(config, name)
    if type(value) is not int or value < least:
        raise InputError(
            f"the draft's {name} is {value!r:.40}; give a whole number from {least} on"
        )
    return value


def _layers(config: dict[str, Any]) -> Qwen3Config:
    """The layers' config; Muse Glimmer's are Qwen3's by another name."""
    settings = {name: config[name] for name in SETTINGS if config.get(name) is not None}
    angles = settings.get("rope_parameters") or {}
    if "sliding_attention" in angles:  # speculators takes these for all layers
        settings["rope_parameters"] = angles["sliding_attention"]
    if config.get("model_type") == MUSE:
        settings["use_sliding_window"] = True
    for name in WIDTHS:
        _asked(config, name)
    return Qwen3Config(**settings)


def blocks(
    config: dict[str, Any],
    tensors: dict[str, Tensor],
    hidden_size: int,
    embedding: nn.Module,
    head: nn.Module,
) -> BlocksDraft:
    """Make a draft of its config and tensors.

    Args:
        config: The draft's config.
        tensors: Its tensors, by name.
        hidden_size: The target's.
        embedding, head: The target's first and last layer, with a `weight` each; the draft's own
            take their place where it has others.

    Raises:
        InputError: Something is missing, or does not fit the target.
        RefusedError: Something is not known here.
    """
    read = block_config(config)
    form, H = read.form, read.layers.hidden_size
    tensors = {_renamed(name): tensor for name, tensor in tensors.items()}
    V = _weight(embedding).shape[0]
    ids = _ids(form, tensors, V)
    embedding, head = _ends(tensors, embedding, head)
    outputs = _weight(head).shape[0] if ids is None else len(ids)
    for end, name in ((embedding, "embedding"), (head, "output layer")):
        if _weight(end).shape[1] != H or (end is head and _weight(end).shape[0] != outputs):
            found = tuple(_weight(end).shape)
            raise InputError(
                f"the {name} is {found}, the draft's layers are {H} wide and guess {outputs} "
                "tokens; give a draft for this target"
            )
    with torch.device("meta"):
        network = unfilled(read, hidden_size, V, outputs)
    _fill(network, tensors)
    return BlocksDraft(network.requires_grad_(False).eval(), embedding, head, ids)


def _ids(form: BlockForm, tensors: dict[str, Tensor], V: int) -> Tensor | None:
    """The target's ids of the draft's outputs; None where these are the same. Raises InputError for
    a target that lacks some, or the mask."""
    ids = None
    if "d2t" in tensors:  # differences
        ids = torch.arange(len(tensors["d2t"])) + tensors["d2t"].long().cpu()
        if "lm_head.weight" not in tensors:
            raise InputError("the draft's files have d2t and no lm_head.weight; give whole ones")
        require_agreement("the draft", ids, tensors.get("t2d"))
    most = form.mask if ids is None else max(form.mask, int(ids.max()))
    if not 0 <= form.mask <= most < V:
        raise InputError(
            f"the draft has the mask_token_id {shown(form.mask)} and ids up to {shown(most)}, the "
            f"target {V} tokens; give a draft for this target"
        )
    return ids


def require_fit(
    config: dict[str, Any], tensors: dict[str, Tensor], hidden: int, V: int, layers: int
) -> None:
    """Raise as `blocks` does, for a target with states so wide, V tokens and so many layers."""
    read = block_config(config)
    tensors = {_renamed(name): tensor for name, tensor in tensors.items()}
    if read.layers.hidden_size != hidden and ENDS[0] not in tensors:
        raise InputError(
            f"the draft's layers are {read.layers.hidden_size} wide, the target's embeddings "
            f"{hidden}; give a draft for this target"
        )
    if max(read.form.taps) > layers:
        raise InputError(
            f"the draft reads states behind layer {max(read.form.taps)}, the target has {layers}; "
            "give a draft for this target"
        )
    text = config.get("transformer_layer_config") or config
    for name, own in (("vocab_size", V), ("num_target_layers", layers)):
        if text.get(name, own) != own:
            raise InputError(
                f"the draft is for a target of {name} {text[name]!r:.40}, this one has {own}; give "
                "a draft for this target"
            )
    if not 0 < read.layers.num_hidden_layers <= len(tensors):
        raise InputError(
            f"the draft has num_hidden_layers {read.layers.num_hidden_layers}, its files hold "
            f"{len(tensors)} weights; give a config and weights of one draft"
        )
    ids = _ids(read.form, tensors, V)
    outputs = V if ids is None else len(ids)
    with torch.device("meta"):
        network = unfilled(read, hidden, V, outputs)
    _fill(network, tensors)
    for name in network.state_dict():  # here alone: it reads all of them
        require_numbers("the draft", name, tensors[name])


def unfilled(read: BlockConfig, hidden_size: int, vocab_size: int, outputs: int) -> BlockNetwork:
    """Make the network of a config, with random weights, for a target of that width and vocabulary,
    and so many outputs of its own."""
    H, width = read.layers.hidden_size, len(read.form.taps) * hidden_size
    confidence = Confidence(H, read.rank * read.sure_of_token) if read.sure else None
    chain = _chain(read, vocab_size, outputs)
    return BlockNetwork(read.layers, read.form, width, chain, confidence)


def _renamed(name: str) -> str:
    for old, new in RENAMED.items():
        if name.startswith(old):
            return new + name.removeprefix(old)
    return name


def _weight(module: Any) -> Tensor:
    return module.weight


def _ends(
    tensors: dict[str, Tensor], embedding: nn.Module, head: nn.Module
) -> tuple[nn.Module, nn.Module]:
    """The draft's own ends, and the target's where it has none or copies of these."""
    like, ends = _weight(embedding), (embedding, head)
    own = [tensors.get(name) for name in ENDS]
    if own[0] is None and hasattr(embedding, "embed_norm"):  # which drafts do without
        own[0] = like
    first, last = (
        None if new is None or _same(new, old) else new.to(like)
        for new, old in zip(own, ends, strict=True)
    )
    if first is not None:
        embedding = nn.Embedding.from_pretrained(first)
    if last is not None:
        head = nn.Linear(last.shape[1], last.shape[0], bias=False, device="meta")
        head.weight = nn.Parameter(last, requires_grad=False)
    return embedding, head


def _same(new: Tensor, module: nn.Module) -> bool:
    old = _weight(module)
    plain = not hasattr(module, "embed_norm")
    return plain and new.shape == old.shape and torch.equal(new.to(old), old)


def _chain(read: BlockConfig, V: int, outputs: int) -> Markov | None:
    if not read.rank:
        return None
    H = read.layers.hidden_size
    match read.kind:
        case "vanilla":
            return Markov(V, outputs, read.rank)
        case "gated":
            return GatedMarkov(V, outputs, read.rank, H)
        case "rnn":
            return RecurrentMarkov(V, outputs, read.rank, H)
        case kind:
            raise RefusedError(
                f"markov_head_type {kind!r:.40} is not known here; known are vanilla, gated and rnn"
            )


def _fill(network: nn.Module, tensors: dict[str, Tensor]) -> None:
    """Give the tensors their places, as they are. InputError or RefusedError where one has none."""
    places = network.state_dict()
    for name, place in places.items():
        if name not in tensors:
            raise InputError(f"the draft's files have no {name}, which its config needs")
        if tensors[name].shape != place.shape:
            raise InputError(
                f"the draft's {name} is {tuple(tensors[name].shape)}, by its config and the target "
                f"it would be {tuple(place.shape)}; give a draft for this target"
            )
    unknown = sorted(tensors.keys() - places.keys() - set(UNREAD))
    if unknown:
        raise RefusedError(
            f"the draft's files have {unknown[0]}, which is not known here; another draft may do"
        )
    network.load_state_dict({name: tensors[name] for name in places}, assign=True)
