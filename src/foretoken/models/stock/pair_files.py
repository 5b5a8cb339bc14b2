"""Builds drafters on hidden states from their weights: EAGLE-3 in speculators' layout and in the
original layout (which SpecForge uses too), and multi-token prediction layers, which are among a
target's own weights.

This module handles names and shapes of tensors; the caller opens the files.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.modeling_layers import MtpLayer

from foretoken.errors import RefusedError, to_one_line
from foretoken.models.hidden_states import FINAL_TAP
from foretoken.models.stock.mtp_stacks import MtpStackNetwork
from foretoken.models.stock.pairs import EagleLayer, NormedHead, PairsNetwork, TapProjection
from foretoken.models.stock.taps import get_decoder_layers

Tensors = dict[str, Tensor]
TEMPLATE_VOCAB_SIZE = 8  # of a model that is built only to take its layers
SCALE_SUFFIX = "_scale"  # after the name of an 8-bit weight
# of an MTP layer's output layer; a larger output layer would take longer than the MTP layer
MAX_HEAD_ROWS = 2**15
# (prefix in the original layout or a variant, prefix in speculators' layout)
ORIGINAL_EAGLE_PREFIXES = (("model.", ""), ("midlayer.", "layers.0."))
# (prefix in a target's files, prefix in transformers' MtpLayer)
MTP_PREFIXES = (
    ("pre_fc_norm_embedding.", "enorm."),
    ("pre_fc_norm_hidden.", "hnorm."),
    ("fc.", "eh_proj."),
    ("input_proj.", "eh_proj."),
    ("token_layernorm.", "enorm."),
    ("hidden_layernorm.", "hnorm."),
    ("shared_head.norm.", "post_norm."),
    ("final_layernorm.", "post_norm."),
    ("norm.", "post_norm."),
    ("layers.0.", "mtp_block."),
)
MTP_LAYER_PREFIXES = ("enorm.", "hnorm.", "eh_proj.", "post_norm.", "mtp_block.")
SHARED_PREFIXES = ("embed_tokens.", "shared_head.head.")  # copies of the target's weights
EXPERT_WEIGHT = re.compile(r"^(.*experts)\.(\d+)\.(gate|up|down)_proj\.weight$")


class PairsDraft(NamedTuple):
    """A drafter on hidden states, as loaded from files."""

    network: PairsNetwork
    taps: tuple[int, ...]  # the target's taps whose hidden states the drafter takes
    other_taps: tuple[int, ...]  # the other taps that the config may mean; (): none
    ids: Tensor | None  # [Vd], the target's id of each output; None: the output's index
    embedding: Tensor | None  # the drafter's own embeddings; None: the target's


def build_eagle(
    name: str,
    config: dict[str, Any],
    tensors: Tensors,
    target: PreTrainedModel,
    head: Callable[[], Tensor],
) -> PairsDraft:
    """Build EAGLE-3's network.

    name: The draft's name, for error messages.
    config, tensors: The draft's config and weights.
    target: The target, which may be on the meta device.
    head: Returns the target's output layer, `[V, H]`; called for drafts without an output layer.

    Raises RefusedError if weights are missing or are for another target.
    """
    fields = config.get("transformer_layer_config") or config
    layers = _build_layer_config(name, fields)
    tensors = dequantize(
        {_rename_key(key, ORIGINAL_EAGLE_PREFIXES): x for key, x in tensors.items()}
    )
    H, fc = layers.hidden_size, _get_tensor(name, tensors, "fc.weight")
    text = target.config.get_text_config(decoder=True)
    width = config.get("target_hidden_size") or text.hidden_size
    if fc.shape[0] != H or width != text.hidden_size or fc.shape[1] % width:
        raise RefusedError(
            f"{name} takes hidden states of size {width} ({fc.shape[1]} for all taps), but the "
            f"target's have size {text.hidden_size}; give a draft for this target"
        )
    _require_vocab_size(name, fields, tensors, text.vocab_size)
    count = fc.shape[1] // width
    taps, other_taps = _parse_taps(name, config, count, text.num_hidden_layers)
    embedding = _get_embedding(name, tensors, H, text)
    ids = _compute_output_ids(name, tensors, text.vocab_size)
    if "lm_head.weight" not in tensors and H == width:
        num_outputs = head()
        tensors["lm_head.weight"] = num_outputs if ids is None else num_outputs[ids]
    num_outputs = len(_get_tensor(name, tensors, "lm_head.weight"))
    to_file_key = partial(_to_file_key, before=bool(config.get("norm_before_fc")))
    if not 0 < layers.num_hidden_layers <= len(tensors):
        raise RefusedError(
            f"{name} has num_hidden_layers {layers.num_hidden_layers:g}, but its files have "
            f"{len(tensors)} weights; give the config and the weights of one draft"
        )
    with torch.device("meta"):  # check shapes without allocating, as the config may be wrong
        shapes = build_eagle_network(layers, config, num_outputs, width, count).state_dict()
    _require_shapes(name, shapes, tensors, to_file_key)
    network = build_eagle_network(layers, config, num_outputs, width, count)
    _extend_context(network, text)
    _load_weights(name, network, tensors, to_file_key)
    return PairsDraft(network, taps, other_taps, ids, embedding)


def _require_vocab_size(name: str, fields: dict[str, Any], tensors: Tensors, V: int) -> None:
    """Raise RefusedError if the draft is for a target with another vocabulary size than V."""
    for size in (fields.get("vocab_size", V), len(tensors.get("t2d", range(V)))):
        if size != V:
            raise RefusedError(
                f"{name} is for a target with {size!r:.40} tokens, but this target has {V} tokens; "
                "give a draft for this target"
            )


def dequantize(tensors: Tensors) -> Tensors:
    """Return the tensors except the scales. A weight that has a scale for each output is multiplied
    by these scales, in float32."""
    scales = {
        key[: -len(SCALE_SUFFIX)]: x for key, x in tensors.items() if key.endswith(SCALE_SUFFIX)
    }
    weights = {key: x for key, x in tensors.items() if not key.endswith(SCALE_SUFFIX)}
    return weights | {key: weights[key].float() * x.float() for key, x in scales.items()}


def _build_layer_config(name: str, fields: dict[str, Any]) -> PreTrainedConfig:
    kind = fields.get("model_type", "llama")
    try:
        own = {k: v for k, v in fields.items() if k not in ("model_type", "architectures")}
        return AutoConfig.for_model(kind, **own)
    except Exception as error:  # transformers raises many kinds
        raise RefusedError(
            f"{name} has layers of {kind!r:.40}, which cannot be built: {to_one_line(error)}"
        ) from None


def _extend_context(network: PairsNetwork, text: PreTrainedConfig) -> None:
    """Set a draft's context length to its target's, unless the draft's rotary factors depend on the
    sequence length. Call this after the network is built, so that the network's rotary factors stay
    the same."""
    config: Any = network.config
    rope: dict[str, Any] = getattr(config, "rope_parameters", None) or {}
    kinds = [rope, *(each for each in rope.values() if isinstance(each, dict))]
    max_positions = getattr(text, "max_position_embeddings", None)
    if max_positions and not any(
        each.get("rope_type") in ("dynamic", "longrope") for each in kinds
    ):
        config.max_position_embeddings = max_positions


def require_verifier(name: str, config: dict[str, Any], target: PreTrainedModel) -> None:
    """Raise RefusedError if a draft's config names the architecture of another target."""
    verifier = (config.get("speculators_config") or {}).get("verifier") or {}
    kinds = [kind for kind in verifier.get("architectures") or [] if kind]
    own = {*(target.config.architectures or []), type(target).__name__}
    if kinds and not own & set(kinds):
        named = verifier.get("name_or_path") or "another model"
        raise RefusedError(
            f"{name} drafts for {named} ({kinds[0]}), but the target is a "
            f"{type(target).__name__}; give a draft for this target"
        )


