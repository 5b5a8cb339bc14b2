"""Costs of serving a pair, and its betas on some texts, from which a fleet is simulated.

The file of `python -m reproduction costs`: it holds all that `simulate` needs, without the models.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path

from pydantic import TypeAdapter, ValidationError

from foretoken.costing import costs
from foretoken.costing.costs import Costs, CostTable, interpolate
from foretoken.errors import InputError, describe_mismatch
from foretoken.storage import files

AGAIN = "make one with python -m reproduction costs --out"


@dataclass(frozen=True, slots=True)
class ServingCosts:
    """Costs of serving at most `rows` requests at a time, in seconds."""

    rows: int
    costs: Costs  # of steps of up to so many rows
    reading: CostTable  # the target's pass over so many tokens of a prompt
    draft_reading: CostTable  # the same of the draft
    around: CostTable  # what a step of so many rows takes beside draft, pass and verdict
    joining: float  # to take a request on and to hand it back, beside reading it
    # what drafts and passes take among so many rows at work, relative to `costs`
    drafts: CostTable = ((1, 1.0),)
    passes: CostTable = ((1, 1.0),)
    context: int | None = None  # tokens of a text at most; None: no limit

    def draft_seconds(self, draft_tokens: list[int]) -> float:
        """Return the seconds of a draft of so many draft tokens of each row."""
        rows = len(draft_tokens)
        return float(
            self.costs.draft_seconds(max(draft_tokens), sum(draft_tokens), rows)
            * interpolate(self.drafts, rows)
        )

    def target_seconds(self, size: int, read: int, rows: int, *, changed: bool) -> float:
        """Return the seconds of the target's forward over `size` positions, `read` of them prefill.

        changed: the forward before had another size.
        """
        scored = max(1, size - read)
        seconds = interpolate(self.costs.score, scored) + self.costs.change * changed
        more = interpolate(self.reading, size) - interpolate(self.reading, scored)
        return float(interpolate(self.passes, rows) * seconds + max(0.0, more))

    @property
    def is_valid(self) -> bool:
        """True where these can be costs, wherever they were read from."""
        tables = self.reading, self.draft_reading, self.around, self.drafts, self.passes
        measured = (*tables, ((1, self.joining),))
        return self.rows > 0 and self.costs.is_valid and all(map(costs.is_valid_table, measured))


@dataclass(frozen=True, slots=True)
class MeasuredText:
    """A prompt's length, and beta at every new token; None where the drafter makes none."""

    prompt_tokens: int
    betas: tuple[float | None, ...]


@dataclass(frozen=True, slots=True)
class FleetCosts:
    """A pair as it was measured on one machine."""

    date: str
    target: str
    draft: str
    cpu: str
    prompts: str  # the file
    temperature: float
    serving: ServingCosts
    texts: tuple[MeasuredText, ...]

    def save(self, path: Path) -> None:
        """Write the file, whole or not at all; OSError where it cannot be written."""
        files.write_atomically(path, (json.dumps(asdict(self), allow_nan=False) + "\n").encode())


def load(path: Path) -> FleetCosts:
    """Read `save`'s file; InputError, naming it, for any other."""
    try:
        measured = TypeAdapter(FleetCosts).validate_json(path.read_bytes())
    except FileNotFoundError:
        raise InputError(f"there is no {path}; {AGAIN}") from None
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        raise InputError(f"{path}: {where}: {describe_mismatch(first)}; {AGAIN}") from None
    except OSError as error:
        raise InputError(f"{path} cannot be read: {error}; {AGAIN}") from None
    if not measured.serving.is_valid:
        raise InputError(f"{path}: serving: these are no costs; {AGAIN}")
    if not all(text.betas for text in measured.texts) or not measured.texts:
        raise InputError(f"{path}: texts: each must have a token; {AGAIN}")
    return measured
