"""Kinds of models beside plain decoders, on CPU runtimes in turns: tokens a second of one sequence
plainly and with a draft, milliseconds of a prompt, and how far the native decoder is from its
floor, the bytes that a pass over one token reads.

Networks are random, in published shapes; the draft is the target's first layers, and what its later
layers add is scaled by `--rest`, so that draft tokens are accepted at times. transformers runs its
own `generate`, without a draft where it has no assisted generation for a family.

Expected: plainly within 1.3 of the floor, and 1.5 times transformers. (Results of 30 November 2026
also have OpenVINO, which is gone since.)

    python benchmarks/kinds.py lfm2 native:int4 native:int8 transformers
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch
import transformers
from transformers import PreTrainedModel

import foretoken
import machine
from foretoken.timing import time_in_turns
from runtimes import floor, instructions

LENGTH, PROMPT = 64, 512  # ids of the prompt that is continued, and of the one that is timed alone
HYBRID = ["linear_attention"] * 3 + ["full_attention"]
LFM2 = "ccaccaccacacacac"  # convolutions and attention
SIZES = {"max_position_embeddings": 4096, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
# by kind: a class, its settings, and how many first layers are the draft
KINDS: dict[str, tuple[str, dict[str, Any], int]] = {
    "lfm2": (
        "Lfm2",  # LFM2-350M
        {"vocab_size": 65536, "hidden_size": 1024, "intermediate_size": 6656}
        | {"num_attention_heads": 16, "num_key_value_heads": 8, "num_hidden_layers": 16}
        | {"layer_types": ["conv" if x == "c" else "full_attention" for x in LFM2]},
        3,
    ),
    "qwen3.5": (
        "Qwen3_5",  # Qwen3.5-0.8B, with fewer ids
        {"vocab_size": 32768, "hidden_size": 1024, "intermediate_size": 3584, "head_dim": 256}
        | {"num_attention_heads": 8, "num_key_value_heads": 2, "num_hidden_layers": 24}
        | {"linear_num_key_heads": 16, "linear_num_value_heads": 16, "layer_types": HYBRID * 6},
        4,
    ),
    "granite4": (
        "GraniteMoeHybrid",  # Granite-4.0-H-350M
        {"vocab_size": 100352, "hidden_size": 768, "num_hidden_layers": 32}
        | {"num_attention_heads": 12, "num_key_value_heads": 4, "num_local_experts": 0}
        | {"shared_intermediate_size": 2048, "mamba_n_heads": 48, "mamba_d_head": 32}
        | {
            "mamba_d_state": 128,
            "mamba_expand": 2,
            "layer_types": (HYBRID[:1] * 7 + HYBRID[3:]) * 4,
        }
        | {"residual_multiplier": 0.246, "embedding_multiplier": 12.0, "logits_scaling": 3.0},
        8,
    ),
    "qwen3-moe": (
        "Qwen3Moe",  # 1B, 8 of 64 experts
        {"vocab_size": 32768, "hidden_size": 1024, "num_hidden_layers": 16, "head_dim": 64}
        | {"num_attention_heads": 16, "num_key_value_heads": 4, "num_experts": 64}
        | {"num_experts_per_tok": 8, "moe_intermediate_size": 256, "norm_topk_prob": True},
        3,
    ),
}
CONFIGS = {"Qwen3_5": "Qwen3_5TextConfig"}
WRITES = "o_proj", "out_proj", "down_proj", "w2", "output_linear"  # into the residual stream


def built(kind: str, layers: int | None = None) -> PreTrainedModel:
    """A random network of a kind, or its first layers."""
    family, settings, _ = KINDS[kind]
    settings = SIZES | settings
    if layers is not None:
        settings["num_hidden_layers"] = layers
        if "layer_types" in settings:
            settings["layer_types"] = settings["layer_types"][:layers]
    torch.manual_seed(0)
    config = getattr(transformers, CONFIGS.get(family, f"{family}Config"))(**settings)
    return getattr(transformers, f"{family}ForCausalLM")(config).eval()


def save_pair(kind: str, rest: float, folder: Path) -> None:
    """Write a target and a draft of its first layers, in bfloat16."""
    target, first = built(kind), KINDS[kind][2]
    with torch.no_grad():
        for name, weight in target.named_parameters():
            number = next((int(x) for x in name.split(".") if x.isdigit()), -1)
            if weight.ndim > 1 and "norm" not in name:
                weight.normal_(std=0.04)
            if any(f".{part}" in name for part in WRITES):
                weight.mul_(3.0 if number < first else rest)
    own = target.state_dict()
    draft = built(kind, first)
    draft.load_state_dict({name: own[name] for name in draft.state_dict()})
    for name, model in (("target", target), ("draft", draft)):
        model.bfloat16().save_pretrained(folder / name)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("kind", choices=KINDS)
    parser.add_argument("ways", nargs="+", help="RUNTIME:DTYPE[:INSTRUCTIONS], or transformers")
    parser.add_argument("--rest", type=float, default=0.05)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--folder", type=Path, help="where the pair is kept; None: nowhere")
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as place:
        folder = asked.folder or Path(place)
        if not (folder / "target").exists():
            save_pair(asked.kind, asked.rest, folder)
        result = measured(folder, asked)
    print(machine.save(f"kinds-{asked.kind}", {"kind": asked.kind, "rest": asked.rest, **result}))


def measured(folder: Path, asked: argparse.Namespace) -> dict[str, Any]:
    prompt = [(7 * i * i + 3 * i) % 900 + 10 for i in range(PROMPT)]
    turns: dict[str, Callable[[], Any]] = {}
    facts: dict[str, Any] = {}
    for way in asked.ways:
        runtime, *more = way.split(":")
        if runtime == "transformers":
            turns |= stock(folder, prompt, asked.tokens)
            continue
        dtype, *held = more
        with instructions(*held):
            spec = foretoken.load(folder / "target", folder / "draft", dtype=dtype, runtime=runtime)
            turns |= {
                f"{way} {name}": turn for name, turn in ours(spec, prompt, asked.tokens).items()
            }
            for turn in ours(spec, prompt, asked.tokens).values():
                turn()  # measures costs, and opens networks on this instruction set
        facts[way] = {"floor_ms": floor(spec.target)} if runtime == "native" else {}
        (out,) = spec.generate(
            [prompt[:LENGTH]], max_new_tokens=asked.tokens, gamma=4, ignore_eos=True
        )
        facts[way] |= {"accepted_per_drafted": out.stats.accepted_per_drafted}
        print(way, facts[way], flush=True)
    taken = {name: median(x) for name, x in time_in_turns(turns, asked.rounds).items()}
    for name, seconds in taken.items():
        print(f"{name:40} {seconds:7.3f} s", flush=True)
    return {"tokens": asked.tokens, "rounds": asked.rounds, "seconds": taken, "ways": facts}


def ours(spec: Any, prompt: list[int], new: int) -> dict[str, Callable[[], Any]]:
    def generate(gamma: int | None) -> Any:
        return spec.generate([prompt[:LENGTH]], max_new_tokens=new, gamma=gamma, ignore_eos=True)

    def first() -> None:
        spec.generate([prompt], max_new_tokens=1, gamma=0, ignore_eos=True)

    made = {f"gamma {gamma}": lambda gamma=gamma: generate(gamma) for gamma in (0, 2, 4)}
    return made | {"automatic": lambda: generate(None), "prompt": first}


def stock(folder: Path, prompt: list[int], new: int) -> dict[str, Callable[[], Any]]:
    """transformers' own generation, in float32."""
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(
        folder / "target", dtype=torch.float32, trust_remote_code=False
    )
    asked = {"max_new_tokens": new, "min_new_tokens": new, "do_sample": False}

    def generate() -> Any:
        return model.generate(torch.tensor([prompt[:LENGTH]]), **asked)

    return {"transformers": generate}


if __name__ == "__main__":
    main()
