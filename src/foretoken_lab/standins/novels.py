"""Trains the pair that ships further: its target on the novels until their held-out loss stops
falling, then its draft on the target's own samples, then by distillation.

    python -m foretoken_lab.standins.novels --novels novels/*.txt.gz --out runs/novels

The same novels by the same names are held out as when it was first trained.
"""

from __future__ import annotations

import argparse
import re
from pathlib import Path

import foretoken as package
from foretoken.storage import files
from foretoken_lab.standins import commands
from foretoken_lab.standins.commands import distill, flags, foretoken, lab, positive, told

ASSETS = Path(package.__file__).parent / "assets"
GAP = re.compile(r"(?<=\S) {2,}(?=\S)")  # where a dash, a bracket or nothing stood
LENGTH = 240  # tokens of a text that alpha is measured over


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--novels", nargs="+", type=Path, required=True, help=".txt, packed or not")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--steps", type=positive, default=12_000, help="of the target, at most")
    parser.add_argument("--draft-steps", type=positive, default=2000, help="on samples, at most")
    parser.add_argument("--samples", type=positive, default=2_000_000, help="tokens by the target")
    parser.add_argument("--distill-steps", type=positive, default=600)
    parser.add_argument("--bfloat16", action="store_true", help="multiply in it: see train lm")
    arguments = parser.parse_args()
    out = arguments.out
    common = {"patience": 10, "bfloat16": arguments.bfloat16}
    prepare(arguments.novels, out / "text")
    target = out / "target" / "model"
    lesson = {"steps": arguments.steps, "learning_rate": 2e-3, **common}
    paths = ("--init", ASSETS / "target", "--data", out / "text", "--out", out / "target")
    lab("train", "lm", *paths, *flags(lesson))
    samples = out / "samples" / "samples.txt"
    if not samples.exists():
        samples.parent.mkdir(exist_ok=True)
        paths = ("--target", target, "--data", out / "text", "--tokens", arguments.samples)
        foretoken("train", "samples", *paths, "--out", samples)
    lesson = {"steps": arguments.draft_steps, "learning_rate": 1e-3, **common}
    paths = ("--init", ASSETS / "draft", "--tokenizer", target, "--data", samples.parent)
    lab("train", "lm", *paths, "--out", out / "draft", *flags(lesson))
    options = {"steps": arguments.distill_steps, "target_generated": 0.5, "length": LENGTH}
    distill(out / "text", out, "draft", options)
    commands.record(out, "alphas", commands.chosen(out, ["draft"], out / "text", LENGTH))
    print(f"its alpha, to compare: foretoken measure --draft {out / 'models' / 'draft'}")


def prepare(novels: list[Path], folder: Path) -> None:
    """The novels by their names, with one space between words."""
    folder.mkdir(parents=True, exist_ok=True)
    for path in novels:
        text = "\n".join(GAP.sub(" ", line) for line in commands.lines(path))
        files.write(folder / path.name.removesuffix(".gz"), text.encode())


if __name__ == "__main__":
    told(main)
