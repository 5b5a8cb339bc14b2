"""Forward passes of networks with experts on ONNX Runtime and on OpenVINO, in turns: random weights
in real widths, few layers, medians in ms; memory is read between passes, as weights would be.

Expected: ONNX Runtime ahead for few tokens, OpenVINO for prompts, where it has matrix units.

    python benchmarks/experts.py Qwen3Moe --experts 32 --width 512 --chosen 4
    python benchmarks/experts.py Qwen2Moe --experts 60 --layers 2
    python benchmarks/experts.py Mixtral --experts 8 --width 1024 --chosen 2 --layers 2
"""

from __future__ import annotations

import argparse
import os
from statistics import median
from tempfile import TemporaryDirectory
from time import perf_counter
from typing import Any

import numpy as np
import torch
import transformers

import foretoken
import machine

PAST, ROUNDS, TOKENS = 64, 8, (1, 4, 8, 64, 200)
REST = np.ones(2**26, np.uint8)  # bytes that are read between passes


def network(kind: str, given: argparse.Namespace) -> Any:
    torch.manual_seed(0)
    sizes = {"hidden_size": 1024, "num_hidden_layers": given.layers, "vocab_size": 1024}
    sizes |= {"num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 64}
    sizes |= {"num_experts": given.experts, "num_local_experts": given.experts}
    sizes |= {"num_experts_per_tok": given.chosen, "moe_intermediate_size": given.width}
    sizes |= {"intermediate_size": given.width, "shared_expert_intermediate_size": 2 * given.width}
    config = getattr(transformers, f"{kind}Config")(**sizes, pad_token_id=0)
    return getattr(transformers, f"{kind}ForCausalLM")(config).float().eval()


def taken(model: Any, tokens: int) -> float:
    """Milliseconds of the second of two passes over other tokens, which meet other experts."""
    ids = [[37 * i % 1000 + 1 for i in range(tokens)]]
    model.score(ids, [1])
    model.set_lengths([PAST])
    REST.max()
    start = perf_counter()
    model.score(ids, [1])
    milliseconds = 1e3 * (perf_counter() - start)
    model.set_lengths([PAST])
    return milliseconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("kind", help="a class of transformers, without ForCausalLM")
    parser.add_argument("--experts", type=int, default=32)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--chosen", type=int, default=4)
    parser.add_argument("--layers", type=int, default=3)
    parser.add_argument("--dtypes", default="int8,int4,float32")
    given = parser.parse_args()
    with TemporaryDirectory() as folder:
        os.environ["XDG_CACHE_HOME"] = folder  # conversions that nobody needs again
        network(given.kind, given).save_pretrained(f"{folder}/model")
        rows = measured(f"{folder}/model", given)
    print(machine.save(f"experts-{given.kind.lower()}", {"sizes": vars(given), "rows": rows}))


def measured(model: str, given: argparse.Namespace) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    for dtype in given.dtypes.split(","):
        models: dict[str, Any] = {}
        for runtime in ("onnx", "openvino"):
            target = foretoken.load(model, "none", dtype=dtype, runtime=runtime).target
            assert target.computed == dtype
            models[runtime] = target
            target.start([[11 * i % 1000 + 1 for i in range(PAST)]])
        for tokens in TOKENS:
            times = [{name: taken(m, tokens) for name, m in models.items()} for _ in range(ROUNDS)]
            medians = {name: round(median(t[name] for t in times[1:]), 2) for name in models}
            rows.append({"kind": given.kind, "dtype": dtype, "tokens": tokens, **medians})
            print(rows[-1], flush=True)
    return rows


if __name__ == "__main__":
    main()
