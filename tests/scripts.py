"""Scripts of `benchmarks/` and hooks of `docs/`, by their paths: some have the name of a module of
the tests."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).parents[1]
BENCHMARKS, HOOKS = ROOT / "benchmarks", ROOT / "docs" / "hooks"


def benchmark(name: str) -> ModuleType:
    """benchmarks/NAME.py as a module, imported once; its siblings are importable meanwhile."""
    return _module(BENCHMARKS / f"{name}.py")


def hook(name: str) -> ModuleType:
    """The same of docs/hooks/NAME.py."""
    return _module(HOOKS / f"{name}.py")


def _module(path: Path) -> ModuleType:
    name = f"{path.parent.name}_{path.stem}"
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    sys.path.append(str(path.parent))
    sys.modules[name] = module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    finally:
        sys.path.remove(str(path.parent))
    return module
