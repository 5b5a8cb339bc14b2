"""`foretoken certify`: test that a pair's output on this machine has the target's distribution."""

from __future__ import annotations

import sys
from dataclasses import asdict, replace
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from typer import Option

from foretoken.cli import option
from foretoken.cli import prompts as prompt_files
from foretoken.cli.command import command, quiet
from foretoken.cli.render import bar, labelled, page, prose, table
from foretoken.errors import InputError
from foretoken.serving.options import EngineOptions

if TYPE_CHECKING:
    from foretoken.certificate.certify import Certificate
    from foretoken.loading.target import KnownTarget
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
TEXTS = 192  # sampled per prompt and distribution, with draft tokens and without
THOROUGH = 8  # times the texts: finds a third of the total variation
VOID = 3  # exit code where the certificate says neither "lossless" nor "not lossless"
LABEL = 9  # letters of the column of labels


@command
def certify(
    loading: option.PairLoading,
    target: option.Target = None,
    draft: Annotated[
        str | None,
        Option(help="Draft: a folder or hub id, mtp, lookup, uniform or MODULE:ARGUMENT."),
    ] = None,
    prompts: Annotated[
        Path | None,
        Option(help=f"File of prompts. {option.PROMPTS} Default: eight built-in ones."),
    ] = None,
    limit: Annotated[
        int,
        Option(
            help="Use only the first prompts of the file; the first 8 of them are sampled from."
        ),
    ] = 32,
    gamma: Annotated[int, Option(help="Draft tokens per step.")] = 3,
    rule: Annotated[str, Option(help="Acceptance method to certify.")] = "block",
    seed: option.Seed = 0,
    temperature: Annotated[
        float, Option(help="Also test this temperature, in place of temperature 1 with top-k 20.")
    ] = 0.0,
    top_k: Annotated[int, Option(help="Also test this top-k; 0 is off.")] = 0,
    top_p: Annotated[float, Option(help="Also test this top-p; 1 is off.")] = 1.0,
    min_p: Annotated[float, Option(help="Also test this min-p; 0 is off.")] = 0.0,
    thorough: Annotated[
        bool, Option("--thorough", help="Sample eight times as many texts.")
    ] = False,
    as_json: option.Json = False,
) -> None:
    """Certify that a pair's output has the target's distribution. Exit code 0: yes; 1: no.

    Exit code 2: a usage error; 3: no answer, since a planted bug was missed or foretoken failed.

    Greedy text is compared with plain greedy text, and differences are told apart from rounding.
    Sampled tokens are tested against the target's distributions and against plain samples, draft
    tokens against the q they report, forwards over blocks against single tokens. Bugs planted in
    the same pair must be found. An exact pair fails one certificate in 10,000; the seed is fixed.
    """
    from foretoken.options import keys_of, require
    from foretoken.sampling.params import SamplingParams

    lines = prompt_files.first(prompts, limit) if prompts else []
    params = SamplingParams(temperature, top_k, top_p, min_p)
    require(gamma, rule, lenience=1.0)
    keys_of(seed, [1])
    target = option.chosen(target)
    loading.require(target)
    from foretoken.certificate.certify import (  # late: torch takes seconds to import
        CertificatePlan,
        distributions,
    )
    from foretoken.certificate.certify import certify as issue

    texts = TEXTS * (THOROUGH if thorough else 1)
    plan = CertificatePlan(
        gamma=gamma, rule=rule, texts=texts, seed=seed, distributions=distributions(params)
    )
    quiet()
    chosen: list[Prompt] = []
    spec = loading.load(
        target,
        draft,
        EngineOptions().max_rows,
        lambda known: chosen.extend(_prompts(known, lines)),
    ).prepared()
    spec = replace(spec, suggested={})  # the distributions are the certificate's own
    try:
        _announce(spec, chosen, plan)
        certificate = issue(spec, chosen, plan, bar)
    except KeyboardInterrupt:
        raise typer.Exit(130) from None
    if as_json:
        from pydantic_core import to_json  # late: `--help` does without

        print(to_json(_document(spec, plan, certificate), inf_nan_mode="null").decode())
    else:
        _show(spec, plan, certificate, page())
    if certificate.verdict != "lossless":
        raise typer.Exit(1 if certificate.verdict == "not lossless" else VOID)


