"""Files of decoders over pairs, as networks: EAGLE-3 in speculators' layout and in the original one
(which SpecForge writes too), and layers for multi-token prediction among a target's own weights.

Knows names and shapes; it does not find or open files.
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

from foretoken.errors import RefusedError, one_line
from foretoken.models.hidden_states import FINAL_TAP
from foretoken.models.stock.pairs import EagleLayer, Join, NormedHead, PairsNetwork
from foretoken.models.stock.taps import layers_of

Tensors = dict[str, Tensor]
TINY = 8  # tokens of a model that is built for its layers alone
SCALE = "_scale"  # behind the name of a weight of eight bits
HEAD = 2**15  # rows of a reduced output layer: a larger one takes longer than the layer before it
# Names in speculators' layout, by those of the original one and of its variants
ORIGINAL = (("model.", ""), ("midlayer.", "layers.0."))
# Names of transformers' MtpLayer, by those of weights for multi-token prediction
MTP = (
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
PARTS = ("enorm.", "hnorm.", "eh_proj.", "post_norm.", "mtp_block.")
SHARED = ("embed_tokens.", "shared_head.head.")  # with the target
STACKED = re.compile(r"(?:model\.)?(?:mtp\.layers|mtp_layers)\.(\d+)\.")  # one of several
EXPERT = re.compile(r"^(.*experts)\.(\d+)\.(gate|up|down)_proj\.weight$")


class PairsDraft(NamedTuple):
    """A network that reads pairs, and what it is to be given."""

    network: PairsNetwork
    taps: tuple[int, ...]  # of the target
    others: tuple[int, ...]  # that its file may mean as well; (): it is clear
    ids: Tensor | None  # the target's ids that its outputs stand for
    embedding: Tensor | None  # its own embeddings; None: the target's


def eagle(
    name: str,
    config: dict[str, Any],
    tensors: Tensors,
    target: PreTrainedModel,
    head: Callable[[], Tensor],
) -> PairsDraft:
    """EAGLE-3's network. `target` may be on meta; head: gives the weights of its output layer,
    whose rows a draft reads that has none of its own. Raises RefusedError for a file that lacks
    something, or that is of another target."""
    fields = config.get("transformer_layer_config") or config
    layers = _config(name, fields)
    tensors = dequantized({_renamed(key, ORIGINAL): x for key, x in tensors.items()})
    H, fc = layers.hidden_size, _tensor(name, tensors, "fc.weight")
    text = target.config.get_text_config(decoder=True)
    width = config.get("target_hidden_size") or text.hidden_size
    if fc.shape[0] != H or width != text.hidden_size or fc.shape[1] % width:
        raise RefusedError(
            f"{name} reads states of {width} ({fc.shape[1]} at all taps), the target's have "
            f"{text.hidden_size}; give a draft for this target"
        )
    _require_tokens(name, fields, tensors, text.vocab_size)
    count = fc.shape[1] // width
    taps, others = _taps(name, config, count, text.num_hidden_layers)
    embedding = _embedding(name, tensors, H, text)
    ids = _ids(name, tensors, text.vocab_size)
    if "lm_head.weight" not in tensors and H == width:
        rows = head()
        tensors["lm_head.weight"] = rows if ids is None else rows[ids]
    rows = len(_tensor(name, tensors, "lm_head.weight"))
    filed = partial(_filed, before=bool(config.get("norm_before_fc")))
    if not 0 < layers.num_hidden_layers <= len(tensors):
        raise RefusedError(
            f"{name} has num_hidden_layers {layers.num_hidden_layers:g}, its files hold "
            f"{len(tensors)} weights; give a config and weights of one draft"
        )
    with torch.device("meta"):  # which a size in a config cannot fill
        shapes = eagle_network(layers, config, rows, width, count).state_dict()
    _require_shapes(name, shapes, tensors, filed)
    network = eagle_network(layers, config, rows, width, count)
    _let_reach(network, text)
    _load(name, network, tensors, filed)
    return PairsDraft(network, taps, others, ids, embedding)


def _require_tokens(name: str, fields: dict[str, Any], tensors: Tensors, V: int) -> None:
    """RefusedError where a draft was made for a target with another number of tokens."""
    for made in (fields.get("vocab_size", V), len(tensors.get("t2d", range(V)))):
        if made != V:
            raise RefusedError(
                f"{name} is for a target of {made!r:.40} tokens, this one has {V}; give a draft "
                "for this target"
            )


def dequantized(tensors: Tensors) -> Tensors:
    """Weights of eight bits as the numbers they stand for: each row with a scale of its own."""
    scales = {key[: -len(SCALE)]: x for key, x in tensors.items() if key.endswith(SCALE)}
    whole = {key: x for key, x in tensors.items() if not key.endswith(SCALE)}
    return whole | {key: whole[key].float() * x.float() for key, x in scales.items()}


def _config(name: str, fields: dict[str, Any]) -> PreTrainedConfig:
    """The config of the draft's own layers."""
    kind = fields.get("model_type", "llama")
    try:
        own = {k: v for k, v in fields.items() if k not in ("model_type", "architectures")}
        return AutoConfig.for_model(kind, **own)
    except Exception as error:  # the library raises many kinds
        raise RefusedError(
            f"{name} has layers of {kind!r:.40}, which cannot be built: {one_line(error)}"
        ) from None


