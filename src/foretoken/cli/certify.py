"""`foretoken certify`: is the output the target's own, with this pair and on this machine?"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict, replace
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.progress import track
from typer import Option

from foretoken.cli import measure as cli
from foretoken.cli import option
from foretoken.cli import prompts as prompt_files
from foretoken.cli.command import command
from foretoken.cli.page import labelled, page, prose
from foretoken.cli.quiet import quiet
from foretoken.errors import InputError

if TYPE_CHECKING:
    from foretoken.lab.certificate.certify import Certificate
    from foretoken.lab.certificate.odds import Test
    from foretoken.options import Prompt
    from foretoken.speculator import Speculator

PROMPTS = [
    "It was the first day of the year, and",
    "The old man looked out at the sea and said that",
    '"I do not know," said the girl, and she',
    "When they came to the house, the door was",
    "There was once a king who had",
    "In the morning the two brothers went",
    "He opened the letter slowly, and then",
    "The road led over the hill to a",
]
TEXTS = 192  # sampled of a prompt, in each law, speculatively and plainly
THOROUGH = 8  # times the sampled texts: a third of the total variation is caught
UNTOLD = 3  # exit code where neither "lossless" nor "not lossless" can be said
LABEL = 9  # letters of the column of labels


@command
def certify(
    loading: option.PairLoading,
    target: option.Target = None,
    draft: Annotated[
        str | None, Option(help="Folder, hub id, heads:FILE, ngram:FILE, lookup or uniform.")
    ] = None,
    prompts: Annotated[
        Path | None,
        Option(help="One prompt a line, or .jsonl; left out: eight that are built in."),
    ] = None,
    limit: Annotated[
        int, Option(help="Prompts of the file to use; texts are sampled of the first 8.")
    ] = 32,
    gamma: Annotated[int, Option(help="Guesses per target call.")] = 3,
    rule: Annotated[str, Option(help="The rule to certify.")] = "block",
    seed: option.Seed = 0,
    temperature: Annotated[
        float, Option(help="Of a law of yours, tested beside temperature 1 in place of top-k 20.")
    ] = 0.0,
    top_k: Annotated[int, Option(help="Of this law; 0 is off.")] = 0,
    top_p: Annotated[float, Option(help="Of this law; 1 is off.")] = 1.0,
    min_p: Annotated[float, Option(help="Of this law; 0 is off.")] = 0.0,
    thorough: Annotated[bool, Option("--thorough", help="Eight times the texts.")] = False,
    as_json: option.Json = False,
) -> None:
    """Certify that a pair keeps the target's law. Exit code 0: it does; 1: it does not.

    Exit code 2: a mistake in what was asked; 3: nothing can be said, for a planted bug was missed
    or foretoken itself failed.

    Greedy text is compared with and without guesses, and a difference told apart from rounding.
    Sampled tokens are tested against the target's own laws and against plain samples, guesses
    against the q they report, passes over blocks against single tokens. Bugs planted in the same
    pair must be found. An exact pair fails one certificate in 10,000; the seed is fixed.
    """
    from foretoken.options import keys_of, require, require_place
    from foretoken.sampling.params import SamplingParams

    lines = cli.read(prompts, limit) if prompts else []
    own = SamplingParams(temperature, top_k, top_p, min_p)
    require(1, gamma, rule, lenience=1.0)
    keys_of(seed, 1)
    require_place(loading.runtime, loading.dtype, loading.draft_dtype)
    option.require_model(target, loading)
    from foretoken.lab.certificate.certify import Plan, laws  # late: torch takes seconds to import
    from foretoken.lab.certificate.certify import certify as issue

    texts = TEXTS * (THOROUGH if thorough else 1)
    plan = Plan(gamma=gamma, rule=rule, texts=texts, seed=seed, laws=laws(own))
    quiet()
    spec = loading.load(target, draft)
    spec = replace(spec, suggested={})  # the laws are the certificate's own
    try:
        found = issue(spec, _prompts(spec, lines), plan, _bar)
    except KeyboardInterrupt:
        raise typer.Exit(130) from None
    if as_json:
        print(json.dumps(_document(spec, plan, found), allow_nan=False))
    else:
        _show(spec, plan, found, page())
    if found.verdict != "lossless":
        raise typer.Exit(1 if found.verdict == "not lossless" else UNTOLD)


def _prompts(spec: Speculator, lines: list[prompt_files.Line]) -> list[Prompt]:
    if not lines and spec.tokenizer is None:
        raise InputError("the model has no tokenizer; give --prompts with ids, separated by commas")
    if not lines:
        return list(PROMPTS)
    return [(line if spec.tokenizer else prompt_files.as_ids(line)).prompt for line in lines]


def _bar(numbers: Sequence[int], what: str) -> Iterable[int]:
    return track(numbers, what, console=Console(stderr=True))


def _document(spec: Speculator, plan: Any, found: Certificate) -> dict[str, Any]:
    from foretoken.lab.certificate.certify import FALSE_ALARM
    from foretoken.lab.certificate.odds import POWER

    return {
        "verdict": found.verdict,
        "faults": found.faults,
        "false_alarm": FALSE_ALARM,
        "power": POWER,
        **_pair(spec),
        "plan": asdict(plan),
        **_finite(asdict(found)),
    }


def _finite(value: Any) -> Any:
    """With null where a number is infinite or none: JSON has no other word for it."""
    if isinstance(value, dict):
        return {key: _finite(one) for key, one in value.items()}
    if isinstance(value, list):
        return [_finite(one) for one in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _pair(spec: Speculator) -> dict[str, str]:
    return {"target": spec.target_name, "draft": spec.draft_name, "runtime": spec.target.runtime}


def _show(spec: Speculator, plan: Any, found: Certificate, console: Console) -> None:
    pair = _pair(spec)
    prose(
        console,
        f"target {pair['target']}, draft {pair['draft']}: {pair['runtime']}, computed in "
        f"{found.shapes.dtype}, rule {plan.rule}, gamma {plan.gamma}, "
        f"{found.prompts} prompts, seed {plan.seed}",
    )
    console.print()
    labelled(console, [_passes(found), *_greedy(found), *_guesses(found)], LABEL)
    console.print()
    for line in _tests(found):
        console.print(line, markup=False)
    prose(
        console,
        f"catches: the least total variation that a test finds with a chance of {_power()}",
    )
    console.print()
    labelled(console, _controls(found), LABEL)
    console.print()
    for line in _verdict(found):
        prose(console, line)


def _passes(found: Certificate) -> tuple[str, str]:
    s = found.shapes
    return (
        "passes",
        f"a block's logits are within {s.noise:.1e} of single tokens' at {s.positions} places "
        f"(rounding explains {s.allowed:.1e}), their laws within total variation {s.variation:.1e}",
    )


def _greedy(found: Certificate) -> list[tuple[str, str]]:
    own = found.identity
    gammas = " and ".join(map(str, own.gammas))
    said = "identical" if not own.differences else f"{len(own.differences)} texts differ"
    return [
        (
            "greedy",
            f"{own.texts} texts of {own.tokens} tokens, gamma {gammas}, against plain: {said}",
        ),
        *(
            (
                "",
                f"prompt {one.prompt}, gamma {one.gamma}, token {one.place}: {one.plain} became "
                f"{one.speculative}; {_gap(one.gap)}, noise {one.noise:.1e}: {one.verdict}",
            )
            for one in own.differences
        ),
    ]


def _gap(gap: float | None) -> str:
    return "one text had ended" if gap is None else f"logits {gap:.1e} apart"


def _guesses(found: Certificate) -> list[tuple[str, str]]:
    drawn = found.guesses - found.certain
    said = f"{len(found.lies)} did not follow what was reported" if found.lies else "all as said"
    return [
        ("guesses", f"{drawn} drawn from a q, {found.certain} said to be certain: {said}"),
        *(("", lie) for lie in found.lies[:3]),
    ]


def _tests(found: Certificate) -> list[str]:
    """A line each, law by law; those of single prompts in one, the oddest."""
    lines: list[str] = []
    law = ""
    for test in _oddest(found.tests):
        own, _, name = test.name.partition(": ")
        if own != law:
            lines += [""] * bool(law)
            law = own
            lines.append(f"{law:<36}{'of':>15}{'p-value':>10}{'catches':>10}")
        lines.append(_line(f"  {name}", test))
    return lines


def _oddest(tests: list[Test]) -> list[Test]:
    """With one of each run of tests of single prompts."""
    shown: list[Test] = []
    for single, run in groupby(tests, lambda test: ", prompt " in test.name):
        own = list(run)
        if single:
            odd = min(own, key=lambda one: one.p_value)
            own = [replace(odd, name=odd.name.replace(", prompt ", ", oddest: prompt "))]
        shown += own
    return shown


def _line(name: str, test: Test) -> str:
    caught = "" if test.catches is None else f"{test.catches:.3f}"
    return f"{name:<36}{f'{test.n} {test.of}':>15}{test.p_value:>10.1e}{caught:>10}".rstrip()


def _power() -> str:
    from foretoken.lab.certificate.odds import POWER

    return f"{POWER:.0%}"


def _controls(found: Certificate) -> list[tuple[str, str]]:
    return [
        ("control", f"{one.name}: {'found, as it must be' if one.found else 'MISSED'}")
        for one in found.controls
    ]


def _verdict(found: Certificate) -> list[str]:
    from foretoken.lab.certificate.certify import FALSE_ALARM

    if found.verdict == "void":
        return ["VOID: a planted bug was missed; other prompts, or --thorough, may find it"]
    if found.verdict == "lossless":
        return [
            f"LOSSLESS: no test of {len(found.tests)} fell below {found.level:.1e}; an exact "
            f"pair would fail one certificate in {1 / FALSE_ALARM:,.0f}"
        ]
    return ["NOT LOSSLESS", *found.faults]
