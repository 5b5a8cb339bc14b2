"""The suffix automaton of `lookup` against the search that it took the place of, on known texts.

Replays at temperature 0 without a model: the target is the text itself, so a draft token is kept
where the text goes on with it. Reported are tokens and draft tokens a call of the target, which
gamma bounds, of the search before, the automaton, and the automaton in an engine, which reads
earlier outputs. Texts: Spec-Bench (the reference where there is one, else the second half of the
prompts), HumanEval (solutions; a function renamed; conversations that then ask for tests), GSM8K
(eight questions a conversation). MBPP's renamed functions had no part in choosing how the chance of
a draft token is estimated: the others had. Then microseconds a token read and a call, and bytes a
token, by length.

Expected before the first run: tokens a call within 3 % of the search's, but for edits, where the
longest match of any length knows which of two places this is: 5 to 10 % more; two thirds of the
draft tokens at gamma 4, less than half at 16. Earlier outputs: a tenth more where they share their
form (tests, answers), nothing elsewhere. Twice the time to read a token, as an automaton does more
than a dictionary (5 to 10 us), half the bytes.

Found: 2 us and 170 bytes instead; the rest is in results/. Tried and left out: the latest token in
place of the most frequent one, which gains 1 to 3 % in edits, where the old name has the counts,
and loses 2 % in summaries; a match's length, or twice it, as the most draft tokens
(SuffixDecoding), which takes fewer yet and loses 5 to 25 % of the tokens at gamma 16; the best of
eight shorter matches, which changes nothing.

    python benchmarks/lookup.py --data FOLDER    # three minutes

FOLDER has spec-bench/question.jsonl, humaneval/HumanEval.jsonl, mbpp/mbpp.jsonl,
gsm8k/test.jsonl.gz, a text in novels/, and GPT-2's merges and vocabulary in tokenizers/.
"""

from __future__ import annotations

import argparse
import gzip
import json
import tracemalloc
from array import array
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median
from time import perf_counter, process_time
from typing import Any

from rich.console import Console
from rich.table import Table
from tokenizers import Tokenizer
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel

from foretoken import LookupDrafter, SamplingParams
from foretoken.drafters.base import Draft, Draw, pack
from foretoken.sampling.keys import SequenceKey
from machine import save

GAMMAS, LENGTHS = (4, 16), (1_000, 10_000, 100_000)
GREEDY = Draw([SequenceKey(0, 0)], [0], [SamplingParams(0.0)])
Ids = list[int]
Texts = dict[str, list[tuple[Ids, Ids]]]  # by kind: prompts, and what follows them


class Before:
    """The search as it was: the longest match of at most 8 tokens, the latest of several, by the
    hashes of all runs of up to 8; as many draft tokens as are asked for."""

    def __init__(self) -> None:
        self.ids: Ids = []
        self.follows: dict[int, int] = {}
        self.undo: list[list[int | None]] = []  # what it kept for going back

    def start(self, rows: list[int], prompts: list[Ids], sources: None) -> None:
        self.commit(prompts)

    def commit(self, tokens: list[Ids]) -> None:
        for token in tokens[0]:
            keys, place = list(self._keys()), len(self.ids)
            self.undo.append([self.follows.get(key) for key in keys])
            self.follows.update(dict.fromkeys(keys, place))
            self.ids.append(token)

    def propose(self, gamma: Ids, draw: Draw) -> Draft:
        match = None
        for n, key in enumerate(self._keys(), 1):
            place = self.follows.get(key)
            if place is None or self.ids[place - n : place] != self.ids[len(self.ids) - n :]:
                break
            match = place
        copied = [] if match is None else self.ids[match : match + gamma[0]]
        return pack([[copied[i % len(copied)] for i in range(gamma[0] if copied else 0)]])

    def leave(self, rows: list[int]) -> None:
        self.__init__()

    def _keys(self) -> Iterator[int]:
        end = len(self.ids)
        return (hash(tuple(self.ids[end - n :])) for n in range(1, min(8, end) + 1))