def _announce(spec: Speculator, prompts: list[Prompt], plan: Any) -> None:
    """Tell how many tests there are, and how long they will take."""
    from foretoken.certificate.certify import SAMPLED, count, expected

    seconds = expected(spec, prompts, plan)
    long = f"{seconds:.0f} seconds" if seconds < 100 else f"{seconds / 60:.0f} minutes"
    texts = len(plan.distributions) * plan.texts * min(len(prompts), SAMPLED)
    print(
        f"up to {count(prompts, plan)} tests of {texts:,} speculative texts and "
        f"{2 * texts:,} plain ones take about {long}, as fast as this machine is now",
        file=sys.stderr,
    )


def _prompts(target: KnownTarget, lines: list[prompt_files.Line]) -> list[Prompt]:
    if lines:
        return [prompt_files.for_model(line, target) for line in lines]
    if target.tokenizer is None:
        raise InputError("the model has no tokenizer; give --prompts with ids, separated by commas")
    return list(PROMPTS)


def _document(spec: Speculator, plan: Any, certificate: Certificate) -> dict[str, Any]:
    from foretoken.certificate.certify import FALSE_ALARM
    from foretoken.measurement.estimate import POWER

    settings = asdict(plan)
    names = ("temperature", "top_k", "top_p", "min_p")
    laws = [{name: each[name] for name in names} for each in settings.pop("distributions")]
    return {
        "verdict": certificate.verdict,
        "faults": certificate.faults,
        "false_alarm": FALSE_ALARM,
        "power": POWER,
        "target": spec.target_name,
        "draft": spec.draft_name,
        "runtime": spec.target.runtime,
        "plan": settings | {"laws": laws},
        **asdict(certificate),
    }


def _show(spec: Speculator, plan: Any, certificate: Certificate, console: Console) -> None:
    from foretoken.measurement.estimate import POWER

    prose(
        console,
        f"target {spec.target_name}, draft {spec.draft_name}: {spec.target.runtime}, computed in "
        f"{certificate.shapes.dtype}, rule {plan.rule}, gamma {plan.gamma}, "
        f"{certificate.prompts} prompts, seed {plan.seed}",
    )
    console.print()
    labelled(console, _facts(certificate), LABEL)
    console.print()
    for distribution, tests in groupby(certificate.tests, lambda test: test.name.split(": ")[0]):
        view = table(distribution, "of", "p-value", "catches")
        for test in tests:
            name, caught = test.name.partition(": ")[2], test.catches
            caught = "" if caught is None else f"{caught:.3f}"
            view.add_row(name, f"{test.n} {test.of}", f"{test.p_value:.1e}", caught)
        console.print(view)
        console.print()
    prose(
        console,
        f"catches: the least total variation that a test finds with a chance of {POWER:.0%}",
    )
    console.print()
    for control in certificate.controls:
        result = "found, as it must be" if control.found else "MISSED"
        labelled(console, [("control", f"{control.name}: {result}")], LABEL)
    console.print()
    for line in _verdict(certificate):
        prose(console, line)


def _facts(certificate: Certificate) -> list[tuple[str, str]]:
    """Tell of the passes, of greedy texts, each with its difference, and of the draft tokens."""
    s, identity, lies = certificate.shapes, certificate.identity, certificate.lies
    different = len(identity.differences)
    return [
        (
            "passes",
            f"a block's logits are within {s.noise:.1e} of single tokens' at {s.positions} places "
            f"(rounding explains {s.allowed:.1e}), their distributions within total variation "
            f"{s.variation:.1e}",
        ),
        (
            "greedy",
            f"{identity.texts} texts of {identity.tokens} tokens, gamma "
            f"{' and '.join(map(str, identity.gammas))}, against plain: "
            + (f"{different} texts differ" if different else "identical"),
        ),
        *(
            (
                "",
                f"prompt {d.prompt}, gamma {d.gamma}, token {d.place}: {d.plain} became "
                f"{d.speculative}; gap of the logits {d.gap}, noise {d.noise:.1e}: {d.verdict}",
            )
            for d in identity.differences
        ),
        (
            "drafts",
            f"{certificate.guesses - certificate.certain} tokens drawn from a q, "
            f"{certificate.certain} said to be certain: "
            + (f"{len(lies)} did not follow what was reported" if lies else "all as said"),
        ),
        *(("", lie) for lie in lies[:3]),
    ]


def _verdict(certificate: Certificate) -> list[str]:
    from foretoken.certificate.certify import FALSE_ALARM

    if certificate.verdict == "void":
        return ["VOID: a planted bug was missed; other prompts, or --thorough, may find it"]
    if certificate.verdict == "lossless":
        return [
            f"LOSSLESS: no test of {len(certificate.tests)} fell below {certificate.level:.1e}; "
            f"an exact pair would fail one certificate in {1 / FALSE_ALARM:,.0f}"
        ]
    return ["NOT LOSSLESS", *certificate.faults]
