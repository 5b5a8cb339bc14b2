"""Figure 5 of the paper: when the target and the draft of an encoder-decoder ran, a block a call,
with gamma 7, gamma 3 and plainly.

The target is T5-like, of random weights; the draft has a hundredth of its size and nearly its law.

    python benchmarks/figure5.py    # writes docs/timeline.svg; half a minute
"""

from __future__ import annotations

from pathlib import Path

import torch

import foretoken
from foretoken.lab.timeline import draw, timeline
from networks import FAMILIES, network

OUT = Path(__file__).parents[1] / "docs" / "timeline.svg"
VOCAB, SOURCE, TOKENS = 4000, 24, 40


def main() -> None:
    family = FAMILIES["t5"]
    sizes = {"target": (1024, 6, 0.003), "draft": (128, 2, 0.03)}  # width, layers, eps
    models = {
        name: network(family, torch.float32, 0, family.config(width, layers, VOCAB, 512), i, eps)
        for i, (name, (width, layers, eps)) in enumerate(sizes.items())
    }
    spec = foretoken.load(**models, runtime="transformers")
    source = torch.randint(2, VOCAB, (SOURCE,), generator=torch.Generator().manual_seed(0)).tolist()
    rows = {}
    for gamma in (7, 3, 0):
        for _ in range(2):  # the first warms up
            (completion,) = spec.generate([source], gamma=gamma, max_new_tokens=TOKENS)
        rows[f"gamma {gamma}" if gamma else "plain"] = completion
        calls = len(timeline(completion))
        print(f"gamma {gamma}: {completion.stats.target_calls} target calls, {calls} blocks")
    draw(rows, OUT)
    print(OUT)


if __name__ == "__main__":
    main()
