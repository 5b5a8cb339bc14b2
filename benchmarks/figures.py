"""Every table of docs/performance.md that `foretoken bench` makes: builds the pairs, runs the
benches one after the other, keeps their JSON and plots in benchmarks/results/NAME.

The machine must be idle. About an hour; a run that is there already is not run again.

    python benchmarks/peers/make.py                      # the peers, once
    python benchmarks/figures.py --folder DIR            # DIR: for the pairs, 5 GB
    python benchmarks/figures.py --folder DIR t5-greedy  # only that one, again
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent
ALPHAS = ("0.02", "0.2", "0.5", "0.8", "0.86", "0.95")
PROMPTS = ([17, 230, 3051, 9, 1200, 31, 77, 801], [5, 600, 70, 3800, 91, 1002, 113, 12])
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

# name: pair, draft, law, dtype, gammas, peers, prompts, repeats
RUNS: dict[str, tuple[str, str, str, str, str, tuple[str, ...], int, int]] = {
    "default-greedy": ("", "", GREEDY, "float32", "2,3,4,5", (), 16, 5),
    "default-sampled": ("", "", SAMPLED, "float32", "2,3,4,5", (), 16, 5),
    "llama-f32-greedy": ("llama", "a86", GREEDY, "float32", "3,5", ALL, 1, 5),
    "llama-f32-sampled": ("llama", "a80", SAMPLED, "float32", "3,5", ALL[:1], 1, 5),
    "llama-f32-cut": ("llama", "a80", CUT, "float32", "3,5", (), 1, 5),
    "llama-bf16-greedy": ("llama", "a86", GREEDY, "bfloat16", "3,5", ALL, 1, 5),
    "llama-bf16-sampled": ("llama", "a80", SAMPLED, "bfloat16", "3,5", ALL[:1], 1, 5),
    "llama-int8-greedy": ("llama", "a86", GREEDY, "int8", "3,5", ALL[1:], 1, 5),
    "t5-f32-greedy": ("t5", "a86", GREEDY, "float32", "3,5", ALL[:1], 1, 5),
    "t5-bf16-greedy": ("t5", "a86", GREEDY, "bfloat16", "3,5", ALL[:1], 1, 5),
    "alpha-02": ("llama", "a02", SAMPLED, "float32", "1,3", (), 1, 5),
    "alpha-20": ("llama", "a20", SAMPLED, "float32", "1,2,3", (), 2, 5),
    "alpha-50": ("llama", "a50", SAMPLED, "float32", "2,3,5", (), 2, 5),
    "alpha-80": ("llama", "a80", SAMPLED, "float32", "3,5,7", (), 2, 5),
    "alpha-95": ("llama", "a95", SAMPLED, "float32", "5,11,16", (), 2, 5),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("names", nargs="*", choices=[*RUNS, []])
    given = parser.parse_args()
    for name in given.names or RUNS:
        out = HERE / "results" / name
        if given.names or not (out / "bench.json").exists():
            bench(name, given.folder, out)


def bench(name: str, folder: Path, out: Path) -> None:
    pair, draft, law, dtype, gammas, peers, count, repeats = RUNS[name]
    folder.mkdir(parents=True, exist_ok=True)
    prompts = folder / f"{pair or 'texts'}-{count}.jsonl"
    given = PROMPTS if pair else TEXTS
    prompts.write_text("".join(json.dumps({"prompt": p}) + "\n" for p in given[:count]))
    command = [sys.executable, "-m", "foretoken", "bench", "--prompts", prompts, "--out", out]
    command += [*law.split(), "--dtype", dtype, "--gamma", gammas]
    command += ["--repeats", str(repeats), "--max-new-tokens", "96"]
    if pair:
        place = built(pair, folder)
        command += ["--target", place / "target", "--draft", place / f"draft-{draft}"]
    for peer in peers:
        command += ["--vs", peer]
    print(f"== {name}", file=sys.stderr, flush=True)
    subprocess.run(command, check=True)


def built(pair: str, folder: Path) -> Path:
    place = folder / pair
    if not (place / "pair.json").exists():
        pairs = [sys.executable, HERE / "pairs.py", pair, place, "--alpha", *ALPHAS]
        subprocess.run(pairs, check=True)
    return place


if __name__ == "__main__":
    main()
