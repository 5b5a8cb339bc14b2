"""`foretoken certify`: is the output the target's own, with this pair and on this machine?"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.progress import track
from typer import Option

from foretoken.cli import measure as cli
from foretoken.cli import option
from foretoken.cli import prompts as prompt_files
from foretoken.cli.quiet import quiet
from foretoken.errors import InputError

if TYPE_CHECKING:
    from foretoken.lab.certify import Certificate
    from foretoken.lab.odds import Test
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


def certify(
    target: option.Target = None,
    draft: Annotated[
        str | None, Option(help="Folder, hub id, lookup, ngram:FILE or uniform.")
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
    dtype: option.Dtype = "float32",
    draft_dtype: option.DraftDtype = None,
    device: option.Device = "cpu",
    runtime: option.Runtime = "auto",
    thorough: Annotated[bool, Option("--thorough", help="Eight times the texts.")] = False,
    as_json: option.Json = False,
) -> None:
    """Certify that a pair keeps the target's law: exit code 0 if so, 1 if not.

    Greedy text is compared with and without guesses, and a difference told apart from rounding.
    Sampled tokens are tested against the target's own laws and against plain samples, guesses
    against the q they report, passes over blocks against single tokens. Bugs planted in the same
    pair must be found. An exact pair fails one certificate in 10,000; the seed is fixed.
    """
    from foretoken.options import keys_of, require, require_place

    lines = cli.read(prompts, limit) if prompts else []
    require(1, gamma, rule, lenience=1.0)
    keys_of(seed, 1)
    require_place(runtime, dtype, draft_dtype)
    option.require_model(target)
    from foretoken.lab.certify import LAWS, Plan  # late: torch takes seconds to import
    from foretoken.lab.certify import certify as issue
    from foretoken.loading import load

    texts = TEXTS * (THOROUGH if thorough else 1)
    plan = Plan(gamma=gamma, rule=rule, texts=texts, seed=seed, laws=LAWS)
    quiet()
    spec = load(target, draft, dtype=dtype, draft_dtype=draft_dtype, device=device, runtime=runtime)
    try:
        found = issue(spec, _prompts(spec, lines), plan, _bar)
    except KeyboardInterrupt:
        raise typer.Exit(130) from None
    if as_json:
        print(json.dumps(_document(spec, plan, found), allow_nan=False))
    else:
        _show(spec, plan, found, Console(highlight=False))
    if found.verdict != "lossless":
        raise typer.Exit(1)


def _prompts(spec: Speculator, lines: list[prompt_files.Line]) -> list[Prompt]:
    if not lines and spec.tokenizer is None:
        raise InputError("the model has no tokenizer; give --prompts with ids, separated by commas")
    if not lines:
        return list(PROMPTS)
    return [(line if spec.tokenizer else prompt_files.as_ids(line)).prompt for line in lines]


def _bar(numbers: Sequence[int], what: str) -> Iterable[int]:
    return track(numbers, what, console=Console(stderr=True))


def _document(spec: Speculator, plan: Any, found: Certificate) -> dict[str, Any]:
    from foretoken.lab.certify import FALSE_ALARM
    from foretoken.lab.odds import POWER

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
    console.print(
        f"target {pair['target']}, draft {pair['draft']}: {pair['runtime']}, computed in "
        f"{found.shapes.dtype}, rule {plan.rule}, gamma {plan.gamma}, "
        f"{found.prompts} prompts, seed {plan.seed}\n",
        soft_wrap=True,
        markup=False,
    )
    parts = (_passes, _greedy, _guesses, _tests, _controls, _verdict)
    for line in chain.from_iterable(part(found) for part in parts):
        console.print(line, soft_wrap=True, markup=False)


def _passes(found: Certificate) -> list[str]:
    s = found.shapes
    return [
        f"passes   a block's logits are within {s.noise:.1e} of single tokens' at {s.positions} "
        f"places (rounding explains {s.allowed:.1e}), their laws within total variation "
        f"{s.variation:.1e}"
    ]


def _greedy(found: Certificate) -> list[str]:
    own = found.identity
    gammas = " and ".join(map(str, own.gammas))
    said = "identical" if not own.differences else f"{len(own.differences)} texts differ"
    return [
        f"greedy   {own.texts} texts of {own.tokens} tokens, gamma {gammas}, against plain: {said}",
        *(
            f"         prompt {one.prompt}, gamma {one.gamma}, token {one.place}: {one.plain} "
            f"became {one.speculative}; {_gap(one.gap)}, noise {one.noise:.1e}: {one.verdict}"
            for one in own.differences
        ),
    ]


def _gap(gap: float | None) -> str:
    return "one text had ended" if gap is None else f"logits {gap:.1e} apart"


def _guesses(found: Certificate) -> list[str]:
    drawn = found.guesses - found.certain
    said = f"{len(found.lies)} did not follow what was reported" if found.lies else "all as said"
    return [
        f"guesses  {drawn} drawn from a q, {found.certain} said to be certain: {said}",
        *(f"         {lie}" for lie in found.lies[:3]),
    ]


def _tests(found: Certificate) -> list[str]:
    """A line each; those of single prompts in one, the oddest."""
    lines = [f"\n{'test':<52}{'of':>16}{'p-value':>9}{'catches':>9}"]
    single: list[Test] = []
    for test in found.tests:
        name, _, prompt = test.name.partition(", prompt ")
        if prompt:
            single.append(test)
            continue
        if single:
            oddest = min(single, key=lambda one: one.p_value)
            lines.append(_line(oddest.name.replace(", prompt ", ", oddest: prompt "), oddest))
            single = []
        lines.append(_line(test.name, test))
    return lines


def _line(name: str, test: Test) -> str:
    caught = "" if test.catches is None else f"{test.catches:.3f}"
    return f"{name:<52}{f'{test.n} {test.of}':>16}{test.p_value:>9.1e}{caught:>9}".rstrip()


def _controls(found: Certificate) -> list[str]:
    from foretoken.lab.odds import POWER

    return [
        f"catches: the least total variation that a test finds with a chance of {POWER:.0%}\n",
        *(
            f"control  {one.name}: {'found, as it must be' if one.found else 'MISSED'}"
            for one in found.controls
        ),
    ]


def _verdict(found: Certificate) -> list[str]:
    from foretoken.lab.certify import FALSE_ALARM

    if found.verdict == "void":
        return ["\nVOID: a planted bug was missed; other prompts, or --thorough, may find it"]
    if found.verdict == "lossless":
        return [
            f"\nLOSSLESS: no test of {len(found.tests)} fell below {found.level:.1e}; an exact "
            f"pair would fail one certificate in {1 / FALSE_ALARM:,.0f}"
        ]
    return ["\nNOT LOSSLESS", *(f"  {fault}" for fault in found.faults)]
