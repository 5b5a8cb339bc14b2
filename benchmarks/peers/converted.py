"""Models converted for peers, in .peers/models by name, weights and kind, and how: converters that
need torch are run by the project's own Python, which finds the peer's packages behind its own."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path

from answer import Refused, Request

HOME = Path(__file__).resolve().parents[2] / ".peers" / "models"

RUN = """
import runpy, sys
paths, script, *arguments = sys.argv[1:]
sys.path += paths.split(":")
sys.argv = [script, *arguments]
runpy.run_path(script, run_name="__main__")
"""


def run_converter(request: Request, script: Path, paths: list[Path], *arguments: str) -> None:
    """Run a script in the project's Python; `paths` are searched behind its own."""
    where = ":".join(map(str, paths))
    command = [request["python"], "-c", RUN, where, str(script), *arguments]
    run = subprocess.run(command, capture_output=True, text=True)
    if run.returncode:
        reason = (run.stderr.strip().splitlines() or ["?"])[-1]
        raise Refused(f"{script.name} failed: {reason[:200]}")


def converted(source: str, kind: str, convert: Callable[[Path, Path], None]) -> Path:
    """What `convert(model's folder, place for it)` made of the model, now or earlier."""
    folder = Path(source).resolve()
    weights = sorted(folder.glob("*.safetensors"))
    if not weights:
        raise Refused(f"{source} holds no .safetensors; give the folder of a saved model")
    marks = [(str(file), file.stat().st_size, file.stat().st_mtime_ns) for file in weights]
    mark = sha256(repr((marks, kind)).encode()).hexdigest()[:12]
    place = HOME / f"{folder.parent.name}-{folder.name}-{kind}-{mark}"
    if not place.exists():
        part = place.with_suffix(f".{os.getpid()}")
        part.mkdir(parents=True)
        try:
            convert(folder, part)
            part.rename(place)
        finally:
            shutil.rmtree(part, ignore_errors=True)
    return place
