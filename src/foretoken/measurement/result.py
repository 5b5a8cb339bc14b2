"""Results of `foretoken measure`: their dataclasses, and the JSON file.

A file holds all that a plan needs, so that plans are made without the models; what versions before
wrote beside it is passed over. Knows no models.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal, NamedTuple

from pydantic import TypeAdapter, ValidationError

from foretoken.costing.contention import Taken
from foretoken.errors import InputError, mismatch
from foretoken.measurement.estimate import Estimate, Spread, spread
from foretoken.measurement.machine import Machine
from foretoken.sampling.params import SamplingParams
from foretoken.storage import files

FORMAT, VERSION = "foretoken.measurement", 1


@dataclass(frozen=True, slots=True)
class MeasureOptions:
    """The options of a measurement. Two compare where all but draft and gamma are equal."""

    target: str | None
    draft: str | None
    prompts: str  # the file
    prompts_sha256: str
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    gamma: int = 4
    max_new_tokens: int = 64
    seed: int = 0
    dtype: str = "float32"
    draft_dtype: str | None = None
    draft_taps: str | None = None
    adapter: str | None = None
    kv_dtype: str | None = None
    device: str = "cpu"
    runtime: str = "auto"
    revision: str | None = None
    draft_revision: str | None = None
    trust_remote_code: bool = False
    tokenizer: str | None = None
    ignore_generation_config: bool = False

    @property
    def sampling(self) -> SamplingParams:
        return SamplingParams(self.temperature, self.top_k, self.top_p, self.min_p)

    @property
    def sampling_params(self) -> SamplingParams:
        """Sampling params of the runs, with their number of new tokens."""
        return replace(self.sampling, max_new_tokens=self.max_new_tokens)


@dataclass(frozen=True, slots=True)
class Footprint:
    """A model, or a drafter without one, and its sizes; None where they are unknown."""

    name: str
    runtime: str
    dtype: str  # of the weights
    encoder_decoder: bool
    parameters: int | None
    operations: int | None  # of the matrix products, per token (section 3.4)
    weight_bytes: int | None = None
    pass_bytes: int | None = None  # of the weights that a pass over one token reads
    cache_bytes: int | None = None  # of a token that a row holds


class Step(NamedTuple):
    """A step of a row: counts and seconds."""

    gamma: int
    drafted: int
    judged: int
    accepted: int
    kept: int  # tokens gained
    overlap: float  # sum over the draft tokens judged
    draft_seconds: float
    score_seconds: float


@dataclass(frozen=True, slots=True)
class MeasuredRun:
    """One generation, without its first step, which reads of the prompt too."""

    tokens: int
    seconds: float
    steps: list[Step]


@dataclass(frozen=True, slots=True)
class Observed:
    """The measurement of one prompt."""

    prompt_tokens: int
    # beta at every token of the target's own text; None: no draft token
    overlaps: list[float | None]
    plain: MeasuredRun
    loop: MeasuredRun
    context: int  # tokens that the passes are behind
    passes: list[list[float]]  # seconds of the target's passes over 1, 2, .. tokens
    taken: Taken | None = None  # by other processes meanwhile; None: not known


@dataclass(frozen=True, slots=True)
class Position:
    """Acceptance at position i of a step."""

    asked: int  # steps that kept all draft tokens before it and had room for it
    judged: int  # of these, steps with such a draft token
    kept: int
    offered: float  # share of steps with room for it in which the drafter went so far


@dataclass(frozen=True, slots=True)
class Measurement:
    """A measured pair. Estimates have Student t intervals over prompts; times are medians."""

    date: str
    options: MeasureOptions
    machine: Machine
    target: Footprint
    draft: Footprint
    alpha: Estimate  # E sum min(p, q) on the target's own prefixes (Corollary 3.6)
    alpha_in_loop: Estimate | None  # the same at the draft tokens judged while speculating
    silent: float  # share of the target's own prefixes at which the drafter made no draft token
    positions: list[Position]
    tokens: float  # new tokens of a prompt, mean
    tokens_per_call: Estimate
    draft_seconds: Spread | None  # of one draft token
    context: float  # of the passes, median
    passes: list[Spread]  # of the target over 1, 2, .. tokens
    plain_overhead: Spread  # seconds of a step that are neither draft nor score
    loop_overhead: Spread
    speedup: Estimate  # measured: seconds of the plain over the speculative runs
    prompts: list[Observed]
    others: float | None = None  # share of the processors that others took; None: not known
    read_bytes: int | None = None
    read: Spread | None = None  # seconds of one read of so many bytes from memory
    peak_bytes: int | None = None  # the most memory that the process held
    format: Literal["foretoken.measurement"] = FORMAT
    version: int = VERSION

    @property
    def plain_pass(self) -> Spread:
        """Seconds of the target's forward over one token, in the plain runs."""
        return spread([step.score_seconds for one in self.prompts for step in one.plain.steps])

    @property
    def c(self) -> float | None:
        """T_q / T_p (Definition 3.7)."""
        return self.draft_seconds and self.draft_seconds.median / self.plain_pass.median

    @property
    def c_hat(self) -> float | None:
        """c in arithmetic operations in place of time (Definition 3.10)."""
        if self.target.operations is None or self.draft.operations is None:
            return None
        return self.draft.operations / self.target.operations

    @property
    def v(self) -> list[float]:
        """v(1), v(2), ..: seconds of a pass over those of a pass over one token."""
        return [p.median / self.passes[0].median for p in self.passes]

    @property
    def bandwidth(self) -> float | None:
        """Bytes that are read from memory in a second."""
        if self.read_bytes is None or self.read is None or not self.read.median:
            return None
        return self.read_bytes / self.read.median

    @property
    def floor_seconds(self) -> float | None:
        """Seconds that a pass takes at least: its weights are read once."""
        read = self.target.pass_bytes
        return read / self.bandwidth if read and self.bandwidth else None

    def save(self, path: Path) -> None:
        """Write the file, whole or not at all; OSError where it cannot be written."""
        files.write(path, (json.dumps(asdict(self), allow_nan=False) + "\n").encode())


