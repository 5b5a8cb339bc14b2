"""What a result was measured on, for the head of every results file."""

from __future__ import annotations

import json
import platform
from datetime import date
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

RESULTS = Path(__file__).parent / "results"


def describe() -> dict[str, Any]:
    """Processor, threads and versions."""
    cpu = [line for line in _lines(Path("/proc/cpuinfo")) if line.startswith("model name")]
    return {
        "date": date.today().isoformat(),
        "processor": cpu[0].split(":")[1].strip() if cpu else platform.processor(),
        "cores": len(cpu) or None,
        "threads": torch.get_num_threads(),
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
        "system": platform.platform(),
        "versions": {name: version(name) for name in ("foretoken", "torch", "transformers")},
    }


def save(name: str, result: dict[str, Any]) -> Path:
    """Write `result` with the machine's description to results/NAME-DATE.json."""
    machine = describe()
    path = RESULTS / f"{name}-{machine['date']}.json"
    path.write_text(json.dumps({"machine": machine, **result}, indent=2) + "\n")
    return path


def _lines(path: Path) -> list[str]:
    return path.read_text().splitlines() if path.exists() else []
