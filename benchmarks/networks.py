"""Random Llama, Qwen3.5 and T5 networks of any size, with peaked distributions and an agreement
that can be chosen.

A small part of each, the core, writes into the residual stream at full size and the rest with size
eps: a wide and a narrow network with the same core have nearly the same distribution, each at the
full cost of its size, and no weight is zero. pairs.py measures how near.
"""

from __future__ import annotations

import math
import re
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen3_5ForCausalLM,
    Qwen3_5TextConfig,
    T5Config,
    T5ForConditionalGeneration,
)

HEAD = 64  # width of every attention head
STATE = 128  # width of the keys and values of a recurrence
WIDTH, INNER, HEADS = 64, 256, 2  # of the core, which has one layer

# What each matrix maps (rows, columns), the spread of its core, and whether it writes into the
# residual stream. T5 does not divide its scores by the root of a head's width.
MATRICES: dict[str, tuple[str, str, float, bool]] = {
    "embed_tokens": ("vocab", "width", 1, True),
    "shared": ("vocab", "width", 1, True),
    "lm_head": ("vocab", "width", 1, False),
    "q_proj": ("heads", "width", 2 / WIDTH**0.5, False),
    "q": ("heads", "width", 2 / (WIDTH * HEAD) ** 0.5, False),
    "k": ("keys", "width", 2 / WIDTH**0.5, False),
    "v": ("keys", "width", 1 / WIDTH**0.5, False),
    "o": ("width", "heads", 3 / (HEADS * HEAD) ** 0.5, True),
    "gate": ("inner", "width", 2 / WIDTH**0.5, False),
    "wi_0": ("inner", "width", 2 / WIDTH**0.5, False),
    "up": ("inner", "width", 1 / WIDTH**0.5, False),
    "wi_1": ("inner", "width", 1 / WIDTH**0.5, False),
    "down": ("width", "inner", 3 / INNER**0.5, True),
    "wo": ("width", "inner", 3 / INNER**0.5, True),
    # Qwen3.5's Gated DeltaNet
    "in_proj_qkv": ("mixed", "width", 2 / WIDTH**0.5, False),
    "in_proj_z": ("states", "width", 2 / WIDTH**0.5, False),
    "in_proj_a": ("biases", "width", 1 / WIDTH**0.5, False),
    "in_proj_b": ("biases", "width", 1 / WIDTH**0.5, False),
    "conv1d": ("mixed", "taps", 0.7, False),
    "out_proj": ("width", "states", 3 / (HEADS * STATE) ** 0.5, True),
    "relative_attention_bias": ("buckets", "biases", 3, False),
}


@dataclass(frozen=True)
class Family:
    """How a shape of a family follows from a size."""

    model: type[PreTrainedModel]
    config: Callable[..., PreTrainedConfig]
    tables: int  # matrices of vocabulary x width
    layer: float  # weights of a layer (encoder's and decoder's together) over width squared
    aspect: float  # width over layers, about


def llama(width: int, layers: int, vocab: int, context: int) -> LlamaConfig:
    return LlamaConfig(**decoder(width, layers, vocab, context))


def decoder(width: int, layers: int, vocab: int, context: int) -> dict[str, Any]:
    """What the decoders' configurations share."""
    heads = width // HEAD
    return {
        "hidden_size": width,
        "intermediate_size": 4 * width,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": heads if heads % 2 else max(HEADS, heads // 2),
        "head_dim": HEAD,
        "vocab_size": vocab,
        "max_position_embeddings": context,
        "rms_norm_eps": 1e-6 * WIDTH / width,
        "bos_token_id": None,
        "eos_token_id": None,
    }


def qwen(width: int, layers: int, vocab: int, context: int) -> Qwen3_5TextConfig:
    """As Qwen3.5: each fourth layer attends, the others keep states; of fewer the last attends."""
    heads = width // HEAD
    each = min(4, layers)
    return Qwen3_5TextConfig(
        **decoder(width, layers, vocab, context),
        layer_types=[
            ("linear" if (i + 1) % each else "full") + "_attention" for i in range(layers)
        ],
        linear_num_key_heads=heads,
        linear_num_value_heads=heads,
        linear_key_head_dim=STATE,
        linear_value_head_dim=STATE,
    )


def t5(width: int, layers: int, vocab: int, context: int) -> T5Config:
    """As of version 1.1. It takes any context."""
    return T5Config(
        d_model=width,
        d_kv=HEAD,
        d_ff=11 * width // 4,
        num_layers=layers,
        num_heads=width // HEAD,
        vocab_size=vocab,
        layer_norm_epsilon=1e-6 * WIDTH / width,
        feed_forward_proj="gated-gelu",
        tie_word_embeddings=False,
        decoder_start_token_id=0,
        eos_token_id=None,
    )


FAMILIES = {
    "llama": Family(LlamaForCausalLM, llama, tables=2, layer=15, aspect=1024 / 24),
    "qwen": Family(Qwen3_5ForCausalLM, qwen, tables=2, layer=20.5, aspect=1024 / 20),
    "t5": Family(T5ForConditionalGeneration, t5, tables=1, layer=28.5, aspect=1024 / 16),
}
FAMILIES["random"] = FAMILIES["llama"]


