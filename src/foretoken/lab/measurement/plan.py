"""Which draft to use, and with which gamma; whether to speculate at all.

Compares measurements of one target on one machine. What a gamma would gain is prediction.py's.
"""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import MISSING, asdict, dataclass, fields
from typing import Any

from foretoken.drafters.lookup import LookupDrafter
from foretoken.errors import InputError
from foretoken.lab.measurement.footprint import PYTHON
from foretoken.lab.measurement.prediction import Prediction, best, predictions
from foretoken.lab.measurement.result import Measurement, Options

# Of prompts the file's name, not its text
MAY_DIFFER = ("draft", "draft_dtype", "draft_revision", "gamma", "seed", "prompts")


@dataclass(frozen=True, slots=True)
class Candidate:
    """A draft and its fastest gamma."""

    measurement: Measurement
    best: Prediction

    @property
    def draft(self) -> str:
        return self.measurement.draft.name


@dataclass(frozen=True, slots=True)
class Plan:
    """Candidates, the fastest first."""

    candidates: list[Candidate]

    @property
    def first(self) -> Candidate:
        return self.candidates[0]

    @property
    def gamma(self) -> int:
        """What to generate with: 0 where no draft is predicted to be faster than none."""
        return self.first.best.gamma if self.first.best.speedup.value > 1 else 0

    @property
    def command(self) -> str:
        """The shell command that generates so."""
        return command(self.first.measurement.options, self.gamma)

    @property
    def vllm(self) -> dict[str, Any] | None:
        """vLLM's --speculative-config of the same; None: without, or it has no such draft."""
        return speculative_config(self.first.measurement, self.gamma) if self.gamma else None


def plan(named: Sequence[tuple[str, Measurement]]) -> Plan:
    """The plan from measurements under their names, which errors use.

    Raises InputError where two differ in target, machine, prompts or sampling parameters.
    """
    for name, found in named[1:]:
        _same(*named[0], name, found)
    candidates = [Candidate(found, best(predictions(found))) for _, found in named]
    return Plan(sorted(candidates, key=lambda c: -c.best.speedup.value))


def command(options: Options, gamma: int) -> str:
    """`foretoken generate` as measured, with that gamma."""
    words = ["foretoken", "generate", "--prompt-file", options.prompts]
    for name in ("target", "draft"):
        if getattr(options, name) is not None:
            words += [f"--{name}", getattr(options, name)]
    words += ["--gamma", str(gamma)]
    return shlex.join([*words, *flags(options, apart=("gamma",))])


def flags(options: Any, apart: tuple[str, ...] = ()) -> list[str]:
    """What a dataclass of options says on a command line: the fields that are not at their
    defaults, those aside that are `apart` or have none."""
    words: list[str] = []
    for field in fields(options):
        value = getattr(options, field.name)
        if field.name not in apart and field.default is not MISSING and value != field.default:
            words.append(f"--{field.name.replace('_', '-')}")
            words += [] if value is True else [str(value)]
    return words


def speculative_config(found: Measurement, gamma: int) -> dict[str, Any] | None:
    """vLLM's keys for the draft of a measurement; None where it has no such draft."""
    if found.target.encoder_decoder:
        return None
    if found.draft.name == "lookup":
        longest = LookupDrafter().longest
        return {
            "method": "ngram",
            "num_speculative_tokens": gamma,
            "prompt_lookup_max": longest,
            "prompt_lookup_min": 1,
        }
    if found.draft.runtime == PYTHON:
        return None
    return {
        "method": "draft_model",
        "model": found.draft.name,
        "num_speculative_tokens": gamma,
        **({"revision": revision} if (revision := found.options.draft_revision) else {}),
    }


def _same(name: str, one: Measurement, other_name: str, other: Measurement) -> None:
    for what, a, b in [
        ("target", asdict(one.target), asdict(other.target)),
        ("machine", asdict(one.machine), asdict(other.machine)),
        ("options", asdict(one.options), asdict(other.options)),
    ]:
        for key in a:
            if a[key] != b[key] and not (what == "options" and key in MAY_DIFFER):
                raise InputError(
                    f"{name} and {other_name} differ in {what}: {key} is {a[key]} and {b[key]}; "
                    "measure again with the same target, machine, prompts and options"
                )
