"""Texts with and without draft tokens on the pair that ships: the same to the bit, over 10,000
tokens?

Expected: with exact_shapes=True no text differs, greedy or coupled, in float32 or bfloat16. Without
it (the negative control) few or none in float32 and most in bfloat16: two likely tokens lie closer
than its rounding.

    python benchmarks/exact_shapes.py greedy     # and coupled; ten minutes each
"""

from __future__ import annotations

import argparse
from itertools import product
from typing import Any

from rich.console import Console
from rich.table import Table

import foretoken
import machine

WHEN = ("In the morning", "After the war", "Late one night", "When the ship came in", "At last")
WHO = ("the old man", "my sister", "the captain", "a stranger", "the king's daughter", "nobody")
DID = ("went down to the sea", "opened the letter", "spoke of the house,")
PROMPTS = [" ".join(words) for words in product(WHEN, WHO, DID)]
GAMMAS = (1, 2, 3, 4, 5, 6, 7, None)  # in turn, a text each
WAYS = {"greedy": {}, "coupled": {"rule": "coupled", "temperature": 1.0}}
TOKENS, LENGTH = 10_000, 400


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("way", choices=WAYS)
    way: str = parser.parse_args().way
    table = Table("dtype", "exact shapes", "texts", "tokens", "texts that differ", "accepted")
    rows: list[dict[str, Any]] = []
    for dtype, exact in product(("float32", "bfloat16"), (True, False)):
        spec = foretoken.load("novels", dtype=dtype, runtime="transformers", exact_shapes=exact)
        row = {"dtype": dtype, "exact_shapes": exact, **compare(spec, WAYS[way])}
        rows.append(row)
        table.add_row(*(str(row[name]) for name in row if name != "first_differences"))
    Console().print(table)
    print(machine.save(f"exact-shapes-{way}", {"gammas": GAMMAS, "rows": rows}))


def compare(
    spec: foretoken.Speculator, way: dict[str, Any], enough: int = TOKENS
) -> dict[str, Any]:
    """Every prompt decoded plainly and with draft tokens, until there are `enough` tokens."""
    texts = tokens = accepted = 0
    differences: list[int] = []
    for i, prompt in enumerate(PROMPTS):
        if tokens >= enough:
            break
        options = {"max_new_tokens": LENGTH, "seed": i, **way}
        (plain,) = spec.generate(prompt, gamma=0, **options)
        (fast,) = spec.generate(prompt, gamma=GAMMAS[i % len(GAMMAS)], **options)
        texts += 1
        tokens += len(plain.tokens)
        accepted += fast.stats.accepted
        if plain.tokens != fast.tokens:
            pairs = zip(plain.tokens, fast.tokens, strict=False)
            short = min(len(plain.tokens), len(fast.tokens))
            differences.append(next((at for at, (a, b) in enumerate(pairs) if a != b), short))
    return {
        "texts": texts,
        "tokens": tokens,
        "texts_that_differ": len(differences),
        "accepted": accepted,
        "first_differences": differences,
    }


if __name__ == "__main__":
    main()