def _parse_taps(
    name: str, config: dict[str, Any], count: int, layers: int
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the taps and, if the config is ambiguous, the other possible taps.

    The config's layer ids may mean the inputs or the outputs of layers. Wrong taps do not cause
    errors, but only lower the number of accepted tokens.
    """
    own = config.get("eagle_config") or {}
    ids = config.get("eagle_aux_hidden_state_layer_ids")
    ids = ids or own.get("eagle_aux_hidden_state_layer_ids") or config.get("target_layer_ids")
    if not ids:
        ids = list(get_default_taps(layers))
        if count != len(ids):
            raise RefusedError(
                f"{name} takes hidden states of {count} layers, but its config does not list the "
                "layers; give a complete config"
            )
        return tuple(ids), ()
    ids = [i + layers + 1 if i < 0 else i for i in ids]  # negative ids count from the end
    if len(ids) != count or not 0 <= min(ids) <= max(ids) <= layers:
        raise RefusedError(
            f"{name} takes hidden states of layers {ids} and has a projection for {count} layers, "
            f"but the target has {layers} layers; give a draft for this target"
        )
    inputs, outputs = tuple(ids), tuple(i + 1 for i in ids)
    if config.get("draft_taps") == "inputs":  # written by foretoken's own training
        return inputs, ()
    if "transformer_layer_config" in config or max(ids) == layers:
        return inputs, outputs if max(outputs) <= layers else ()
    return (outputs, inputs) if ids[0] == 1 else (inputs, outputs)


def get_default_taps(layers: int) -> tuple[int, ...]:
    """Return the taps of an EAGLE-3 draft whose config does not list them."""
    return min(2, layers), layers // 2, max(0, layers - 3)


def build_eagle_network(
    layers: PreTrainedConfig,
    config: dict[str, Any],
    num_outputs: int,
    width: int,
    num_taps: int,
) -> PairsNetwork:
    """Return EAGLE-3's network with random weights. The network has `num_outputs` output tokens and
    takes hidden states of size `width` from `num_taps` taps."""
    model, H = _build_template_model(layers), layers.hidden_size
    decoder: Any = model.get_decoder()
    norm_of, eps = type(decoder.norm), layers.rms_norm_eps
    norms = [norm_of(num_taps * width, eps=eps)] * bool(config.get("norm_before_fc"))
    norms += [norm_of(width, eps=eps) for _ in range(num_taps if config.get("fc_norm") else 0)]
    join = TapProjection(nn.Linear(num_taps * width, H, bias=False), nn.ModuleList(norms))
    before = bool(config.get("norm_before_residual"))
    first, *more = cast(Any, decoder.layers)
    head, normed = nn.Linear(H, num_outputs, bias=False), bool(config.get("norm_output"))
    return PairsNetwork(
        model.config,
        H,
        EagleLayer(first, H, H, norm_before_residual=before),
        more,
        decoder.rotary_emb,
        head if normed else NormedHead(decoder.norm, head),
        join,
        decoder.norm if normed else None,
    )


def _build_template_model(config: PreTrainedConfig) -> PreTrainedModel:
    """Return a model with a tiny vocabulary, from which the layers are taken."""
    config = copy.deepcopy(config)
    config.vocab_size = TEMPLATE_VOCAB_SIZE
    config.pad_token_id = config.bos_token_id = config.eos_token_id = None
    return AutoModelForCausalLM.from_config(config, trust_remote_code=False).float().eval()


def _to_file_key(key: str, *, before: bool) -> str:
    """Return the name of a weight of the network in speculators' layout. before: True if a single
    norm precedes the projection of the taps; False if each tap has its own norm."""
    patterns = [
        (r"^first\.", "layers.0."),
        (r"^more\.(\d+)\.", lambda m: f"layers.{int(m[1]) + 1}."),
        (r"^head\.norm\.", "norm."),
        (r"^head\.(linear\.)?", "lm_head."),
        (r"^join\.norms\.", "input_norm.!" if before else "fc_norm."),
        (r"^join\.", ""),
    ]
    for pattern, place in patterns:
        key, found = re.subn(pattern, cast(Any, place), key)
        if found:
            break
    return key.replace("!0.", "")


def _rename_key(key: str, names: tuple[tuple[str, str], ...]) -> str:
    for old, new in names:
        if key.startswith(old):
            key = new + key[len(old) :]
    return key


def _get_tensor(name: str, tensors: Tensors, key: str) -> Tensor:
    if key not in tensors:
        raise RefusedError(f"{name} has no weights for {key}; give a complete draft")
    return tensors[key]


def _load_weights(
    name: str, network: PairsNetwork, tensors: Tensors, to_file_key: Callable[[str], str]
) -> None:
    """Copy tensors into the network's weights. to_file_key: returns a weight's name in the files.
    Raises RefusedError for missing weights, wrong shapes and non-finite values."""
    own = network.state_dict()
    _require_shapes(name, own, tensors, to_file_key)
    for key, place in own.items():
        require_finite_floats(name, to_file_key(key), tensors[to_file_key(key)])
        place.copy_(tensors[to_file_key(key)])
    network.requires_grad_(False)


def _require_shapes(
    name: str, own: Tensors, tensors: Tensors, to_file_key: Callable[[str], str]
) -> None:
    for own_key, place in own.items():
        key = to_file_key(own_key)
        x = _get_tensor(name, tensors, key)
        if x.shape != place.shape:
            raise RefusedError(
                f"{name} has {key} of shape {tuple(x.shape)}, but its config needs "
                f"{tuple(place.shape)}; give the config and the weights of one draft"
            )


def require_finite_floats(name: str, key: str, x: Tensor) -> None:
    """Raise RefusedError for a weight that is not float32, float16 or bfloat16, or that has
    non-finite values."""
    if not x.is_floating_point() or x.itemsize == 1:  # of one byte: float8 without scales
        raise RefusedError(
            f"{name} has {key} in {str(x.dtype).removeprefix('torch.')}; give weights in "
            "float32, float16 or bfloat16"
        )
    if not bool(x.isfinite().all()):
        raise RefusedError(f"{name} has non-finite values in {key}; download {name} again")


def _get_embedding(name: str, tensors: Tensors, H: int, text: PreTrainedConfig) -> Tensor | None:
    """Return the draft's own embeddings of all target tokens; None if the draft uses the target's
    embeddings."""
    key, V = "embed_tokens.weight", text.vocab_size
    own = tensors.get(key)
    width = text.hidden_size if own is None else own.shape[1]
    if width != H:
        whose = "the target's" if own is None else "its own"
        raise RefusedError(
            f"{name} takes embeddings of size {H}, but {whose} have size {width}; give a complete "
            "draft"
        )
    if own is None:
        return None
    if len(own) < V:
        raise RefusedError(
            f"{name} has embeddings of {len(own)} tokens, but the target has {V} tokens; give "
            "a draft for this target"
        )
    require_finite_floats(name, key, own)
    return own


def _compute_output_ids(name: str, tensors: Tensors, V: int) -> Tensor | None:
    """Return the target's id of each output of the draft, `[Vd]`; None if each id is the output's
    index. The files' d2t has the differences between the ids and the indices."""
    d2t = tensors.get("d2t")
    num_outputs = len(tensors.get("lm_head.weight", range(V) if d2t is None else d2t))
    if d2t is None:
        if num_outputs != V:
            raise RefusedError(
                f"{name} has {num_outputs} outputs for a target of {V} tokens, but no d2t with "
                "their token ids; give a complete draft"
            )
        return None
    if d2t.shape != (num_outputs,):
        raise RefusedError(
            f"{name} has a d2t of shape {tuple(d2t.shape)} for {num_outputs} outputs; give a "
            "complete draft"
        )
    ids = torch.arange(num_outputs) + d2t.long()
    if int(ids.max()) >= V or int(ids.min()) < 0:
        raise RefusedError(
            f"{name} proposes ids from {int(ids.min())} to {int(ids.max())}, but the target has "
            f"{V} tokens; give a draft for this target"
        )
    if len(ids.unique()) < num_outputs:
        raise RefusedError(f"{name} has two outputs for one token in d2t; give another draft")
    require_consistent_ids(name, ids, tensors.get("t2d"))
    return ids


def require_consistent_ids(name: str, ids: Tensor, t2d: Tensor | None) -> None:
    """Raise RefusedError if `ids`, the target's id of each output from the file's d2t, differ from
    the ids in the file's t2d, a mask of the target's tokens. t2d None: nothing is checked."""
    named = ids if t2d is None else t2d.cpu().nonzero().flatten()
    problem = f"{name} has a d2t that contradicts its t2d"
    if len(named) != len(ids):
        raise RefusedError(
            f"{problem}: d2t has {len(ids)} tokens, but t2d has {len(named)}; give a complete draft"
        )
    if len(wrong := (named != ids).nonzero()):
        i = int(wrong[0])
        raise RefusedError(
            f"{problem}: output {i} is token {int(ids[i])} by d2t, but token {int(named[i])} by "
            "t2d; give a complete draft"
        )


def map_mtp_names(keys: Iterable[str], layers: int) -> dict[str, str]:
    """Return a dict from names in the target's files to names in transformers' MtpLayer, for all
    weights of multi-token prediction. The names of further layers of a stack begin with "more.0.",
    "more.1." and so on. layers: the target's number of layers.

    The layers of a stack are numbered after the target's layers. If layers are numbered from 0 on
    (`mtp.layers.0`), the others are ignored: vLLM runs only the first one, for all draft tokens.
    """
    where = re.compile(
        r"(?:model\.)?(?:language_model\.)?(?:mtp|mtp_layers\.0|layers\.(\d+))\.(?!layers\.[1-9])(.+)"
    )
    names: dict[str, str] = {}
    for key in keys:
        match = where.fullmatch(key)
        depth = int(match[1]) - layers if match and match[1] else 0
        if match and depth >= 0 and not match[2].startswith(SHARED_PREFIXES):
            own = _rename_key(match[2], MTP_PREFIXES)
            own = own if own.startswith(MTP_LAYER_PREFIXES) else f"mtp_block.{own}"
            names[key] = f"more.{depth - 1}.{own}" if depth else own
    return names


def build_mtp(name: str, tensors: Tensors, target: PreTrainedModel, head: Tensor) -> PairsDraft:
    """Build the drafter from the target's layers for multi-token prediction.

    name: The target's name, for error messages.
    tensors: The target's weights, or only the weights of these layers.
    target: The target, which may be on the meta device.
    head: The weights of the target's output layer, `[V, H]`.

    Raises RefusedError if the target has no such layers, or some of their weights are missing.
    """
    text = target.config.get_text_config(decoder=True)
    names = map_mtp_names(tensors, text.num_hidden_layers)
    named = {own: _to_embedding_first(key, tensors[key]) for key, own in names.items()}
    if not named:
        raise RefusedError(
            f"{name} has no layer for multi-token prediction; give another draft than 'mtp'"
        )
    if "mtp_block.enorm.weight" in named:
        raise RefusedError(
            f"{name} has layers for multi-token prediction in the layout of MiMo-V2 "
            "(mtp.layers.0.enorm), which is not supported; give another draft than 'mtp'"
        )
    count = _count_mtp_layers(name, text, names)
    config = _build_mtp_config(text, count)
    decoder: Any = target.get_decoder()
    try:
        block = cast(Any, type(get_decoder_layers(target)[-1]))
        norm = next(
            type(x) for n, x in get_decoder_layers(target)[-1].named_modules() if "norm" in n
        )
        layers: list[Any] = [
            MtpLayer(config, block, norm, k, "post_norm.weight" in named).float().eval()
            for k in range(count)
        ]
        rotary = type(decoder.rotary_emb)(config) if hasattr(decoder, "rotary_emb") else None
    except Exception as error:  # a family's code may raise any exception
        raise RefusedError(
            f"the layer for multi-token prediction of {name} cannot be built: {to_one_line(error)}"
        ) from None
    num_outputs = MAX_HEAD_ROWS if len(head) > 2 * MAX_HEAD_ROWS else len(head)
    output = nn.Linear(head.shape[1], num_outputs, bias=False)
    kind = MtpStackNetwork if count > 1 else PairsNetwork
    network = kind(config, text.hidden_size, layers[0], layers[1:], rotary, output)
    own = {**_fuse_experts(named), "head.weight": head[:num_outputs]}
    _load_weights(name, network, own, lambda key: key.removeprefix("first."))
    ids = torch.arange(num_outputs) if num_outputs < len(head) else None
    return PairsDraft(network, (FINAL_TAP,), (), ids, None)


def _to_embedding_first(key: str, weight: Tensor) -> Tensor:
    """Return a weight of an MTP layer, as transformers' MtpLayer takes it. MiMo's projection takes
    the hidden state before the embedding, unlike all others (vLLM's mimo_mtp.py)."""
    if not key.startswith("model.mtp_layers.") or not key.endswith("input_proj.weight"):
        return weight
    return torch.cat(weight.chunk(2, 1)[::-1], 1)


def _count_mtp_layers(name: str, text: PreTrainedConfig, names: dict[str, str]) -> int:
    """Return the number of layers in the files, whose weights have these names. Raises RefusedError
    if the config states more layers that are numbered after the target's."""
    count = 1 + max(
        (int(own.split(".")[1]) + 1 for own in names.values() if own.startswith("more.")), default=0
    )
    numbered = any(f"layers.{text.num_hidden_layers}." in key for key in names)
    stated = getattr(text, "num_mtp_layers", None) or getattr(text, "num_nextn_predict_layers", 0)
    if numbered and (stated or 0) > count:
        raise RefusedError(
            f"{name} has {stated} layers for multi-token prediction in its config, but {count} in "
            "its files; give complete files, or another draft than 'mtp'"
        )
    return count


def _build_mtp_config(text: PreTrainedConfig, count: int) -> PreTrainedConfig:
    """Return a copy of the target's config for `count` layers with full attention, or with the
    attention that the config states for its layers for multi-token prediction."""
    config = copy.deepcopy(text)
    config.num_hidden_layers = count
    for name in ("layer_types", "mlp_layer_types"):
        own = getattr(text, f"mtp_{name}", None)
        if getattr(text, name, None):
            kind = "full_attention" if name == "layer_types" else getattr(text, name)[-1]
            setattr(config, name, own[:count] if own else [kind] * count)
    if hasattr(config, "first_k_dense_replace"):
        config.first_k_dense_replace = 0
    return config


def _fuse_experts(tensors: Tensors) -> Tensors:
    """Return the tensors with the weights of separate experts fused into one tensor for each
    projection, as in transformers."""
    experts: dict[str, dict[tuple[int, str], Tensor]] = {}
    fused: Tensors = {}
    for key, x in tensors.items():
        if match := EXPERT_WEIGHT.match(key):
            experts.setdefault(match[1], {})[int(match[2]), match[3]] = x
        else:
            fused[key] = x
    for key, parts in experts.items():
        count = 1 + max(i for i, _ in parts)
        both = [torch.cat([parts[i, "gate"], parts[i, "up"]]) for i in range(count)]
        fused[f"{key}.gate_up_proj"] = torch.stack(both)
        fused[f"{key}.down_proj"] = torch.stack([parts[i, "down"] for i in range(count)])
    return fused
