"""Speculative beam search on the pair that ships, without a clock: target calls for the same beams.

Expected: fewer calls the further the draft looks ahead and the wider it is, and more texts scored
for them; the beams are the same in every line.

    python -m reproduction.beam    # ten minutes
"""

from __future__ import annotations

from statistics import fmean

from rich.console import Console
from rich.table import Table

import foretoken
from reproduction.beam.speculative import beam_search

PROMPTS = (
    "The old house stood at the end of the lane, and",
    "It was a cold morning in November when the letter came.",
    '"You cannot mean it," said the doctor, rising from his chair. "',
    "When the ship had passed the harbour mouth, the captain",
)
CASES = [(0, None), (1, 8), (1, 16), (2, 4), (2, 8), (2, 16), (2, 32), (4, 16)]


def main() -> None:
    spec = foretoken.load("novels", runtime="transformers")
    table = Table("gamma", "draft beams", "target calls", "draft calls", "texts scored", "same")
    plain = None
    for gamma, width in CASES:
        rows = beam_search(spec, PROMPTS, gamma=gamma, draft_beams=width)
        texts, stats = [beams[0].tokens for beams in rows], [beams[0].stats for beams in rows]
        plain = plain or texts
        same = sum(one == other for one, other in zip(texts, plain, strict=True))
        calls = [fmean(s.target_calls for s in stats), fmean(s.draft_calls for s in stats)]
        table.add_row(
            str(gamma),
            str(width or "-"),
            *(f"{n:.1f}" for n in (*calls, fmean(s.scored for s in stats))),
            f"{same} of {len(texts)}",
        )
    Console().print(table)


if __name__ == "__main__":
    main()
