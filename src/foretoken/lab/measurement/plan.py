"""Which draft and gamma to use, and whether to speculate at all.

Compares measurements of one target on one machine; prediction.py says what a gamma would gain.
"""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import MISSING, asdict, dataclass, fields
from typing import Any

from foretoken.errors import InputError, RefusedError
from foretoken.lab.export.base import Setting, require
from foretoken.lab.export.vllm import VLLM, config
from foretoken.lab.measurement.prediction import Prediction, best, predictions
from foretoken.lab.measurement.result import Measurement, Options

# "prompts" is the file's name: its text may not differ
MAY_DIFFER = ("draft", "draft_dtype", "draft_revision", "gamma", "seed", "prompts")
# Options that a `Setting` has, or that are of the measurement alone
TOLD = ("temperature", "gamma", "revision", "draft_revision", "max_new_tokens", "seed")


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
        """The gamma to generate with: 0 where no draft is predicted to speed the target up."""
        return self.first.best.gamma if self.first.best.speedup.value > 1 else 0

    @property
    def command(self) -> str:
        """The shell command that generates so."""
        return command(self.first.measurement.options, self.gamma)

    @property
    def vllm(self) -> dict[str, Any] | None:
        """vLLM's --speculative-config for it; None: plain decoding, or vLLM has no such draft."""
        return speculative_config(self.first.measurement, self.gamma) if self.gamma else None


def plan(measurements: Sequence[tuple[str, Measurement]]) -> Plan:
    """The plan from measurements under their names, which errors use.

    Raises InputError where two differ in target, machine, prompts or sampling parameters.
    """
    for name, measurement in measurements[1:]:
        _require_same(*measurements[0], name, measurement)
    candidates = [Candidate(one, best(predictions(one))) for _, one in measurements]
    return Plan(sorted(candidates, key=lambda c: -c.best.speedup.value))


def command(options: Options, gamma: int) -> str:
    """`foretoken generate` as measured, with that gamma."""
    arguments = ["foretoken", "generate", "--prompt-file", options.prompts]
    for name in ("target", "draft"):
        if getattr(options, name) is not None:
            arguments += [f"--{name}", getattr(options, name)]
    return shlex.join([*arguments, "--gamma", str(gamma), *flags(options, apart=("gamma",))])


def flags(options: Any, apart: tuple[str, ...] = ()) -> list[str]:
    """A dataclass of options as flags of a command line: all fields with a default that differ
    from it, but for those in `apart`."""
    flags: list[str] = []
    for field in fields(options):
        value = getattr(options, field.name)
        if field.name not in apart and field.default is not MISSING and value != field.default:
            flags.append(f"--{field.name.replace('_', '-')}")
            flags += [] if value is True else [str(value)]
    return flags


def setting(measured: Measurement, gamma: int) -> Setting:
    """The draft of a measurement at that gamma, as other systems are told of it."""
    return Setting(
        measured.target.name,
        measured.draft.name,
        gamma,
        measured.options.temperature,
        measured.options.revision,
        measured.options.draft_revision,
        measured.target.encoder_decoder,
        " ".join(flags(measured.options, apart=TOLD)),
    )


def speculative_config(measured: Measurement, gamma: int) -> dict[str, Any] | None:
    """vLLM's keys for the draft of a measurement; None where vLLM has no such draft."""
    settings = setting(measured, gamma)
    try:
        require(VLLM, settings)
        return config(settings)
    except RefusedError:
        return None


def _require_same(name: str, one: Measurement, other_name: str, other: Measurement) -> None:
    for part, a, b in [
        ("target", asdict(one.target), asdict(other.target)),
        ("machine", asdict(one.machine), asdict(other.machine)),
        ("options", asdict(one.options), asdict(other.options)),
    ]:
        for key in a:
            if a[key] != b[key] and not (part == "options" and key in MAY_DIFFER):
                raise InputError(
                    f"{name} and {other_name} differ in {part}: {key} is {a[key]} and {b[key]}; "
                    "measure again with the same target, machine, prompts and options"
                )
