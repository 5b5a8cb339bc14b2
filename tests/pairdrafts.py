"""Small random drafts over pairs in the layouts of their files, EAGLE-3's forward written out, and
what a drafter over pairs must have drawn its draft tokens from."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn import functional as F
from transformers import PreTrainedModel
from transformers.modeling_layers import MtpLayer

from foretoken.drafters.base import Draft
from foretoken.drafters.mtp_stacks import MtpStackDrafter
from foretoken.drafters.pairs import PairsDrafter
from foretoken.models.base import Model
from foretoken.models.graph_pairs import GraphPairModel
from foretoken.models.graphs import GraphModel
from foretoken.models.hidden_states import FINAL_TAP
from foretoken.models.stock import pair_files
from foretoken.models.stock.model import CausalModel
from foretoken.models.stock.mtp_stacks import MtpStackNetwork, StockMtpStack
from foretoken.models.stock.pair_files import PairsDraft
from foretoken.models.stock.pairs import StockPairModel
from foretoken.models.stock.taps import get_decoder_layers
from foretoken.sampling.distributions import SamplingParams, probabilities
from foretoken.sampling.draw import Draw

H, HEADS, KEYS, WIDTH, INNER, EPS = 32, 4, 2, 16, 48, 1e-6  # of the drafts' layers
LAYER = {
    "model_type": "llama",
    "hidden_size": H,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KEYS,
    "head_dim": WIDTH,
    "intermediate_size": INNER,
    "rms_norm_eps": EPS,
    "max_position_embeddings": 64,
}
WITHIN = 1e-4  # of each other: transformers has norms and rotary parts in float32
Tensors = dict[str, Tensor]


@dataclass(frozen=True)
class EagleFile:
    """An EAGLE-3 draft in speculators' layout."""

    config: dict[str, Any]
    tensors: Tensors

    def with_config(self, **entries: Any) -> EagleFile:
        return replace(self, config=self.config | entries)

    def with_tensors(self, **tensors: Tensor | None) -> EagleFile:
        """Some replaced, by names with __ for dots; None: left out."""
        named = {name.replace("__", "."): x for name, x in tensors.items()}
        every: dict[str, Tensor | None] = {**self.tensors, **named}
        return replace(self, tensors={name: x for name, x in every.items() if x is not None})

    def original(self, **entries: Any) -> EagleFile:
        """The same in the original layout, where the ids may be given in another sense."""
        config = {k: v for k, v in self.config.items() if not k.startswith("speculators")}
        taps = config.pop("eagle_aux_hidden_state_layer_ids")
        config |= config.pop("transformer_layer_config")
        config |= {"architectures": ["LlamaForCausalLMEagle3"]}
        config |= {"eagle_config": {"eagle_aux_hidden_state_layer_ids": taps}} | entries
        named = {name.replace("layers.0.", "midlayer."): x for name, x in self.tensors.items()}
        return EagleFile(config, named)

    def save(self, path: Path) -> Path:
        path.mkdir(parents=True)
        save_file({name: x.contiguous() for name, x in self.tensors.items()}, path / WEIGHTS)
        (path / "config.json").write_text(json.dumps(self.config))
        return path

    def read(self, target: PreTrainedModel) -> PairsDraft:
        rows: Any = target.get_output_embeddings()
        return pair_files.build_eagle(
            "the draft", self.config, self.tensors, target, lambda: rows.weight.detach()
        )


WEIGHTS = "model.safetensors"


