"""Prompts on which the EAGLE-3 draft for SmolLM2-135M-Instruct was trained: the target writes its
own texts behind them.

Questions of GSM8K's training part, MBPP's problems, sentences to translate, passages of novels in
the public domain and of Wikipedia to sum up or ask about, and instructions that the target writes
itself. None of Spec-Bench, HumanEval or GSM8K's test part is among them.

    python benchmarks/smollm2_draft.py prompts --target FILE.gguf --data FOLDER --out prompts.jsonl
    foretoken train eagle --target FILE.gguf --data prompts.jsonl --out draft --dtype int8
    python benchmarks/gpu/train_draft.py FILE.gguf prompts.jsonl --own 0 --out OUT  # or on a GPU
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
from foretoken.loading.sources import find_source, load_tokenizer

COUNTS = {"gsm8k": 7473, "mbpp": 828, "translation": 4000, "novels": 3500, "wikipedia": 3500}
BEFORE = "<|im_start|>user\n"
ABOUT = (
    "Summarize the following text in a few sentences.\n\n",
    "Summarize: ",
    "Summarize:\n",
    "What happens in this passage?\n\n",
    "Who are the people in this text, and what do they want?\n\n",
    "Answer by the passage alone: what is the mood of the scene, and why?\n\n",
)
ASKED = ("What is {} known for?", "Who or what is {}?", "When was {} of importance?")
ASKED += ("where does {} come from?", "who is mentioned with {}?", "Summarize the text above.")
ALONE = ("Tell me about {}.", "what is {}?", "Write a short article about {}.", "where is {} from?")


def lines(path: Path) -> list[str]:
    opened: Any = gzip.open(path, "rt") if path.suffix == ".gz" else path.open()
    with opened as file:
        return [line.strip() for line in file if line.strip()]


def gsm8k(data: Path, dice: random.Random) -> Iterator[str]:
    for line in dice.sample(lines(data / "gsm8k/train.jsonl.gz"), COUNTS["gsm8k"]):
        yield json.loads(line)["question"]


def mbpp(data: Path, dice: random.Random) -> Iterator[str]:
    """Each problem in words, with its tests, and as the head of a function to complete."""
    for line in dice.sample(lines(data / "mbpp/mbpp.jsonl"), COUNTS["mbpp"]):
        text, code, tests = (json.loads(line)[name] for name in ("text", "code", "test_list"))
        yield dice.choice(("", "Python: ", "Complete this task in Python. ")) + text
        yield f"{text}\nYour code should pass these tests:\n\n" + "\n".join(tests)
        head = next((each for each in code.splitlines() if each.startswith("def ")), None)
        if head:
            yield f'Complete this Python function.\n\n{head.rstrip()}\n    """{text}"""\n'


def translation(data: Path, dice: random.Random) -> Iterator[str]:
    files = ("opennmt-ende-10k/train.de.gz", "tatoeba-ende/tatoeba.de.gz")
    sentences = [line for name in files for line in lines(data / name)]
    for text in dice.sample(sentences, COUNTS["translation"]):
        yield f"Translate German to English: {text}"


def novels(data: Path, dice: random.Random) -> Iterator[str]:
    files = sorted((data / "novels").glob("*.txt.gz"))
    for _ in range(COUNTS["novels"]):
        yield dice.choice(ABOUT) + passage(lines(dice.choice(files)), dice)


def wikipedia(data: Path, dice: random.Random) -> Iterator[str]:
    """Passages with a question behind them, and questions alone."""
    articles = dict[str, list[str]]()
    title = ""
    for line in lines(data / "wikitext-2/wiki.valid.raw.gz"):
        if line.startswith("= ") and not line.startswith("= ="):
            title = line.strip("= ")
        articles.setdefault(title, []).append(line.replace(" @-@ ", "-").replace(" @,@ ", ","))
    for _ in range(COUNTS["wikipedia"]):
        title = dice.choice(sorted(articles))
        if dice.random() < 0.3:
            yield dice.choice(ALONE).format(title)
        else:
            yield f"{passage(articles[title], dice)}\n{dice.choice(ASKED).format(title)}"


def passage(text: list[str], dice: random.Random) -> str:
    """Lines behind each other, 60 to 900 words of them."""
    at = dice.randrange(max(1, len(text) - 60))
    return " ".join(" ".join(text[at : at + 200]).split()[: dice.randint(60, 900)])


def own(spec: foretoken.Speculator, system: str, count: int) -> list[str]:
    """Instructions that the target writes where a user's turn begins, without those that do not
    end, or that it has written before."""
    texts = spec.generate(
        [system + BEFORE] * count, max_new_tokens=96, temperature=1.0, seed=1, gamma=0
    )
    ended = [text.text.strip() for text in texts if text.finish_reason == "stop"]
    return sorted({text for text in ended if len(text) > 8})


def write_prompts(args: argparse.Namespace) -> None:
    dice = random.Random(0)
    kinds = gsm8k, mbpp, translation, novels, wikipedia
    prompts = [p for make in kinds for p in make(args.data, dice)]
    words: Any = load_tokenizer(args.target, None, False)

    def templated(text: str) -> str:
        turns = [{"role": "user", "content": text}]
        return words.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)

    system = templated("").split(BEFORE)[0]
    if args.own:
        spec = foretoken.load(args.target, "none", dtype="int8")
        prompts += own(spec, system, args.own)
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
    network = find_source(args.target, None, False).load_network(torch.float32, torch.device("cpu"))
    network.save_pretrained(args.out)
    words: Any = load_tokenizer(args.target, None, False)
    words.save_pretrained(args.out)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    commands = parser.add_subparsers(required=True)
    prompts = commands.add_parser("prompts")
    prompts.add_argument("--target", required=True)
    prompts.add_argument("--data", type=Path, required=True)
    prompts.add_argument("--out", type=Path, required=True)
    prompts.add_argument("--own", type=int, default=1600, help="instructions of the target's own")
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
