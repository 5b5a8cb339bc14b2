"""`foretoken certify`: test whether a pair's output on this machine has the target's
distribution."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from foretoken.cli import option
from foretoken.cli import prompts as prompt_files
from foretoken.cli.command import command, set_up_logging
from foretoken.cli.render import make_table, open_console, print_paragraph, track_progress
from foretoken.errors import InputError
from foretoken.sampling.checks import SEED
from foretoken.sampling.params import SamplingParams
from foretoken.sampling.speculation import SpeculationOptions

if TYPE_CHECKING:
    from foretoken.certificate.certify import Certificate
    from foretoken.inputs import Prompt
    from foretoken.loading.target import TargetInfo

BUILT_IN_PROMPTS = [
    "It was the first day of the year, and",
    "The old man looked out at the sea and said that",
    '"I do not know," said the girl, and she',
    "When they came to the house, the door was",
    "There was once a king who had",
    "In the morning the two brothers went",
    "He opened the letter slowly, and then",
    "The road led over the hill to a",
]
VOID_EXIT_CODE = 3  # exit code if the verdict is neither "lossless" nor "not lossless"


@command
def certify(
    loading: option.PairLoadOptions,
    target: option.Target = None,
    draft: Annotated[
        str | None, "Draft: a folder or hub id, mtp, lookup, uniform or MODULE:ARGUMENT."
    ] = None,
    prompts: Annotated[
        Path | None, f"File of prompts. {option.PROMPTS_HELP} Default: eight built-in ones."
    ] = None,
    limit: Annotated[
        int, "Number of prompts of the file to use; tokens are sampled for the first 8."
    ] = 32,
    gamma: Annotated[int, "Draft tokens per step."] = 3,
    rule: Annotated[str, "Acceptance method to certify."] = "block",
    seed: option.Seed = 0,
    temperature: Annotated[
        float, "Also test this temperature, instead of temperature 1 with top-k 20."
    ] = 0.0,
    top_k: Annotated[int, "Also test this top-k; 0 is off."] = 0,
    top_p: Annotated[float, "Also test this top-p; 1 is off."] = 1.0,
    min_p: Annotated[float, "Also test this min-p; 0 is off."] = 0.0,
    as_json: option.Json = False,
) -> None:
    """Certify that a pair's output has the target's distribution. Exit code 0: yes; 1: no.

    Exit code 2: a usage error; 3: no verdict, as a planted bug was missed or foretoken failed.

    Greedy output must equal plain greedy decoding, up to rounding. Sampled tokens are compared with
    the target's distributions and with plain samples; draft tokens are compared with the drafter's
    probabilities; forward passes over blocks are compared with forward passes over single tokens.
    The tests must also find bugs that are planted in the same pair. An exact pair fails one
    certificate in 10,000 by chance; the seed is fixed.
    """
    lines = prompt_files.read_first_prompts(prompts, limit) if prompts else []
    params = SamplingParams(temperature, top_k, top_p, min_p)
    SpeculationOptions(gamma, rule)
    SEED("seed", seed)
    target = option.resolve_target(target)
    loading.require(target)
    from foretoken.certificate import certify as certificates  # late: imports torch

    distributions = certificates.choose_distributions(params)
    plan = certificates.CertificatePlan(gamma, rule, seed=seed, distributions=distributions)
    set_up_logging()
    chosen: list[Prompt] = []
    spec = loading.load(
        target,
        draft,
        lambda target_info: chosen.extend(_make_prompts(target_info, lines)),
    ).prepared()
    spec = replace(spec, suggested={})  # the plan has the sampling params
    try:
        certificate = certificates.certify(spec, chosen, plan, track_progress)
    except KeyboardInterrupt:
        raise typer.Exit(130) from None
    pair = {"target": spec.target_name, "draft": spec.draft_name, "runtime": spec.target.runtime}
    pair |= {"rule": rule, "gamma": gamma, "seed": seed}
    if as_json:
        print(certificate.to_json(**pair))
    else:
        _print_certificate(pair, certificate)
    if certificate.verdict != "lossless":
        raise typer.Exit(1 if certificate.verdict == "not lossless" else VOID_EXIT_CODE)


def _make_prompts(target: TargetInfo, lines: list[prompt_files.PromptLine]) -> list[Prompt]:
    if lines:
        return [prompt_files.to_model_prompt(line, target) for line in lines]
    if target.tokenizer is None:
        raise InputError("the model has no tokenizer; give --prompts, a file of token ids")
    return list(BUILT_IN_PROMPTS)


def _print_certificate(pair: dict[str, Any], certificate: Certificate) -> None:
    console = open_console()
    about = "target {target}, draft {draft}: {runtime}, computed in {dtype}, rule {rule}, "
    about += "gamma {gamma}, {prompts} prompts, seed {seed}"
    dtype = certificate.shapes.dtype
    print_paragraph(console, about.format(**pair, dtype=dtype, prompts=certificate.prompts))
    console.print()
    view = make_table("test", "sample", "p-value", "catches", "result")
    for row in _iter_table_rows(certificate):
        view.add_row(*row)
    console.print(view)
    console.print()
    print_paragraph(console, certificate.legend)
    console.print()
    odds = certificate.odds
    passed = f"no p-value of {len(certificate.tests)} tests is below {certificate.level:.1e}"
    reasons = {
        "lossless": f"{passed}; {odds}",
        "not lossless": f"see the lines with FAILED; {odds}",
        "void": "a planted bug was missed; other prompts may reveal it",
    }
    print_paragraph(console, f"{certificate.verdict.upper()}: {reasons[certificate.verdict]}")


def _iter_table_rows(certificate: Certificate) -> Iterator[tuple[str, ...]]:
    """Yield the rows of the table: test, sample, p-value, the smallest total variation that the
    test detects, result."""
    shapes = certificate.shapes
    yield (
        "logits of blocks against single tokens",
        f"{shapes.positions} positions",
        "",
        "",
        _format_result(shapes.ok),
    )
    yield f"  off by {shapes.noise:.1e}; rounding: {shapes.allowed:.1e}", "", "", "", ""
    yield f"  total variation {shapes.variation:.1e}", "", "", "", ""
    tokens, result = f"{certificate.greedy_tokens} tokens", _format_result(not certificate.bugs)
    yield "greedy output against plain", tokens, "", "", result
    for difference in certificate.differences:
        location, gap = (
            f"  prompt {difference.prompt}, gamma {difference.gamma}, token {difference.place}",
            difference.gap,
        )
        apart = "" if gap is None else f", logits {gap:.1e} apart"
        yield (
            f"{location}: {difference.speculative}, plain {difference.plain}{apart}",
            "",
            "",
            "",
            difference.verdict,
        )
    drafted = f"{certificate.guesses} draft tokens"
    result = _format_result(not certificate.lies)
    yield f"draft tokens against q, {certificate.certain} certain", drafted, "", "", result
    for lie in certificate.lies[:3]:
        yield f"  {lie}", "", "", "", ""
    for distribution, tests in groupby(certificate.tests, lambda test: test.name.split(": ")[0]):
        yield distribution, "", "", "", ""
        for test in tests:
            caught = "" if test.catches is None else f"{test.catches:.3f}"
            figures = f"{test.n} {test.of}", f"{test.p_value:.1e}", caught
            passed = test not in certificate.failed
            yield f"  {test.name.partition(': ')[2]}", *figures, _format_result(passed)
    yield "planted bugs, which must be found", "", "", "", ""
    for control in certificate.controls:
        p_value = "" if control.p_value is None else f"{control.p_value:.1e}"
        yield f"  {control.name}", "", p_value, "", "found" if control.found else "MISSED"


def _format_result(passed: bool) -> str:
    return "ok" if passed else "FAILED"
