"""Block verification against Algorithm 1 on the pair that ships: tokens a call, time a token.

Expected: at temperature 1 a few per cent more tokens a call, and more at large gamma; the block
rule's own work, one more pass over p and q, costs less than it gains.

    python benchmarks/rules.py    # two minutes; nothing else should run
"""

from __future__ import annotations

from statistics import median
from typing import Any

from rich.console import Console
from rich.table import Table

import foretoken
import machine
from default_pair import PROMPTS
from foretoken.lab.experiments.beyond import seconds_per_token
from foretoken.request import Completion

GAMMAS, REPEATS, TOKENS = (2, 4, 8), 7, 128
RULES = ("speculative", "block")


def main() -> None:
    spec = foretoken.load()
    table = Table("gamma", "rule", "tokens a call", "ms a token", "times Algorithm 1's speed")
    rows: list[dict[str, Any]] = []
    for gamma in GAMMAS:
        runs: dict[str, list[list[Completion]]] = {rule: [] for rule in RULES}
        for seed in range(REPEATS):
            for rule in RULES:  # alternating
                options = {"gamma": gamma, "rule": rule, "seed": seed, "temperature": 1.0}
                texts = [
                    spec.generate(prompt, max_new_tokens=TOKENS, **options)[0] for prompt in PROMPTS
                ]
                runs[rule].append(texts)
        base = median(map(seconds_per_token, runs["speculative"]))
        for rule in RULES:
            seconds = median(map(seconds_per_token, runs[rule]))
            texts = [text for run in runs[rule] for text in run]
            calls = sum(text.stats.target_calls for text in texts)
            per_call = sum(len(text.tokens) for text in texts) / calls
            rows.append({"gamma": gamma, "rule": rule, "seconds": seconds, "tokens": per_call})
            figures = f"{per_call:.3f}", f"{seconds * 1e3:.2f}", f"{base / seconds:.3f}"
            table.add_row(str(gamma), rule, *figures)
    Console().print(table)
    print(machine.save("rules", {"repeats": REPEATS, "tokens": TOKENS, "rows": rows}))


if __name__ == "__main__":
    main()
