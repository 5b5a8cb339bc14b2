"""Scripts of `benchmarks/` and `standins/`, by their paths: some have the name of a module of the
tests."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).parents[1]
BENCHMARKS, STANDINS = ROOT / "benchmarks", ROOT / "standins"


def benchmark(name: str) -> ModuleType:
    """benchmarks/NAME.py as a module, imported once; its siblings are importable meanwhile."""
    return _script(BENCHMARKS, name)


def standin(name: str) -> ModuleType:
    """standins/NAME.py, as above."""
    return _script(STANDINS, name)


def _script(folder: Path, name: str) -> ModuleType:
    module_name = f"{folder.name}_{name}"
    if module_name in sys.modules:
        return sys.modules[module_name]
    spec = importlib.util.spec_from_file_location(module_name, folder / f"{name}.py")
    assert spec is not None and spec.loader is not None
    sys.path.append(str(folder))
    sys.modules[module_name] = module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    finally:
        sys.path.remove(str(folder))
    return module
