"""Where a model that was converted for a peer is kept: .peers/models, by name, weights and kind."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path

from answer import Refused

HOME = Path(__file__).resolve().parents[2] / ".peers" / "models"


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
