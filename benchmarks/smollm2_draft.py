"""Prompts on which the EAGLE-3 draft for SmolLM2-135M-Instruct was trained: `foretoken train eagle`
lets the target write its own texts behind them.

Instructions that the target writes itself, questions of GSM8K's training part, MBPP's problems,
sentences to translate, and passages of novels in the public domain to sum up or ask about. None of
Spec-Bench, HumanEval or GSM8K's test part is among them.

    python benchmarks/smollm2_draft.py prompts --target FILE.gguf --data FOLDER --out prompts.jsonl
    foretoken train eagle --target FILE.gguf --data prompts.jsonl --out draft --dtype int8
    python benchmarks/smollm2_draft.py pack --draft draft --out FOLDER  # eight bits, row by row
    python benchmarks/smollm2_draft.py folder --target FILE.gguf --out WEIGHTS  # for peers
"""

from __future__ import annotations

import argparse
import gzip
import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

import foretoken
from foretoken.loading.sources import source, tokenizer

COUNTS = {"own": 1600, "gsm8k": 900, "mbpp": 400, "translation": 500, "novels": 600}
BEFORE = "<|im_start|>user\n"
ABOUT = (
    "Summarize the following text in a few sentences.",
    "What happens in this passage?",
    "Who are the people in this text, and what do they want?",
    "Answer by the passage alone: what is the mood of the scene, and why?",
)


def lines(path: Path) -> list[str]:
    opened: Any = gzip.open(path, "rt") if path.suffix == ".gz" else path.open()
    with opened as file:
        return [line.strip() for line in file if line.strip()]


def gsm8k(data: Path, dice: random.Random) -> Iterator[str]:
    for line in dice.sample(lines(data / "gsm8k/train.jsonl.gz"), COUNTS["gsm8k"]):
        yield json.loads(line)["question"]


def mbpp(data: Path, dice: random.Random) -> Iterator[str]:
    for line in dice.sample(lines(data / "mbpp/mbpp.jsonl"), COUNTS["mbpp"]):
        text = json.loads(line)["text"]
        yield dice.choice(("", "Python: ", "Complete this task in Python. ")) + text


def translation(data: Path, dice: random.Random) -> Iterator[str]:
    files = ("opennmt-ende-10k/train.de.gz", "tatoeba-ende/tatoeba.de.gz")
    sentences = [line for name in files for line in lines(data / name)]
    for text in dice.sample(sentences, COUNTS["translation"]):
        yield f"Translate German to English: {text}"


def novels(data: Path, dice: random.Random) -> Iterator[str]:
    files = sorted((data / "novels").glob("*.txt.gz"))
    for _ in range(COUNTS["novels"]):
        text = lines(dice.choice(files))
        at = dice.randrange(max(1, len(text) - 60))
        words = " ".join(text[at : at + 60]).split()[: dice.randint(60, 220)]
        yield f"{dice.choice(ABOUT)}\n\n{' '.join(words)}"


def own(spec: foretoken.Speculator, system: str) -> list[str]:
    """Instructions that the target writes where a user's turn begins, without those that do not
    end, or that it has written before."""
    texts = spec.generate(
        [system + BEFORE] * COUNTS["own"], max_new_tokens=96, temperature=1.0, seed=1, gamma=0
    )
    ended = [text.text.strip() for text in texts if text.finish_reason == "stop"]
    return sorted({text for text in ended if len(text) > 8})


def write_prompts(args: argparse.Namespace) -> None:
    dice = random.Random(0)
    prompts = [p for make in (gsm8k, mbpp, translation, novels) for p in make(args.data, dice)]
    spec = foretoken.load(args.target, "none", dtype="int8")
    tokenizer: Any = spec.tokenizer

    def templated(text: str) -> str:
        turns = [{"role": "user", "content": text}]
        return tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)

    system = templated("").split(BEFORE)[0]
    prompts += own(spec, system)
    dice.shuffle(prompts)
    with args.out.open("w") as file:
        for prompt in prompts:
            file.write(json.dumps({"source": templated(prompt)}) + "\n")
    print(f"{args.out}: {len(prompts)} prompts")


def pack(args: argparse.Namespace) -> None:
    """Round the matrices to eight bits, a scale a row, by the names of compressed-tensors. The
    output layer is the target's own rows and stays there."""
    packed: dict[str, torch.Tensor] = {}
    tensors = load_file(args.draft / "model.safetensors")
    del tensors["lm_head.weight"], tensors["t2d"]  # d2t says which rows
    for name, x in tensors.items():
        if x.ndim == 2:
            scale = x.abs().amax(1, keepdim=True).clamp(min=1e-12) / 127
            packed |= {name: (x / scale).round().to(torch.int8), f"{name}_scale": scale}
        else:
            packed[name] = x
    config = json.loads((args.draft / "config.json").read_text())
    weights = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "channel"}
    groups = {"group_0": {"targets": ["Linear"], "weights": weights}}
    config["speculators_config"]["verifier"]["name_or_path"] = "HuggingFaceTB/SmolLM2-135M-Instruct"
    config["quantization_config"] = {
        "quant_method": "compressed-tensors",
        "format": "int-quantized",
        "config_groups": groups,
    }
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    save_file(packed, args.out / "model.safetensors", metadata={"format": "pt"})


def write_folder(args: argparse.Namespace) -> None:
    """Write the weights of the GGUF file as other libraries read them, with the tokenizer."""
    network = source(args.target, None, False).network(torch.float32, torch.device("cpu"))
    network.save_pretrained(args.out)
    words: Any = tokenizer(args.target, None, False)
    words.save_pretrained(args.out)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    commands = parser.add_subparsers(required=True)
    prompts = commands.add_parser("prompts")
    prompts.add_argument("--target", required=True)
    prompts.add_argument("--data", type=Path, required=True)
    prompts.add_argument("--out", type=Path, required=True)
    prompts.set_defaults(run=write_prompts)
    packing = commands.add_parser("pack")
    packing.add_argument("--draft", type=Path, required=True)
    packing.add_argument("--out", type=Path, required=True)
    packing.set_defaults(run=pack)
    folder = commands.add_parser("folder")
    folder.add_argument("--target", required=True)
    folder.add_argument("--out", type=Path, required=True)
    folder.set_defaults(run=write_folder)
    args = parser.parse_args()
    args.run(args)


if __name__ == "__main__":
    main()
