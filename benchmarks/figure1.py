"""The README's picture: figure 1 of the paper, from the pair that ships.

python benchmarks/figure1.py    # writes docs/trace.svg
"""

from __future__ import annotations

import io
from pathlib import Path

from rich.console import Console

import foretoken
from foretoken.lab import view

PROMPT = "The old house stood at the end of the lane, and"
OUT = Path(__file__).parents[1] / "docs" / "trace.svg"


def main() -> None:
    spec = foretoken.load()
    (completion,) = spec.generate(PROMPT, max_new_tokens=60, temperature=0.6, gamma=4, seed=4)
    console = Console(record=True, width=72, file=io.StringIO(), highlight=False)
    console.print(PROMPT, style="bold")
    for line in view.trace(spec.ids(PROMPT), completion.steps, spec.tokenizer):
        console.print(line)
    console.print(view.legend())
    console.save_svg(str(OUT), title="foretoken generate --show-tokens")
    stats = completion.stats
    print(
        f"{OUT}: {len(completion.tokens)} tokens in {stats.target_calls} runs, "
        f"alpha {stats.alpha:.2f}"
    )


if __name__ == "__main__":
    main()