def _let_reach(network: PairsNetwork, text: PreTrainedConfig) -> None:
    """Let a draft go on to the end of its target's context, unless its rotary factors depend on how
    long a text is. The network is built by then: its factors follow from its own context."""
    config: Any = network.config
    rope: dict[str, Any] = getattr(config, "rope_parameters", None) or {}
    kinds = [rope, *(each for each in rope.values() if isinstance(each, dict))]
    longest = getattr(text, "max_position_embeddings", None)
    if longest and not any(each.get("rope_type") in ("dynamic", "longrope") for each in kinds):
        config.max_position_embeddings = longest


def require_verifier(name: str, config: dict[str, Any], target: PreTrainedModel) -> None:
    """RefusedError where a draft's config, of whatever kind, names another kind of verifier."""
    verifier = (config.get("speculators_config") or {}).get("verifier") or {}
    kinds = [kind for kind in verifier.get("architectures") or [] if kind]
    own = {*(target.config.architectures or []), type(target).__name__}
    if kinds and not own & set(kinds):
        named = verifier.get("name_or_path") or "another model"
        raise RefusedError(
            f"{name} drafts for {named} ({kinds[0]}), the target is a {type(target).__name__}; "
            "give a draft for this target"
        )


def _taps(
    name: str, config: dict[str, Any], count: int, layers: int
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The taps, and others where the file may mean these as well: its ids number layers whose
    inputs are read, or whose outputs are, and nothing fails where they are taken wrongly."""
    own = config.get("eagle_config") or {}
    ids = config.get("eagle_aux_hidden_state_layer_ids")
    ids = ids or own.get("eagle_aux_hidden_state_layer_ids") or config.get("target_layer_ids")
    if not ids:
        ids = list(usual_taps(layers))
        if count != len(ids):
            raise RefusedError(
                f"{name} reads states at {count} layers and does not say which; give a complete "
                "config"
            )
        return tuple(ids), ()
    ids = [i + layers + 1 if i < 0 else i for i in ids]  # from the end, as indices are
    if len(ids) != count or not 0 <= min(ids) <= max(ids) <= layers:
        raise RefusedError(
            f"{name} reads behind layers {ids} by a product for {count}, the target has {layers} "
            "layers; give a draft for this target"
        )
    inputs, outputs = tuple(ids), tuple(i + 1 for i in ids)
    if config.get("draft_taps") == "inputs":  # as drafts say that were trained here
        return inputs, ()
    if "transformer_layer_config" in config or max(ids) == layers:
        return inputs, outputs if max(outputs) <= layers else ()
    return (outputs, inputs) if ids[0] == 1 else (inputs, outputs)


def usual_taps(layers: int) -> tuple[int, ...]:
    """Return the taps of an EAGLE-3 draft whose file names none."""
    return min(2, layers), layers // 2, max(0, layers - 3)


def eagle_network(
    layers: PreTrainedConfig,
    config: dict[str, Any],
    rows: int,
    width: int,
    taps: int,
) -> PairsNetwork:
    """EAGLE-3's network with random weights: `rows` of the output layer, states of `width` at so
    many taps."""
    model, H = _small(layers), layers.hidden_size
    decoder: Any = model.get_decoder()
    norm_of, eps = type(decoder.norm), layers.rms_norm_eps
    norms = [norm_of(taps * width, eps=eps)] * bool(config.get("norm_before_fc"))
    norms += [norm_of(width, eps=eps) for _ in range(taps if config.get("fc_norm") else 0)]
    join = Join(nn.Linear(taps * width, H, bias=False), nn.ModuleList(norms))
    before = bool(config.get("norm_before_residual"))
    first, *more = cast(Any, decoder.layers)
    head, normed = nn.Linear(H, rows, bias=False), bool(config.get("norm_output"))
    return PairsNetwork(
        model.config,
        H,
        EagleLayer(first, H, H, before=before),
        more,
        decoder.rotary_emb,
        head if normed else NormedHead(decoder.norm, head),
        join,
        decoder.norm if normed else None,
    )


def _small(config: PreTrainedConfig) -> PreTrainedModel:
    """A model of a few tokens, for its layers."""
    config = copy.deepcopy(config)
    config.vocab_size = TINY
    config.pad_token_id = config.bos_token_id = config.eos_token_id = None
    return AutoModelForCausalLM.from_config(config, trust_remote_code=False).float().eval()


def _filed(key: str, *, before: bool) -> str:
    """The name in speculators' layout of a weight of the network; before: whether the norm before
    the product of states is a single one."""
    places = [
        (r"^first\.", "layers.0."),
        (r"^more\.(\d+)\.", lambda m: f"layers.{int(m[1]) + 1}."),
        (r"^head\.norm\.", "norm."),
        (r"^head\.(linear\.)?", "lm_head."),
        (r"^join\.norms\.", "input_norm.!" if before else "fc_norm."),
        (r"^join\.", ""),
    ]
    for pattern, place in places:
        key, found = re.subn(pattern, cast(Any, place), key)
        if found:
            break
    return key.replace("!0.", "")


def _renamed(key: str, names: tuple[tuple[str, str], ...]) -> str:
    for old, new in names:
        if key.startswith(old):
            key = new + key[len(old) :]
    return key


def _tensor(name: str, tensors: Tensors, key: str) -> Tensor:
    if key not in tensors:
        raise RefusedError(f"{name} holds no weights for {key}; give a complete draft")
    return tensors[key]


def _load(name: str, network: PairsNetwork, tensors: Tensors, filed: Callable[[str], str]) -> None:
    """Fill in the weights, whose names are `filed`; RefusedError where some are missing, of another
    shape or invalid."""
    own = network.state_dict()
    _require_shapes(name, own, tensors, filed)
    for key, place in own.items():
        require_numbers(name, filed(key), tensors[filed(key)])
        place.copy_(tensors[filed(key)])
    network.requires_grad_(False)


def _require_shapes(name: str, own: Tensors, tensors: Tensors, filed: Callable[[str], str]) -> None:
    for own_key, place in own.items():
        key = filed(own_key)
        x = _tensor(name, tensors, key)
        if x.shape != place.shape:
            raise RefusedError(
                f"{name} holds {key} as {tuple(x.shape)}, its config says {tuple(place.shape)}; "
                "give a config and weights of one draft"
            )


def require_numbers(name: str, key: str, x: Tensor) -> None:
    """RefusedError for a weight that is none."""
    if not x.is_floating_point() or x.itemsize == 1:  # of one byte: without its scales
        raise RefusedError(
            f"{name} holds {key} in {str(x.dtype).removeprefix('torch.')}; give weights in "
            "float32, float16 or bfloat16"
        )
    if not bool(x.isfinite().all()):
        raise RefusedError(f"{name} holds invalid numbers in {key}; fetch it again")


def _embedding(name: str, tensors: Tensors, H: int, text: PreTrainedConfig) -> Tensor | None:
    """The draft's own embeddings, of all of the target's tokens; None where it has none."""
    key, V = "embed_tokens.weight", text.vocab_size
    own = tensors.get(key)
    width = text.hidden_size if own is None else own.shape[1]
    if width != H:
        whose = "the target's" if own is None else "its own"
        raise RefusedError(
            f"{name} reads embeddings of {H}, {whose} have {width}; give a complete draft"
        )
    if own is None:
        return None
    if len(own) < V:
        raise RefusedError(
            f"{name} has embeddings of {len(own)} tokens, the target has {V}; give a draft for "
            "this target"
        )
    require_numbers(name, key, own)
    return own


def _ids(name: str, tensors: Tensors, V: int) -> Tensor | None:
    """The target's ids of the draft's outputs, from differences; None where they are the same."""
    d2t = tensors.get("d2t")
    rows = len(tensors.get("lm_head.weight", range(V) if d2t is None else d2t))
    if d2t is None:
        if rows != V:
            raise RefusedError(
                f"{name} guesses among {rows} tokens and holds no d2t, which says which of the "
                f"target's {V} these are; give a complete draft"
            )
        return None
    if d2t.shape != (rows,):
        raise RefusedError(
            f"{name} holds d2t as {tuple(d2t.shape)} for {rows} outputs; give a complete draft"
        )
    ids = torch.arange(rows) + d2t.long()
    if int(ids.max()) >= V or int(ids.min()) < 0:
        raise RefusedError(
            f"{name} guesses ids from {int(ids.min())} to {int(ids.max())}, the target has {V} "
            "tokens; give a draft for this target"
        )
    if len(ids.unique()) < rows:
        raise RefusedError(f"{name} has two outputs for one token in d2t; give another draft")
    require_agreement(name, ids, tensors.get("t2d"))
    return ids


def require_agreement(name: str, ids: Tensor, t2d: Tensor | None) -> None:
    """RefusedError where the target's ids of a draft's outputs are not those that its file's mask
    of the target's tokens has, if it has one."""
    named = ids if t2d is None else t2d.cpu().nonzero().flatten()
    problem = f"{name} holds a d2t that contradicts its t2d"
    if len(named) != len(ids):
        raise RefusedError(
            f"{problem}: the one has {len(ids)} tokens, the other {len(named)}; give a complete "
            "draft"
        )
    if len(wrong := (named != ids).nonzero()):
        i = int(wrong[0])
        raise RefusedError(
            f"{problem}: by the one output {i} is token {int(ids[i])}, by the other token "
            f"{int(named[i])}; give a complete draft"
        )


def mtp_names(keys: Iterable[str], layers: int) -> dict[str, str]:
    """Names in transformers' MtpLayer of those weights of a target with so many layers that are of
    its layer for multi-token prediction, by their names in the target's files."""
    where = re.compile(
        rf"(?:model\.)?(?:language_model\.)?(?:mtp|mtp_layers\.0|layers\.{layers})\.(.+)"
    )
    names: dict[str, str] = {}
    for key in keys:
        match = where.fullmatch(key)
        if match and not match[1].startswith(SHARED):
            own = _renamed(match[1], MTP)
            names[key] = own if own.startswith(PARTS) else f"mtp_block.{own}"
    return names


def mtp(name: str, tensors: Tensors, target: PreTrainedModel, head: Tensor) -> PairsDraft:
    """The target's single layer for multi-token prediction. `target` may be on meta; head: its
    output layer's weights `[V, H]`. Raises RefusedError where there is none, or several."""
    text = target.config.get_text_config(decoder=True)
    count = getattr(text, "num_mtp_layers", None) or getattr(text, "mtp_num_hidden_layers", None)
    names = mtp_names(tensors, text.num_hidden_layers)
    named = {own: tensors[key] for key, own in names.items()}
    if not named:
        raise RefusedError(
            f"{name} holds no layer for multi-token prediction; give another draft than 'mtp'"
        )
    more = [int(m[1]) for key in tensors if (m := STACKED.match(key))]
    count = max(count or 1, 1 + max(more, default=0))
    if count > 1:
        raise RefusedError(
            f"{name} has {count} layers for multi-token prediction, one behind another, and drafts "
            "by a single one alone; give another draft than 'mtp'"
        )
    config = _mtp_config(text)
    decoder: Any = target.get_decoder()
    try:
        block = cast(Any, type(layers_of(target)[-1]))
        norm = next(type(x) for n, x in layers_of(target)[-1].named_modules() if "norm" in n)
        layer = MtpLayer(config, block, norm, 0, "post_norm.weight" in named)
        rotary = type(decoder.rotary_emb)(config) if hasattr(decoder, "rotary_emb") else None
    except Exception as error:  # a family's own code
        raise RefusedError(
            f"the layer for multi-token prediction of {name} cannot be built: {one_line(error)}"
        ) from None
    rows = HEAD if len(head) > 2 * HEAD else len(head)
    output = nn.Linear(head.shape[1], rows, bias=False)
    network = PairsNetwork(config, text.hidden_size, layer.float().eval(), [], rotary, output)
    own = {**_fused(named), "head.weight": head[:rows]}
    _load(name, network, own, lambda key: key.removeprefix("first."))
    ids = torch.arange(rows) if rows < len(head) else None
    return PairsDraft(network, (FINAL_TAP,), (), ids, None)


def _mtp_config(text: PreTrainedConfig) -> PreTrainedConfig:
    """The config of one layer with full attention, of the target's kind."""
    config = copy.deepcopy(text)
    config.num_hidden_layers = 1
    for name in ("layer_types", "mlp_layer_types"):
        own = getattr(text, f"mtp_{name}", None)
        if getattr(text, name, None):
            kinds = ["full_attention"] if name == "layer_types" else [getattr(text, name)[-1]]
            setattr(config, name, own or kinds)
    if hasattr(config, "first_k_dense_replace"):
        config.first_k_dense_replace = 0
    return config


def _fused(tensors: Tensors) -> Tensors:
    """Experts one by one as transformers keeps them: in one array for each product."""
    experts: dict[str, dict[tuple[int, str], Tensor]] = {}
    whole: Tensors = {}
    for key, x in tensors.items():
        if match := EXPERT.match(key):
            experts.setdefault(match[1], {})[int(match[2]), match[3]] = x
        else:
            whole[key] = x
    for key, parts in experts.items():
        count = 1 + max(i for i, _ in parts)
        both = [torch.cat([parts[i, "gate"], parts[i, "up"]]) for i in range(count)]
        whole[f"{key}.gate_up_proj"] = torch.stack(both)
        whole[f"{key}.down_proj"] = torch.stack([parts[i, "down"] for i in range(count)])
    return whole
