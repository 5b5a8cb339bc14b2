"""Builds synthetic pairs of any size: one target, and a draft of every chosen alpha.

The models are random networks (`networks`). The target's eps is small and fixed; a draft's is
found by bisection on texts that the target writes. Text is made of ids only, without an end.
OUT/pair.json says what was built and measured.

    python benchmarks/pairs.py llama OUT --alpha 0.2 0.5 0.8 0.95    # 443M
    python benchmarks/pairs.py qwen OUT --alpha 0.8    # 443M in Qwen3.5's shapes
    python benchmarks/pairs.py t5 OUT --alpha 0.8                    # 511M, its decoder 0.3B
    python benchmarks/pairs.py random OUT --params 1B --vocab 256000    # only its cost is chosen
"""

from __future__ import annotations

import argparse
import json
import math
import shlex
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel, logging

from networks import FAMILIES, count, network, shape

TARGET_EPS = 0.003  # alpha of the best draft is 0.97 or more
ROWS, PROMPT, SOURCE, NEW = 8, 8, 16, 96  # texts to measure alpha on, and their ids
NGRAM = 8  # a greedy text that repeats so many tokens is in a loop
CLOSE, TOLERANCE = 0.005, 0.02  # of alpha: where the bisection stops, and what is good enough


@dataclass(frozen=True)
class Texts:
    """The target's own texts, and its distribution at each new token."""

    given: dict[str, Tensor]  # inputs of a forward over all of them
    new: int
    distributions: Tensor  # [B * new, V]

    def written(self) -> list[list[int]]:
        ids = self.given.get("decoder_input_ids", self.given["input_ids"])
        return ids[:, -self.new :].tolist()

    def seen_by(self, model: PreTrainedModel) -> Tensor:
        return distributions(model, self.given, self.new)


@torch.inference_mode()
def distributions(model: PreTrainedModel, inputs: dict[str, Tensor], new: int) -> Tensor:
    """The distributions of the last `new` tokens of each row, `[B * new, V]`."""
    logits = model(**inputs, use_cache=False).logits[:, -new - 1 : -1]
    return logits.flatten(0, 1).softmax(-1)


def texts(target: PreTrainedModel, new: int, sampled: bool, seed: int) -> Texts:
    """Texts after random prompts or sources, at temperature 1 or greedy."""
    vocab, reads_source = target.config.vocab_size, target.config.is_encoder_decoder
    random = torch.Generator().manual_seed(seed)
    width = SOURCE if reads_source else PROMPT
    read = torch.randint(2, vocab, (ROWS, width), generator=random).to(target.device)
    way = {"do_sample": True, "top_k": 0} if sampled else {"do_sample": False}
    torch.manual_seed(seed)
    mask = torch.ones_like(read)
    ids = target.generate(read, attention_mask=mask, max_new_tokens=new, **way)  # pyright: ignore
    inputs = {"input_ids": read, "decoder_input_ids": ids} if reads_source else {"input_ids": ids}
    return Texts(inputs, new, distributions(target, inputs, new))


def alpha(p: Tensor, q: Tensor) -> float:
    """E[sum min(p, q)] (Corollary 3.6)."""
    return float(torch.minimum(p, q).sum(-1).mean())


def agreement(p: Tensor, q: Tensor) -> float:
    return float((p.argmax(-1) == q.argmax(-1)).float().mean())


def repeats(rows: list[list[int]]) -> float:
    """The share of n-grams that occurred before."""
    ngrams = [tuple(row[i : i + NGRAM]) for row in rows for i in range(len(row) - NGRAM + 1)]
    return 1 - len(set(ngrams)) / len(ngrams)


def bisect(measure: Callable[[float], float], goal: float) -> tuple[float, float]:
    """An eps with that alpha, which falls as eps grows, and its alpha."""
    low, high = math.log(1e-3), math.log(1e3)
    eps, reached = 0.0, measure(0.0)
    while abs(reached - goal) > CLOSE:
        if high - low < 1e-3 or (eps == 0 and reached < goal):
            break
        eps = math.exp((low + high) / 2)
        reached = measure(eps)
        low, high = (math.log(eps), high) if reached > goal else (low, math.log(eps))
    if abs(reached - goal) > TOLERANCE:
        sys.exit(f"alpha {goal:g} is out of reach, {reached:.3f} is the nearest: ask for less")
    return eps, reached