def eagle_file(
    V: int,
    taps: tuple[int, ...],
    kept: list[int] | None = None,
    layers: int = 1,
    width: int = H,
    seed: int = 0,
    **switches: Any,
) -> EagleFile:
    """Random, and far from flat. kept: the target's ids that it knows, None: all; width: of the
    target's states."""
    random = torch.Generator().manual_seed(seed)

    def weight(*shape: int, scale: float = 0.4) -> Tensor:
        return torch.randn(*shape, generator=random) * scale

    def norm(n: int) -> Tensor:
        return 1 + weight(n)

    rows = V if kept is None else len(kept)
    tensors = {
        "fc.weight": weight(H, len(taps) * width),
        "norm.weight": norm(H),
        "lm_head.weight": weight(rows, H),
    }
    if kept is not None:
        tensors["d2t"] = torch.tensor(kept) - torch.arange(rows)
        tensors["t2d"] = torch.isin(torch.arange(V), torch.tensor(kept))
    if switches.get("norm_before_fc"):
        tensors["input_norm.weight"] = norm(len(taps) * width)
    for i in range(len(taps) if switches.get("fc_norm") else 0):
        tensors[f"fc_norm.{i}.weight"] = norm(width)
    for i in range(layers):
        reads = H if i else 2 * H
        parts = {
            "self_attn.q_proj": weight(HEADS * WIDTH, reads),
            "self_attn.k_proj": weight(KEYS * WIDTH, reads),
            "self_attn.v_proj": weight(KEYS * WIDTH, reads),
            "self_attn.o_proj": weight(H, HEADS * WIDTH),
            "input_layernorm": norm(H),
            "post_attention_layernorm": norm(H),
            "mlp.gate_proj": weight(INNER, H),
            "mlp.up_proj": weight(INNER, H),
            "mlp.down_proj": weight(H, INNER),
        }
        parts |= {} if i else {"hidden_norm": norm(H)}
        tensors |= {f"layers.{i}.{name}.weight": x for name, x in parts.items()}
    config = {
        "speculators_model_type": "eagle3",
        "architectures": ["Eagle3Speculator"],
        "transformer_layer_config": {**LAYER, "num_hidden_layers": layers, "vocab_size": V},
        "draft_vocab_size": rows,
        "eagle_aux_hidden_state_layer_ids": list(taps),
        **switches,
    }
    return EagleFile(config, tensors)


def rms(x: Tensor, weight: Tensor, eps: float = EPS) -> Tensor:
    return x * (x.pow(2).mean(-1, keepdim=True) + eps).rsqrt() * weight


def turned(x: Tensor, theta: float = 10000.0) -> Tensor:
    """Rotary embeddings `[n, heads, width]` of positions 0, 1, .."""
    half = x.shape[-1] // 2
    angles = torch.arange(len(x)).double()[:, None] * theta ** -(torch.arange(half).double() / half)
    cos, sin = angles.cos()[:, None], angles.sin()[:, None]
    a, b = x.split(half, -1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)


