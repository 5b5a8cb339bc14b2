"""The target drafts for itself (`draft="self:int4"`, `"self:int8"`): the paper's table of such
copies in every precision, and what a look-up in front of them adds.

Expected: c at most 1.25 times the ratio of the bytes that a pass reads, plus 0.05; at least 0.95 of
Theorem 3.8 with the measured alpha, c and v; a look-up in front no slower than the copy alone, and
faster where texts repeat.

    python benchmarks/self_drafts.py                                  # the shipped target
    python benchmarks/self_drafts.py --target DIR --prompts FILE --dtype float32 bfloat16 int8
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path
from statistics import fmean, median
from typing import Any

from rich.console import Console
from rich.table import Table

import foretoken
import machine
from figures import TEXTS
from foretoken import theory
from foretoken.cli.prompts import for_model, read
from foretoken.costing.costs import of
from foretoken.drafters.lookup import Repeats
from foretoken.loading.load import asset
from foretoken.loading.options import ROUNDED
from foretoken.loading.sources import source
from foretoken_lab.experiments.beyond import by_prompt, in_turn, way

BITS = {"float32": 32, "bfloat16": 16, "int8": 8, "int4": 4}
SHOWN = ("alpha", "c", "bound", "v", "formula", "measured", "of the formula")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--target", default=None)
    parser.add_argument("--prompts", type=Path, help="as of foretoken generate --prompt-file")
    parser.add_argument("--dtype", nargs="+", default=["float32", "bfloat16", "int8"])
    parser.add_argument("--gammas", type=int, nargs="+", default=[2, 4, 6])
    parser.add_argument("--temperature", type=float, nargs="+", default=[0.0, 1.0])
    parser.add_argument("--texts", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--name", default="shipped-target", help="of the results' file")
    arguments = parser.parse_args()
    rows: list[dict[str, Any]] = []
    for dtype in arguments.dtype:
        for kind in ROUNDED[ROUNDED.index(dtype) + 1 if dtype in ROUNDED else 0 :]:
            spec = foretoken.load(arguments.target, f"self:{kind}", dtype=dtype)
            for temperature in arguments.temperature:
                rows += measured(spec, arguments, dtype, kind, temperature)
                machine.save(
                    f"self-{arguments.name}", {"arguments": _plain(arguments), "rows": rows}
                )
    table = Table("dtype", "copy", "T", "gamma", *SHOWN)
    for row in rows:
        figures = ("" if row[name] is None else f"{row[name]:.2f}" for name in SHOWN)
        table.add_row(row["dtype"], row["copy"], f"{row['T']:g}", row["gamma"], *figures)
    Console().print(table)


def measured(
    spec: foretoken.Speculator, arguments: argparse.Namespace, dtype: str, kind: str, T: float
) -> list[dict[str, Any]]:
    """A row for each gamma, the automatic one, and that with a look-up in front; all in turn."""
    prompts = _prompts(spec, arguments)
    looking = replace(spec, predicted_output=Repeats)
    gammas = {"0": 0, **{str(gamma): gamma for gamma in arguments.gammas}, "automatic": None}
    options = {"temperature": T, "ignore_eos": True}
    ways = {name: way(spec, gamma=gamma, **options) for name, gamma in gammas.items()}
    ways["with look-up"] = way(looking, **options)
    completions = in_turn(ways, prompts, repeats=arguments.repeats, tokens=arguments.tokens)
    times = {name: fmean(map(median, by_prompt(runs))) for name, runs in completions.items()}
    head = {"dtype": dtype, "copy": kind, "T": T, "bound": _bound(arguments.target, dtype, kind)}
    texts = {
        name: [text for repeat in runs for text in repeat] for name, runs in completions.items()
    }
    plain = [step for one in texts["0"] for step in one.steady.steps]
    return [
        head | _row(name, gammas.get(name), own, plain, times) | {"seconds": times[name]}
        for name, own in texts.items()
        if name != "0"
    ]


def _row(
    name: str, gamma: int | None, completions: list[Any], plain: list[Any], times: dict[str, float]
) -> dict[str, Any]:
    steps = [step for one in completions for step in one.steady.steps]
    overlaps = [overlap for one in completions for step in one.steps for overlap in step.overlaps]
    costs, alpha = of([*plain, *steps]), fmean(overlaps) if overlaps else None
    row = {"gamma": name, "alpha": alpha, "c": costs.c or None}
    row |= {"measured": times["0"] / times[name]}
    if gamma is None or alpha is None:
        return row | {"v": None, "formula": None, "of the formula": None}
    tokens = len(completions[0].tokens)
    formula = theory.walltime_factor(alpha, gamma, costs.c, v=costs.v, tokens=tokens)
    share = row["measured"] / formula
    return row | {"v": costs.v(gamma + 1), "formula": formula, "of the formula": share}


def _bound(target: str | None, dtype: str, kind: str) -> float:
    """What c may be: 1.25 of the ratio of the bytes that a pass reads, plus 0.05. The output layer
    of a copy in four bits has eight."""
    network = source(target or asset("target"), None, False).empty
    config = network.config
    head = config.vocab_size * config.hidden_size
    others = head * (1 if config.tie_word_embeddings else 2)
    layers = sum(weight.numel() for weight in network.parameters()) - others
    copy, full = (layers * bits + head * max(bits, 8) for bits in (BITS[kind], BITS[dtype]))
    return 1.25 * copy / full + 0.05


def _prompts(spec: foretoken.Speculator, arguments: argparse.Namespace) -> list[Any]:
    if arguments.prompts is None:
        return list(TEXTS[: arguments.texts])
    lines = read(None, arguments.prompts)[: arguments.texts]
    return [for_model(line, spec) for line in lines]


def _plain(arguments: argparse.Namespace) -> dict[str, Any]:
    return {name: str(value) for name, value in vars(arguments).items()}


if __name__ == "__main__":
    main()
