"""Block verification against Algorithm 1 on the pair that ships: tokens a call, time a token.

Expected: at temperature 1 a few per cent more tokens a call, and more at large gamma; the block
rule's own work, one more pass over p and q, costs less than it gains.

    python benchmarks/rules.py    # two minutes; nothing else should run
"""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.table import Table

import foretoken
import machine
from default_pair import PROMPTS
from foretoken_lab.turns import in_turn, seconds_per_token, tokens_per_call, way

GAMMAS, REPEATS, TOKENS = (2, 4, 8), 7, 128
RULES = ("speculative", "block")


def main() -> None:
    spec = foretoken.load()
    table = Table("gamma", "rule", "tokens a call", "ms a token", "times Algorithm 1's speed")
    rows: list[dict[str, Any]] = []
    for gamma in GAMMAS:
        options = {"gamma": gamma, "temperature": 1.0}
        ways = {rule: way(spec, rule=rule, **options) for rule in RULES}
        runs = in_turn(ways, PROMPTS, repeats=REPEATS, tokens=TOKENS)
        base = seconds_per_token(runs["speculative"])
        for rule, own in runs.items():
            seconds, per_call = seconds_per_token(own), tokens_per_call(own)
            rows.append({"gamma": gamma, "rule": rule, "seconds": seconds, "tokens": per_call})
            figures = f"{per_call:.3f}", f"{seconds * 1e3:.2f}", f"{base / seconds:.3f}"
            table.add_row(str(gamma), rule, *figures)
    Console().print(table)
    print(machine.save("rules", {"repeats": REPEATS, "tokens": TOKENS, "rows": rows}))


if __name__ == "__main__":
    main()
