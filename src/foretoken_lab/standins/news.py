"""The GPT-like pair of the paper (section 4.2) at an eighth of its widths: a target of 12 layers
and a draft of 2 on news text, a vocabulary of 8192, with the unigram and the bigram.

    python -m foretoken_lab.standins.news --text news.en.gz --out runs/news

The paper's are 768 and 256 wide (97M and 6M parameters): `--divisor 1`. Ours are of the Llama
architecture, with tied embeddings.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from foretoken.storage import files
from foretoken.train import corpus
from foretoken_lab.standins import commands
from foretoken_lab.standins.commands import Sizes, distill, flags, lab, positive, tables, told

VOCABULARY, CONTEXT = 8192, 256
PROMPTS, WORDS = 200, 8  # for the recipe: beginnings of held-out lines
PAPER: dict[str, Sizes] = {  # its widths are divided
    "target": {"hidden": 768, "feed_forward": 3072, "layers": 12, "heads": 12, "kv_heads": 12},
    "draft": {"hidden": 256, "feed_forward": 1024, "layers": 2, "heads": 4, "kv_heads": 4},
}
WIDTHS = ("hidden", "feed_forward")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--text", nargs="+", type=Path, required=True, help="packed (.gz) or not")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--divisor", type=positive, default=8, help="of the paper's widths")
    parser.add_argument("--steps", type=positive, default=20_000, help="of either model, at most")
    parser.add_argument("--distill-steps", type=positive, default=600)
    parser.add_argument("--bfloat16", action="store_true", help="multiply in it: see train lm")
    arguments = parser.parse_args()
    out = arguments.out
    prepare(arguments.text, out)
    for name, sizes in PAPER.items():
        shape = {k: n // arguments.divisor if k in WIDTHS else n for k, n in sizes.items()}
        own = {} if name == "target" else {"tokenizer": out / "target" / "model"}
        lesson = {"steps": arguments.steps, "patience": 10, "context": CONTEXT, "batch": 16}
        paths = ("--data", out / "text", "--out", out / name)
        options = {
            **shape,
            "vocab_size": VOCABULARY,
            **lesson,
            **own,
            "bfloat16": arguments.bfloat16,
        }
        lab("train", "lm", *paths, *flags(options))
    options = {"steps": arguments.distill_steps, "target_generated": 0.5, "on_policy": 0.25}
    distill(out / "text", out, "draft", options)
    tables(out, out / "text", out / "target" / "model")
    alphas = commands.chosen(out, ["draft"], out / "text", CONTEXT // 2)
    commands.record(out, "alphas", alphas)


def prepare(texts: list[Path], out: Path) -> None:
    """The texts in files that the trainer reads, in parts, of which it holds some out, and
    beginnings of lines of those."""
    lines = [line for path in texts for line in commands.lines(path)]
    (out / "text").mkdir(parents=True, exist_ok=True)
    size = -(-len(lines) // corpus.HELD_OUT_EVERY**2)
    parts = ["\n".join(lines[start : start + size]) for start in range(0, len(lines), size)]
    for number, part in enumerate(parts):
        files.write(out / "text" / f"{number:03}.txt", part.encode())
    _, held_out = corpus.split(parts)
    split_lines = [line.split() for part in held_out for line in part.split("\n")]
    prompts = [" ".join(line[:WORDS]) for line in split_lines if len(line) > WORDS]
    sample = prompts[:: max(1, len(prompts) // PROMPTS)][:PROMPTS]
    files.write(out / "prompts.txt", "\n".join(sample).encode())


if __name__ == "__main__":
    told(main)
