"""Does it run on a GPU? The tests that mean something there, and greedy identity in two precisions.

python benchmarks/gpu/suite.py
python benchmarks/gpu/suite.py --only identity --params 1B
python benchmarks/gpu/suite.py --only tests --tests tests/e2e tests/unit/models
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

import foretoken
import gpu

ROOT = Path(__file__).parents[2]
PROMPTS = [[5, 17, 33], [60, 12, 7, 9, 44, 31, 2, 18, 50, 41], [*range(100, 160)]]


def main() -> None:
    parser = gpu.parser(__doc__)
    parser.add_argument("--only", choices=("tests", "identity"))
    parser.add_argument("--tests", nargs="+", default=["tests"], help="files or folders")
    parser.add_argument("--params", default="100M", help="of the random model")
    parser.add_argument("--families", nargs="+", default=["llama", "t5"])
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--runtimes", nargs="+", default=["graphs", "compiled", "transformers"])
    arguments = parser.parse_args()
    gpu.need()
    tests = None if arguments.only == "identity" else _tests(arguments.tests)
    rows = [
        _identity(arguments, family, dtype, runtime)
        for family in arguments.families
        for dtype in (torch.float32, torch.bfloat16)
        for runtime in arguments.runtimes
        if arguments.only != "tests" and (family, runtime) != ("t5", "compiled")
    ]
    names = ("family", "dtype", "runtime")
    table = Table(*names, "gamma", "texts that equal plain decoding", "transformers'")
    for row in rows:
        for gamma, (plain, stock) in row["equal"].items():
            total = f" of {len(PROMPTS)}"
            facts = [row[name] for name in names]
            table.add_row(*facts, str(gamma), f"{plain}{total}", f"{stock}{total}")
    if tests is not None:
        print(tests["last"])
    if rows:
        Console().print(table, "in bfloat16 a near-tie may fall to either side: see both columns")
    gpu.save("gpu-suite", arguments.out, {"tests": tests, "identity": rows})


def _tests(paths: list[str]) -> dict[str, Any]:
    """Those not marked cpu_only; models that they draw lie on the GPU. Warnings are shown only: the
    versions there may be others."""
    command = [sys.executable, "-m", "pytest", "-q", "-n", "auto", "--dist", "loadscope", "-rfE"]
    command += [
        "--continue-on-collection-errors",
        "--tb=short",
        "-o",
        "filterwarnings=default",
        "-m",
        "not cpu_only and not prove",
    ]
    command += paths
    environment = os.environ | {"FORETOKEN_TEST_DEVICE": "cuda", "OMP_NUM_THREADS": "1"}
    lines: list[str] = []
    with subprocess.Popen(
        command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True
    ) as run:
        assert run.stdout is not None
        for line in run.stdout:  # shown as it comes: the machine may be gone before the end
            print(line, end="", flush=True)
            lines.append(line.strip())
    failed = [line for line in lines if line.startswith(("FAILED", "ERROR"))]
    return {"exit": run.returncode, "last": lines[-1] if lines else "", "failed": failed}


def _identity(arguments: Any, family: str, dtype: torch.dtype, runtime: str) -> dict[str, Any]:
    """How many texts equal our own plain decoding's, and transformers' own."""
    torch.backends.cuda.matmul.allow_tf32 = False
    target = gpu.random_network(arguments.params, 32000, dtype, family)
    stock = [_stock(target, prompt, arguments.tokens) for prompt in PROMPTS]
    plain: list[list[int]] = []
    equal: dict[int, tuple[int, int]] = {}
    for gamma in (0, 1, 4, 7):
        spec = foretoken.load(target, target, runtime=runtime, device=gpu.DEVICE)
        completions = spec.generate(PROMPTS, max_new_tokens=arguments.tokens, gamma=gamma)
        assert completions[0].stats.runtime == runtime
        texts = [text.tokens for text in completions]
        plain = plain or texts
        equal[gamma] = _same(texts, plain), _same(texts, stock)
    facts = {"family": family, "dtype": str(dtype).removeprefix("torch."), "runtime": runtime}
    return facts | {"equal": equal}


def _same(ours: list[list[int]], theirs: list[list[int]]) -> int:
    return sum(a == b for a, b in zip(ours, theirs, strict=True))


def _stock(model: Any, prompt: list[int], tokens: int) -> list[int]:
    ids = torch.tensor([prompt], device=model.device)
    rows = model.generate(
        ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=tokens
    )
    return rows[0, 1 if model.config.is_encoder_decoder else len(prompt) :].tolist()


if __name__ == "__main__":
    main()