def attended(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Causal attention `[n, heads, width]` without anything clever -> `[n, heads * width]`."""
    n, heads, width = q.shape
    k, v = (x.repeat_interleave(heads // x.shape[1], 1) for x in (k, v))
    scores = torch.einsum("ihd,jhd->hij", q, k) / width**0.5
    scores = scores.masked_fill(torch.ones(n, n).triu(1).bool(), -torch.inf)
    return torch.einsum("hij,jhd->ihd", scores.softmax(-1), v).reshape(n, -1)


def gated(w: Tensors, x: Tensor) -> Tensor:
    """The feed-forward part of a Llama."""
    inner = F.silu(x @ w["mlp.gate_proj"].T) * (x @ w["mlp.up_proj"].T)
    return inner @ w["mlp.down_proj"].T


def part(tensors: Tensors, prefix: str) -> Tensors:
    """The weights behind this prefix, in float64."""
    some = {k: x for k, x in tensors.items() if k.startswith(prefix) and k.endswith(".weight")}
    return {k[len(prefix) :].removesuffix(".weight"): x.double() for k, x in some.items()}


def eagle_logits(
    file: EagleFile, embedding: Tensor, states: Tensor, tokens: list[int], guesses: list[int]
) -> Tensor:
    """Logits `[G, Vd]` for every draft token, given those before it: all pairs read anew for each,
    no cache. states: the target's, `[n, taps * width]`; tokens: those behind them."""
    w, on = part(file.tensors, ""), file.config
    g = states.double()
    if on.get("norm_before_fc"):
        g = rms(g, w["input_norm"])
    if on.get("fc_norm"):
        parts = g.chunk(len(on["eagle_aux_hidden_state_layer_ids"]), -1)
        g = torch.cat([rms(x, w[f"fc_norm.{i}"]) for i, x in enumerate(parts)], -1)
    g = g @ w["fc"].T
    made = []
    for guess in guesses:
        out = _eagle_layers(file, embedding.double()[tokens], g)
        normed = rms(out, w["norm"])
        made.append(normed[-1] @ w["lm_head"].T)
        g = torch.cat([g, (normed if on.get("norm_output") else out)[-1:]])
        tokens = [*tokens, guess]
    return torch.stack(made)


def _eagle_layers(file: EagleFile, embedded: Tensor, g: Tensor) -> Tensor:
    for i in range(file.config["transformer_layer_config"]["num_hidden_layers"]):
        w = part(file.tensors, f"layers.{i}.")
        x = rms(g, w["input_layernorm" if i else "hidden_norm"])
        if not i:
            g = x if file.config.get("norm_before_residual") else g
            x = torch.cat([rms(embedded, w["input_layernorm"]), x], -1)
        q, k, v = ((x @ w[f"self_attn.{n}_proj"].T).view(len(x), -1, WIDTH) for n in "qkv")
        g = g + attended(turned(q), turned(k), v) @ w["self_attn.o_proj"].T
        g = g + gated(w, rms(g, w["post_attention_layernorm"]))
    return g


@cache
def copy_of(network: PreTrainedModel) -> PreTrainedModel:
    """To be asked for states: transformers' hooks for them stay in a model."""
    return copy.deepcopy(network)


@torch.no_grad()
def states_of(
    network: PreTrainedModel,
    text: list[int],
    taps: tuple[int, ...],
    source: list[int] | None = None,
) -> Tensor:
    """The target's states `[n, taps * width]`, by one full forward of the model itself. source: the
    input of an encoder."""
    network, last = copy_of(network), list[Any]()
    layers: Any = get_decoder_layers(network)
    hook = layers[-1].register_forward_hook(lambda part, args, made: last.append(made))
    ids = torch.tensor([text], device=network.device)
    options: dict[str, Any] = {"use_cache": False, "output_hidden_states": True}
    if source is None:
        made = network(input_ids=ids, **options).hidden_states
    else:
        read = torch.tensor([source], device=network.device)
        answer = network(input_ids=read, decoder_input_ids=ids, **options)
        made = answer.decoder_hidden_states
    hook.remove()
    behind = last[0][0] if isinstance(last[0], tuple) else last[0]
    every = {**dict(enumerate(made[:-1])), len(layers): behind, FINAL_TAP: made[-1]}
    return torch.cat([every[j].reshape(len(text), -1) for j in taps], -1)


@dataclass
class EagleLaw:
    """The logits `[G, V]` that an EAGLE-3 draft must have drawn from behind a text of `network`'s,
    given its own draft tokens."""

    network: PreTrainedModel
    file: EagleFile
    taps: tuple[int, ...]
    known: dict[Any, Tensor] = field(default_factory=dict)

    @torch.no_grad()
    def __call__(self, text: list[int], guesses: list[int]) -> Tensor:
        key = *text, -1, *guesses
        if key not in self.known:
            self.known[key] = self._made(text, guesses)
        return self.known[key]

    def _made(self, text: list[int], guesses: list[int]) -> Tensor:
        own: Any = self.network.get_input_embeddings()
        embedding = self.file.tensors.get("embed_tokens.weight", own.weight)
        states = states_of(self.network, text[:-1], self.taps)
        made = eagle_logits(self.file, embedding, states, text[1:], guesses)
        return wide(made, self.file.tensors.get("d2t"), len(own.weight))


def wide(logits: Tensor, d2t: Tensor | None, V: int) -> Tensor:
    """Over the target's ids, of which a draft may know some."""
    every = logits.new_full((len(logits), V), -torch.inf)
    ids = torch.arange(logits.shape[1])
    every[:, ids if d2t is None else ids + d2t] = logits
    return every


Law = Callable[[list[int], list[int]], Tensor]


@dataclass
class Drafted:
    """What a drafter made behind a text of its rows."""

    text: list[int]
    params: SamplingParams
    guesses: list[int]
    q: Tensor | None  # [G, V]


def noted(drafter: PairsDrafter) -> list[Drafted]:
    """What the drafter proposes from now on."""
    notes: list[Drafted] = []
    propose = drafter.propose

    def noting(gamma: list[int], draw: Draw) -> Draft:
        texts = [list(seq.tokens) for seq in drafter.seqs]
        draft = propose(gamma, draw)
        for b, n in enumerate(draft.lengths.tolist()):
            if n:
                q = None if draft.q is None else draft.q[b, :n].clone()
                notes.append(Drafted(texts[b], draw.params[b], draft.tokens[b, :n].tolist(), q))
        return draft

    drafter.propose = noting  # pyright: ignore[reportAttributeAccessIssue]
    return notes


def require_true(notes: list[Drafted], law: Law, within: float = WITHIN) -> None:
    """Every draft token was drawn from what a fresh read of its row's text gives, and nothing else:
    no stale keys, no pair out of its place, nothing of the rows beside it."""
    assert notes, "nothing was drafted"
    for note in notes:
        logits = law(note.text, note.guesses)
        if note.q is None:
            chosen = logits.gather(1, torch.tensor(note.guesses)[:, None])[:, 0]
            off = float((logits.amax(1) - chosen).max()) / 10
        else:
            p = torch.cat([probabilities(row[None], note.params) for row in logits])
            off = float((note.q - p).abs().max())
        assert off < within, f"off by {off} behind {note.text} with {note.guesses}"


def tapped(network: PreTrainedModel, taps: tuple[int, ...], kind: type[Model] = CausalModel) -> Any:
    target = kind(network)
    target.tap(taps)
    return target


def pairs_drafter(network: PreTrainedModel, draft: PairsDraft) -> PairsDrafter:
    """The draft on torch, in the precision of its target."""
    made = draft.network.to(network.dtype)
    target, words = tapped(network, draft.taps), embedding(network, draft)
    if isinstance(made, MtpStackNetwork):
        return MtpStackDrafter(target, StockMtpStack(made), words, draft.ids)
    return PairsDrafter(target, StockPairModel(made), words, draft.ids)


def on_graphs(network: PreTrainedModel, draft: PairsDraft) -> PairsDrafter:
    """Target and draft in fixed shapes."""
    target = tapped(network, draft.taps, GraphModel)
    decoder = GraphPairModel(draft.network.to(network.dtype))
    return PairsDrafter(target, decoder, embedding(network, draft), draft.ids)


def on_native(network: PreTrainedModel, draft: PairsDraft) -> PairsDrafter:
    from foretoken.models.native.conversion import NativeConversion

    def model(of: PreTrainedModel, taps: tuple[int, ...] = ()) -> Any:
        return NativeConversion(None, "float32", lambda: copy.deepcopy(of), taps=taps).load_model()

    target, decoder = model(network, draft.taps), model(draft.network)
    kind = MtpStackDrafter if decoder.num_layers > 1 else PairsDrafter
    return kind(target, decoder, embedding(network, draft), draft.ids)


def embedding(network: PreTrainedModel, draft: PairsDraft) -> Any:
    own = draft.embedding
    return (
        network.get_input_embeddings() if own is None else torch.nn.Embedding.from_pretrained(own)
    )


def mtp_layer(network: PreTrainedModel, seed: int = 0, scale: float = 0.3) -> Tensors:
    """A random layer for multi-token prediction of the model's kind, by transformers' names."""
    text: Any = network.config.get_text_config(decoder=True)
    last: Any = get_decoder_layers(network)[-1]
    norm = next(type(x) for name, x in last.named_modules() if "norm" in name)
    made = MtpLayer(pair_files._build_mtp_config(text, 1), type(last), norm, 0)
    random = torch.Generator().manual_seed(seed)
    return {
        name: scale * torch.randn(x.shape, generator=random)
        for name, x in made.state_dict().items()
    }


def filed(layer: Tensors, style: str) -> Tensors:
    """The layer by the names of files: style "mtp", or the number of the target's layers."""
    names = {"enorm": "pre_fc_norm_embedding", "hnorm": "pre_fc_norm_hidden", "eh_proj": "fc"}
    names |= {"post_norm": "norm", "mtp_block": "layers.0"}
    if style != "mtp":
        names = {"post_norm": "shared_head.norm", "mtp_block.": ""}
    prefix = "mtp." if style == "mtp" else f"model.layers.{style}."
    made: Tensors = {}
    for key, x in layer.items():
        for old, new in names.items():
            if key.startswith(old):
                key = new + key[len(old) :]
                break
        if key.endswith("experts.gate_up_proj"):
            at = prefix + key.removesuffix("gate_up_proj")
            for e, both in enumerate(x):
                gate, up = both.chunk(2)
                made |= {f"{at}{e}.gate_proj.weight": gate, f"{at}{e}.up_proj.weight": up}
        elif key.endswith("experts.down_proj"):
            at = prefix + key.removesuffix("down_proj")
            made |= {f"{at}{e}.down_proj.weight": down for e, down in enumerate(x)}
        else:
            made[prefix + key] = x
    return made


def mtp_stack(network: PreTrainedModel, count: int) -> tuple[list[Tensors], Tensors]:
    """Random layers, and the same by the names of files, numbered behind the target's layers."""
    layers, first = [mtp_layer(network, k) for k in range(count)], len(get_decoder_layers(network))
    named = [filed(layer, str(first + k)) for k, layer in enumerate(layers)]
    return layers, {name: x for each in named for name, x in each.items()}


def add_mtp(folder: Path, tensors: Tensors) -> None:
    """The tensors join those of a target's folder."""
    every = load_file(folder / WEIGHTS) | {k: x.float().contiguous() for k, x in tensors.items()}
    save_file(every, folder / WEIGHTS, metadata={"format": "pt"})


def mtp_draft(network: PreTrainedModel, tensors: Tensors) -> PairsDraft:
    head: Any = network.get_output_embeddings()
    return pair_files.build_mtp("the target", tensors, network, head.weight.detach())
