"""Races of synthetic pairs and of the pair that ships: builds the pairs, runs the
benches one after the other, writes their JSON to benchmarks/results/NAME.

The machine must be idle. About an hour and a half; a bench that has a result is skipped.

    python benchmarks/peers/make.py                      # the peers, once
    python benchmarks/figures.py --folder DIR            # DIR: for the pairs, 5 GB
    python benchmarks/figures.py --folder DIR llama-f32-greedy  # only that one, again
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

HERE = Path(__file__).parent
PROMPTS = ([17, 230, 3051, 9, 1200, 31, 77, 801], [5, 600, 70, 3800, 91, 1002, 113, 12])
BATCH = 16
DICE = random.Random(0)
MANY = tuple(DICE.sample(range(2, 32_000), DICE.randint(4, 16)) for _ in range(BATCH))
TEXTS = (
    "The old house stood at the end of the lane, and",
    "She opened the letter with trembling hands, for",
    "It was a cold morning in November when",
    '"I do not believe you," said the captain,',
    "The children ran down to the river, where",
    "Mr. Brown had never been to London before, but",
    "When the door closed behind him, he",
    "In the garden there was a small stone",
    "My dear friend, I have received your",
    "The ship had been three days at sea when",
    '"Where are you going?" asked the old man',
    "After dinner they sat by the fire and",
    "The doctor shook his head and said that",
    "It is a truth that few men",
    "The road led through a dark wood, and",
    "There was a knock at the door, and",
)
GREEDY, SAMPLED = "--temperature=0", "--temperature=1"
CUT = f"{SAMPLED} --top-k=50 --top-p=0.9"
ALL = ("transformers", "openvino-genai", "llama.cpp")


class Bench(NamedTuple):
    """Options of `race.py`. No pair: the one that ships, on texts. `batch`: as its
    `--batch`, on as many prompts as there are."""

    pair: str
    draft: str
    distribution: str
    dtype: str
    gammas: str
    peers: tuple[str, ...]
    prompts: int
    tokens: int = 96
    rounds: int = 5
    batch: str = ""


BATCHED = {"prompts": BATCH, "tokens": 32, "rounds": 3, "batch": "1,2,4,8,16"}

RUNS = {
    "default-greedy": Bench("", "", GREEDY, "float32", "2,3,4,5", (), 16),
    "default-sampled": Bench("", "", SAMPLED, "float32", "2,3,4,5", (), 16),
    "llama-f32-greedy": Bench("llama", "a86", GREEDY, "float32", "3,5", ALL, 1),
    "llama-f32-sampled": Bench("llama", "a80", SAMPLED, "float32", "3,5", ALL[:1], 1),
    "llama-f32-cut": Bench("llama", "a80", CUT, "float32", "3,5", (), 1),
    "alpha-02": Bench("llama", "a02", SAMPLED, "float32", "1,3", (), 1),
    "alpha-20": Bench("llama", "a20", SAMPLED, "float32", "1,2,3", (), 2),
    "alpha-50": Bench("llama", "a50", SAMPLED, "float32", "2,3,5", (), 2),
    "alpha-80": Bench("llama", "a80", SAMPLED, "float32", "3,5,7", (), 2),
    "alpha-95": Bench("llama", "a95", SAMPLED, "float32", "5,11,16", (), 2),
    "batch-f32-greedy": Bench("llama", "a80", GREEDY, "float32", "3", ALL[:2], **BATCHED),
    "batch-f32-sampled": Bench("llama", "a80", SAMPLED, "float32", "3", ALL[:1], **BATCHED),
    "batch-bf16-greedy": Bench("llama", "a80", GREEDY, "bfloat16", "3", ALL[:2], **BATCHED),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("names", nargs="*", choices=[*RUNS, []])
    arguments = parser.parse_args()
    for name in arguments.names or RUNS:
        folder = HERE / "results" / name
        if arguments.names or not (folder / "bench.json").exists():
            bench(name, arguments.folder, folder)


def bench(name: str, folder: Path, out: Path) -> None:
    run = RUNS[name]
    folder.mkdir(parents=True, exist_ok=True)
    prompts = folder / f"{run.pair or 'texts'}-{run.prompts}.jsonl"
    texts = ((MANY if run.batch else PROMPTS) if run.pair else TEXTS)[: run.prompts]
    prompts.write_text("".join(json.dumps({"prompt": p}) + "\n" for p in texts))
    command = [sys.executable, HERE / "race.py", "--prompts", prompts, "--out", out]
    command += [*run.distribution.split(), "--dtype", run.dtype, "--gamma", run.gammas]
    command += ["--repeats", str(run.rounds), "--max-new-tokens", str(run.tokens)]
    if run.batch:
        command += ["--batch", run.batch]
    if run.pair:
        place = built(run.pair, folder)
        command += ["--target", place / "target", "--draft", place / f"draft-{run.draft}"]
    for peer in run.peers:
        command += ["--vs", peer]
    print(f"== {name}", file=sys.stderr, flush=True)
    subprocess.run(command, check=True)


def built(pair: str, folder: Path) -> Path:
    place = folder / pair
    if not (place / "pair.json").exists():
        alphas = sorted({f"0.{run.draft[1:]}" for run in RUNS.values() if run.pair == pair})
        pairs = [sys.executable, HERE / "pairs.py", pair, place, "--alpha", *alphas]
        subprocess.run(pairs, check=True)
    return place


if __name__ == "__main__":
    main()
