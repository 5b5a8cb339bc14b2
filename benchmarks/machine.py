"""Results files, headed by the day, the system and the machine as `measurement.machine` has it."""

from __future__ import annotations

import json
import os
import platform
from dataclasses import asdict
from datetime import date
from pathlib import Path
from typing import Any

import torch

from foretoken.measurement import machine

RESULTS = Path(__file__).parent / "results"


def describe() -> dict[str, Any]:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    described = asdict(machine.get_machine(device)) | {
        "abilities": machine.get_processor().abilities
    }
    described |= {"held to": os.environ.get("FORETOKEN_INSTRUCTIONS")}  # an instruction set
    return {"date": date.today().isoformat(), "system": platform.platform(), **described}


def save(name: str, result: dict[str, Any]) -> Path:
    """Write `result` with the machine's description to results/NAME-DATE.json."""
    head = describe()
    path = RESULTS / f"{name}-{head['date']}.json"
    path.write_text(json.dumps({"machine": head, **result}, indent=2) + "\n")
    return path
