"""A batch that shares passes, and row by row, against transformers' generate: plain, and with a
draft.

A random BLOOM (ALiBi: attention of its own), whose later layers change little, and a draft of its
first layers. Prompts differ in length; generate pads them on the left. All ways alternate; ratios
are within a round.
Expected: at batch 1 both forms plain as fast as generate; at batch 8 row by row gains nothing by
the batch, and shared passes are as fast as generate, drafts faster.

    python ../shared/tools/quiet.py && python benchmarks/rowwise.py --batch 8
"""

from __future__ import annotations

import argparse
import copy
import warnings
from collections.abc import Callable
from functools import partial
from statistics import median
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import nn
from transformers import BloomConfig, BloomForCausalLM

import foretoken
from foretoken.drafters.lm import LMDrafter
from foretoken.models.stock.rowwise import RowwiseModel
from foretoken.models.stock.small_copy import randomize_weights
from foretoken.speculator import Speculator
from foretoken.timing import time_in_turns
from machine import save

PROMPT, GAMMA = list(range(10, 42)), 4


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--width", type=int, default=768)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--kept", type=int, default=2, help="of them in the draft")
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--rounds", type=int, default=7)
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    target, draft = pair(arguments)
    ways = contestants(target, draft, arguments.tokens, arguments.batch)
    texts = {name: run() for name, run in ways.items()}
    equal = {name: text == texts["generate"] for name, text in texts.items()}
    times = time_in_turns(ways, arguments.rounds, warm_up=0)  # the texts have warmed up
    table = Table("way", "ms a token", "generate's time over it", "same text as generate")
    rows = []
    for name, own in times.items():
        ratio = median(a / b for a, b in zip(times["generate"], own, strict=True))
        cost = 1e3 * median(own) / arguments.tokens / arguments.batch
        table.add_row(name, f"{cost:.2f}", f"{ratio:.2f}", str(equal[name]))
        rows.append({"way": name, "ms": cost, "ratio": ratio, "equal": equal[name]})
    Console().print(table)
    print(save(f"rowwise-batch{arguments.batch}", {"asked": vars(arguments), "rows": rows}))


def pair(arguments: argparse.Namespace) -> tuple[Any, Any]:
    config = BloomConfig(
        vocab_size=8192, hidden_size=arguments.width, n_layer=arguments.layers,
        n_head=arguments.width // 64, pad_token_id=0, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    torch.manual_seed(0)
    target = BloomForCausalLM(config).eval()
    randomize_weights(target)
    with torch.no_grad():
        for layer in target.transformer.h[arguments.kept :]:
            layer.self_attention.dense.weight *= 0.02
            layer.mlp.dense_4h_to_h.weight *= 0.02
    target.generation_config.eos_token_id = None
    draft = copy.deepcopy(target)
    draft.transformer.h = nn.ModuleList(list(draft.transformer.h)[: arguments.kept])
    draft.config.n_layer = arguments.kept
    return target, draft


def contestants(
    target: Any, draft: Any, tokens: int, batch: int
) -> dict[str, Callable[[], list[list[int]]]]:
    prompts = [PROMPT[b:] for b in range(batch)]
    width, start = len(PROMPT), target.config.pad_token_id
    ids = torch.tensor([[start] * (width - len(p)) + p for p in prompts])
    mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts])
    shared = foretoken.load(target, draft, runtime="transformers")
    assert shared.target.runtime == "transformers"
    alone = Speculator(RowwiseModel(target), LMDrafter(RowwiseModel(draft)))
    settings = draft.generation_config
    settings.num_assistant_tokens, settings.num_assistant_tokens_schedule = GAMMA, "constant"
    settings.assistant_confidence_threshold = 0.0

    def ours(spec: Speculator, gamma: int | None) -> list[list[int]]:
        texts = spec.generate(prompts, max_new_tokens=tokens, gamma=gamma)
        return [list(text.tokens) for text in texts]

    def theirs(**options: Any) -> list[list[int]]:
        more = {"attention_mask": mask, "max_new_tokens": tokens, "do_sample": False, **options}
        return target.generate(ids, **more)[:, width:].tolist()

    ways: dict[str, Callable[[], list[list[int]]]] = {"generate": theirs}
    for name, spec in (("shared", shared), ("row by row", alone)):
        ways[f"{name}, plain"] = partial(ours, spec, 0)
        ways[f"{name}, gamma {GAMMA}"] = partial(ours, spec, GAMMA)
    ways["shared, automatic gamma"] = partial(ours, shared, None)
    if batch == 1:
        ways[f"assisted, gamma {GAMMA}"] = partial(theirs, assistant_model=draft)
    return ways


if __name__ == "__main__":
    main()
