"""What a result was measured on, for the head of every results file."""

from __future__ import annotations

import json
import platform
from dataclasses import asdict
from datetime import date
from pathlib import Path
from typing import Any

import torch

from foretoken.lab import machine

RESULTS = Path(__file__).parent / "results"


def describe() -> dict[str, Any]:
    """The day, processor, threads and versions."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    found = asdict(machine.describe(device))
    return {"date": date.today().isoformat(), "system": platform.platform(), **found}


def save(name: str, result: dict[str, Any]) -> Path:
    """Write `result` with the machine's description to results/NAME-DATE.json."""
    found = {"machine": describe(), **result}
    path = RESULTS / f"{name}-{found['machine']['date']}.json"
    path.write_text(json.dumps(found, indent=2) + "\n")
    return path