def remembering() -> LookupDrafter:
    """As in an engine, all requests being one user's."""
    drafter = LookupDrafter()
    drafter.set_prefix_caching(True)
    return drafter


DRAFTERS: dict[str, Callable[[], Any]] = {
    "before": Before,
    "automaton": LookupDrafter,
    "with earlier outputs": remembering,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, required=True)
    data: Path = parser.parse_args().data
    encode = tokenizer(data / "tokenizers")
    rows: list[dict[str, Any]] = []
    for kind, texts in workloads(data, encode).items():
        for gamma in GAMMAS:
            for name, drafter in DRAFTERS.items():
                counts = replayed(drafter(), texts, gamma)
                rows.append({"texts": kind, "gamma": gamma, "drafter": name, **counts})
    novel = next(iter(sorted((data / "novels").glob("Cbronte*.gz"))))
    long = {
        "a novel": encode(gzip.open(novel, "rt").read()),
        "one token": [5] * max(LENGTHS),
        "a period of 10": list(range(10)) * (max(LENGTHS) // 10),
    }
    costs = [
        {"text": kind, "tokens": n, "drafter": name, **cost(DRAFTERS[name], ids[:n])}
        for kind, ids in long.items()
        for n in LENGTHS
        for name in ("before", "automaton")
    ]
    show(rows, costs)
    save("lookup", {"replays": rows, "costs": costs})


def tokenizer(folder: Path) -> Callable[[str], Ids]:
    lines = (folder / "gpt2_vocab.bpe").read_text().splitlines()[1:]
    merges = [(one, other) for one, other in (line.split() for line in lines if line)]
    encoder = Tokenizer(BPE(json.loads((folder / "gpt2_encoder.json").read_text()), merges))
    encoder.pre_tokenizer = ByteLevel(add_prefix_space=False)
    return lambda text: encoder.encode(text).ids


def workloads(data: Path, encode: Callable[[str], Ids]) -> Texts:
    pairs: dict[str, list[tuple[str, str]]] = {}
    texts: Texts = {}
    for question in lines(data / "spec-bench/question.jsonl"):
        kind, text = question["category"], "\n\n".join(question["turns"])
        if kind in ("translation", "summarization", "math_reasoning"):
            pairs.setdefault(kind, []).append((text + "\n\n", question["reference"][0]))
        else:
            kind, ids = kind if kind in ("qa", "rag") else "mt_bench", encode(text)
            texts.setdefault(kind, []).append((ids[: len(ids) // 2], ids[len(ids) // 2 :]))
    for task in lines(data / "humaneval/HumanEval.jsonl"):
        asks, code = task["prompt"], task["prompt"] + task["canonical_solution"]
        pairs.setdefault("HumanEval solutions", []).append((asks, task["canonical_solution"]))
        before, after = renamed(code, task["entry_point"])
        pairs.setdefault("HumanEval renamed", []).append((before, after))
        prompt = f"{before}{after}Now with tests.\n```python\n"
        tested = after.removesuffix("```\n") + task["test"] + "```\n"
        pairs.setdefault("HumanEval third turn", []).append((prompt, tested))
    for task in lines(data / "mbpp/mbpp.jsonl")[:100]:
        name = task["code"].partition("def ")[2].partition("(")[0].strip()
        pairs.setdefault("MBPP renamed", []).append(renamed(task["code"], name))
    talk = ""
    for i, question in enumerate(lines(data / "gsm8k/test.jsonl.gz")[:80]):
        talk = f"{talk if i % 8 else ''}Q: {question['question']}\nA: "
        pairs.setdefault("GSM8K eight turns", []).append((talk, question["answer"] + "\n"))
        talk += question["answer"] + "\n"
    return texts | {kind: [(encode(x), encode(y)) for x, y in some] for kind, some in pairs.items()}


def renamed(code: str, name: str) -> tuple[str, str]:
    """A function to be renamed, and the answer."""
    new = f"answer_{name.partition('_')[0]}"
    asks = f"```python\n{code}```\nRename `{name}` to `{new}`.\n```python\n"
    return asks, code.replace(name, new) + "```\n"


def lines(path: Path) -> list[dict[str, Any]]:
    with (gzip.open if path.suffix == ".gz" else open)(path, "rt") as file:
        return [json.loads(line) for line in file]


def replayed(drafter: Any, texts: list[tuple[Ids, Ids]], gamma: int) -> dict[str, float]:
    """The texts one after the other, each a row."""
    calls = tokens = drafted = kept = 0
    for prompt, text in texts:
        drafter.start([0], [list(prompt)], None)
        at = 0
        while at < len(text):
            most = min(gamma, len(text) - at - 1)
            draft_tokens = propose(drafter, most) if most else []
            right = next(
                (i for i, token in enumerate(draft_tokens) if token != text[at + i]),
                len(draft_tokens),
            )
            drafter.commit([text[at : at + right + 1]])
            at += right + 1
            calls, drafted, kept = calls + 1, drafted + len(draft_tokens), kept + right
        tokens += len(text)
        drafter.leave([0])
    return {
        "rows": len(texts),
        "tokens": tokens,
        "tokens_per_call": tokens / calls,
        "guesses_per_call": drafted / calls,
        "kept_per_guess": kept / drafted if drafted else 0.0,
    }


def propose(drafter: Any, gamma: int) -> Ids:
    return drafter.propose([gamma], GREEDY).tokens[0].tolist()


def cost(make: Callable[[], Any], ids: Ids) -> dict[str, float]:
    """Of a row of so many tokens: the median of three readings; a call that guesses 4 tokens, at
    the text's last hundred places, the median and the 95th; memory as Python's allocator counts
    it."""
    seconds = [timed(make, ids) for _ in range(3)]
    drafter = make()
    drafter.start([0], [ids[:-100]], None)
    calls = []
    for token in ids[-100:]:
        start = perf_counter()
        drafter.propose([4], GREEDY)
        calls.append(perf_counter() - start)
        drafter.commit([[token]])
    del drafter
    compact = array("i", ids)  # so that ids are the drafter's own objects, as a tokenizer's are
    tracemalloc.start()
    drafter = make()
    drafter.start([0], [[]], None)
    for token in compact:
        drafter.commit([[token]])
    size, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    return {
        "read_us_per_token": 1e6 * median(seconds) / len(ids),
        "call_us": 1e6 * median(calls),
        "slow_call_us": 1e6 * sorted(calls)[94],
        "bytes_per_token": size / len(ids),
    }


def timed(make: Callable[[], Any], ids: Ids) -> float:
    drafter = make()
    start = process_time()
    drafter.start([0], [list(ids)], None)
    return process_time() - start


def show(rows: list[dict[str, Any]], costs: list[dict[str, Any]]) -> None:
    replays = Table("texts", "gamma", "drafter", "tokens a call", "guesses a call", "kept")
    for row in rows:
        numbers = (row[x] for x in ("tokens_per_call", "guesses_per_call", "kept_per_guess"))
        cells = (f"{number:.2f}" for number in numbers)
        replays.add_row(row["texts"], str(row["gamma"]), row["drafter"], *cells)
    lengths = Table("text", "tokens", "drafter", "us a token", "us a call", "95 of 100", "bytes")
    for row in costs:
        names = ("read_us_per_token", "call_us", "slow_call_us", "bytes_per_token")
        cells = (f"{row[name]:.1f}" for name in names)
        lengths.add_row(row["text"], str(row["tokens"]), row["drafter"], *cells)
    for table in (replays, lengths):
        Console().print(table)


if __name__ == "__main__":
    main()
