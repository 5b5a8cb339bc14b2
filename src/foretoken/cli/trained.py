"""What a trainer says at its end: numbers for people and the command that uses the result, or all
that is known of it as JSON."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any


def show(
    summary: dict[str, Any], lines: list[str], command: list[object], *, as_json: bool
) -> None:
    """`lines` and the command, or the summary alone."""
    if as_json:
        print(json.dumps(summary, indent=2, allow_nan=False))
        return
    for line in lines:
        print(line)
    print(f"use it: {shlex.join(map(str, command))}")


def use(target: object, draft: object, options: Any) -> list[object]:
    """`foretoken generate` with a draft; `options`: a dataclass with how the target was loaded."""
    from foretoken.lab.measurement.plan import flags  # late: torch takes seconds to import

    of_target = [] if target is None else ["--target", target]
    return ["foretoken", "generate", *of_target, "--draft", draft, *flags(options), "PROMPT"]


def size(out: Path, summary: dict[str, Any]) -> str:
    """How large the result is, and what it took."""
    count = summary["parameters"]
    parameters = f"{count / 1e6:.3g}M" if count >= 1e5 else f"{count}"
    return f"{out}: {parameters} parameters, {summary['steps']} steps in {summary['seconds']:.0f} s"