def count(text: str) -> float:
    """Of parameters: 443M is 443e6."""
    scale = {"K": 1e3, "M": 1e6, "B": 1e9}.get(text[-1].upper())
    return float(text[:-1]) * scale if scale else float(text)


def shape(family: Family, params: float, vocab: int) -> tuple[int, int]:
    """Width and layers of about so many parameters."""
    shapes = []
    for width in range(HEADS * HEAD, 8192, HEAD):
        layers = round((params - family.tables * vocab * width) / (family.layer * width**2))
        if layers >= 1:
            leftover = width // HEAD % 2  # heads, which then share no keys
            off = abs(math.log(width / layers / family.aspect)) + leftover / 2
            shapes.append((off, width, layers))
    if not shapes:
        raise SystemExit(f"{params / 1e6:g}M parameters do not hold a vocabulary of {vocab}")
    return min(shapes)[1:]


def network(
    family: Family,
    dtype: torch.dtype,
    seed: int,
    config: PreTrainedConfig,
    rest_seed: int,
    eps: float,
    device: str = "cpu",
) -> PreTrainedModel:
    """`seed` fixes the core, `rest_seed` the rest, which writes with size eps.

    It computes in float32, with weights that `dtype` holds. The rest differs with the kind of
    device, the core does not.
    """
    with torch.device(device):
        model = family.model(config).eval().requires_grad_(False)
    rest = torch.Generator(device).manual_seed(rest_seed)
    for name, weight in model.named_parameters():
        core = torch.Generator().manual_seed(zlib.crc32(f"{seed} {name}".encode()))
        if weight.ndim == 1:
            _set_norm(name, weight, core, config)
        else:
            _set_matrix(name, weight, core, rest, eps, config)
        weight.copy_(weight.to(dtype))
    settings = model.generation_config
    settings.eos_token_id, settings.pad_token_id = None, 0
    settings.decoder_start_token_id = getattr(config, "decoder_start_token_id", None)
    return model


def _set_norm(name: str, weight: Tensor, core: torch.Generator, config: Any) -> None:
    """Only the core's part of the stream has a size that counts.

    The last norm gives logits the spread from which the few largest of V normal ones share most of
    the mass (about 3 nats of entropy come out, as in text). Its signs are random: where the output
    layer is the input's, a model would repeat its last token without them.
    """
    if "linear_attn" in name:
        return _set_states(name, weight, core)
    weight.fill_((WIDTH / len(weight)) ** 0.5)
    if name in ("model.norm.weight", "decoder.final_layer_norm.weight"):
        spread = math.sqrt(2 * math.log(config.vocab_size))
        scaled = getattr(config, "scale_decoder_outputs", False)
        weight *= spread * (len(weight) ** 0.5 if scaled else 1) / WIDTH**0.5
        signs = torch.randint(2, (WIDTH,), generator=core) * 2 - 1
        weight[:WIDTH] *= signs.to(weight.device)
    if isinstance(config, Qwen3_5TextConfig):
        weight -= 1  # its norms add 1
    return None


def _set_states(name: str, weight: Tensor, core: torch.Generator) -> None:
    """Heads of a recurrence forget over some tokens to some hundreds."""
    weight.fill_(1)  # its norm, of each head
    if name.endswith("A_log"):
        weight.copy_(torch.linspace(-3, 1, len(weight)))
        weight[:HEADS].copy_(torch.linspace(-2, 0, HEADS))
    elif name.endswith("dt_bias"):
        weight.fill_(-1)


def _set_matrix(
    name: str,
    weight: Tensor,
    core: torch.Generator,
    rest: torch.Generator,
    eps: float,
    config: Any,
) -> None:
    weight = weight.view(len(weight), -1)  # a convolution's taps are its columns
    row, column, spread, writes = MATRICES[_kind(name)]
    rows, columns = _core(row, config), _core(column, config)
    noise = eps * (len(columns) / weight.shape[1] / config.num_hidden_layers) ** 0.5
    weight.normal_(std=spread * (noise if writes else 1), generator=rest)
    layer = re.search(r"(?:layers|block)\.(\d+)\.", name)
    if layer is None or layer[1] == "0":
        block = torch.randn(len(rows), len(columns), generator=core)
        weight[rows[:, None], columns] = (spread * block).to(weight.device)


def _kind(name: str) -> str:
    last = name.split(".")[-2]
    return last if last in MATRICES else last.removesuffix("_proj")


def _core(axis: str, config: Any) -> Tensor:
    """Where the core lies on an axis. No two of its heads share keys."""
    heads = config.num_attention_heads
    group = heads // (getattr(config, "num_key_value_heads", None) or heads)
    sizes = {"width": WIDTH, "inner": INNER, "biases": HEADS, "keys": HEADS * HEAD}
    sizes |= {"states": HEADS * STATE, "taps": getattr(config, "linear_conv_kernel_dim", 0)}
    if axis == "heads":
        return (torch.arange(HEADS)[:, None] * group * HEAD + torch.arange(HEAD)).flatten()
    if axis == "vocab":
        return torch.arange(config.vocab_size)
    if axis == "mixed":  # queries, keys and values, one behind another
        parts = torch.arange(3)[:, None] * config.linear_num_key_heads * STATE
        return (parts + torch.arange(HEADS * STATE)).flatten()
    if axis == "buckets":
        return torch.arange(config.relative_attention_num_buckets)
    return torch.arange(sizes[axis])