def main() -> None:
    logging.disable_progress_bar()
    arguments = _arguments()
    family, out, dtype = FAMILIES[arguments.kind], arguments.out, getattr(torch, arguments.dtype)
    make = partial(network, family, dtype, arguments.seed)
    big, small = (
        family.config(*shape(family, params, arguments.vocab), arguments.vocab, arguments.context)
        for params in (arguments.params, arguments.draft_params)
    )
    target = make(big, arguments.seed + 1, TARGET_EPS)
    card = {"command": shlex.join(["python", *sys.argv]), "synthetic": True}
    card |= {"seed": arguments.seed, "dtype": arguments.dtype}
    card["target"] = _described(target, TARGET_EPS)
    draft = partial(make, small, arguments.seed + 2)
    if arguments.kind == "random":
        model = draft(1.0)
        card["drafts"] = {"draft": _described(model, 1.0)}
        _save(model, out / "draft", dtype)
    else:
        card |= _drafts(target, draft, arguments, dtype)
    _save(target, out / "target", dtype)
    (out / "pair.json").write_text(json.dumps(card, indent=2) + "\n")
    print(json.dumps(card, indent=2))


def _drafts(
    target: PreTrainedModel,
    draft: Callable[[float], PreTrainedModel],
    arguments: argparse.Namespace,
    dtype: torch.dtype,
) -> dict[str, Any]:
    """Save a draft of each alpha; returns what was measured."""
    log("the target writes, sampled and greedy")
    sampled, greedy = (texts(target, NEW, way, arguments.seed) for way in (True, False))
    p = sampled.distributions
    card: dict[str, Any] = {"measured on": f"{len(p)} tokens after {ROWS} random prompts"}
    card["entropy"] = float(torch.special.entr(p).sum(-1).mean())
    card["repeated 8-grams, greedy"] = repeats(greedy.written())
    card["drafts"] = {}
    for goal in arguments.alpha:
        eps, reached = bisect(lambda eps: alpha(p, sampled.seen_by(draft(eps))), goal)
        model, name = draft(eps), f"draft-a{round(100 * goal):02d}"
        agreed = agreement(greedy.distributions, greedy.seen_by(model))
        log(f"{name}: alpha {reached:.3f} at T = 1, {agreed:.3f} at T = 0")
        card["drafts"][name] = {"alpha at T=1": reached, "alpha at T=0": agreed}
        card["drafts"][name] |= _described(model, eps)
        _save(model, arguments.out / name, dtype)
    return card


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("kind", choices=FAMILIES)
    parser.add_argument("out", type=Path)
    parser.add_argument("--params", type=count, help="of the target: 443M, T5 511M")
    parser.add_argument("--draft-params", type=count, default=count("9M"))
    parser.add_argument("--alpha", type=float, nargs="+", default=[0.8], help="at temperature 1")
    parser.add_argument("--vocab", type=int, help="32000, T5 32128")
    parser.add_argument("--context", type=int, default=4096, help="of Llama")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    arguments = parser.parse_args()
    t5 = arguments.kind == "t5"
    arguments.params = arguments.params or count("511M" if t5 else "443M")
    arguments.vocab = arguments.vocab or (32128 if t5 else 32000)
    return arguments


def _described(model: PreTrainedModel, eps: float) -> dict[str, Any]:
    config, weights = model.config, list(model.parameters())
    names = ("hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads")
    names += ("intermediate_size", "d_ff", "head_dim", "vocab_size", "max_position_embeddings")
    zeros = sum(int((weight == 0).sum()) for weight in weights)
    number = sum(weight.numel() for weight in weights)
    sizes = {name: getattr(config, name) for name in names if hasattr(config, name)}
    return {"parameters": number, "eps": eps, "zeros": zeros / number} | sizes


def _save(model: PreTrainedModel, path: Path, dtype: torch.dtype) -> None:
    """The model is of that dtype afterwards."""
    model.to(dtype).save_pretrained(path)  # pyright: ignore
    log(f"saved {path}")


def log(line: str) -> None:
    print(f"{time.process_time():5.0f} s  {line}", file=sys.stderr)


if __name__ == "__main__":
    main()