def load(path: Path) -> Measurement:
    """Read `save`'s file; InputError, naming it, for any other."""
    try:
        document = files.parse_json(path.read_text(encoding="utf-8"), parse_constant=_refuse)
    except FileNotFoundError:
        raise InputError(f"there is no {path}; make it with foretoken measure --out") from None
    except (OSError, ValueError) as error:
        raise InputError(
            f"{path} cannot be read as a measurement: {error}; "
            "make one with foretoken measure --out"
        ) from None
    if not isinstance(document, dict) or document.get("format") != FORMAT:
        raise InputError(f"{path} is no measurement; make one with foretoken measure --out")
    if document.get("version") != VERSION:
        number = document.get("version")
        raise InputError(f"{path} has version {number!r:.20}, not {VERSION}; measure again")
    measurement: Measurement = parse(document, Measurement, str(path))
    if not measurement.prompts or len(measurement.passes) <= measurement.options.gamma:
        raise InputError(f"{path}: prompts and passes: too few; measure again")
    times = (*measurement.passes, measurement.plain_pass)
    if min(time.median for time in times) <= 0:
        raise InputError(f"{path}: passes: there must be times above 0; measure again")
    return measurement


def parse(document: Any, kind: type[Any], name: str) -> Any:
    """Make a dataclass of this module from JSON's values; InputError where they do not fit."""
    try:
        return TypeAdapter(kind).validate_python(document)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        raise InputError(f"{name}: {where}: {mismatch(first)}; measure again") from None


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is no JSON")


class PartialMeasurement:
    """The file `<out>.part.jsonl`: a head, then the measured prompts in order, also in `done`."""

    def __init__(self, out: Path, options: MeasureOptions, machine: Machine) -> None:
        self.path = out.with_name(out.name + ".part.jsonl")
        head = {"version": VERSION, "options": asdict(options), "machine": asdict(machine)}
        self.head = json.dumps(head)
        self.done = self._read()
        lines = [self.head, *(json.dumps(asdict(one)) for one in self.done)]
        files.write(self.path, "".join(f"{line}\n" for line in lines).encode())

    def add(self, observed: Observed) -> None:
        """Append the measurement of the next prompt."""
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(asdict(observed)) + "\n")

    def remove(self) -> None:
        """Remove the file, after the measurement is saved."""
        self.path.unlink(missing_ok=True)

    def _read(self) -> list[Observed]:
        """Read the usable lines; drop a last line that was cut off."""
        try:
            head, *lines = self.path.read_text(encoding="utf-8").splitlines()
        except (OSError, ValueError):
            return []
        observed: list[Observed] = []
        for line in lines if head == self.head else []:
            try:
                observed.append(parse(files.parse_json(line), Observed, str(self.path)))
            except (ValueError, InputError):
                break
        return observed
