"""The layout tells the architecture: imports go one way."""

import ast
from pathlib import Path

import foretoken

SOURCE = Path(foretoken.__file__).parent

# A module may import from its own line and the lines above it.
LAYERS = [
    ["errors", "transfer", "storage", "checked"],
    ["sampling", "theory", "text", "ends"],
    ["execute", "options", "request", "models"],
    ["drafters.base", "costs", "models.stock"],
    ["models.openvino", "models.graphs", "gamma", "step", "claim", "beam"],
    ["drafters"],
    ["engine"],
    ["probe"],
    ["speculator"],
    ["loading"],
    ["lab"],
    ["lab.measurement", "lab.bench", "lab.certificate", "train"],
    ["cli", "__main__", ""],
]


def layer(module: str) -> int:
    """The line of LAYERS that a module, named from the package on, belongs to; longest first."""
    parts = module.split(".")
    for name in (".".join(parts[:cut]) for cut in range(len(parts), -1, -1)):
        for depth, names in enumerate(LAYERS):
            if name in names:
                return depth
    raise AssertionError(f"{module} is in no layer: add it to LAYERS")


def imports(path: Path) -> set[str]:
    """Modules of the package that a file imports, also within functions."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            for alias in node.names:
                inner = SOURCE / Path(*node.module.split(".")[1:]) / f"{alias.name}.py"
                package = (SOURCE / Path(*node.module.split(".")[1:]) / alias.name).is_dir()
                whole = f"{node.module}.{alias.name}"
                found.add(whole if inner.exists() or package else node.module)
    return {
        name.removeprefix("foretoken").strip(".") for name in found if name.startswith("foretoken")
    }


def test_imports_go_one_way() -> None:
    backward = []
    for path in SOURCE.rglob("*.py"):
        module = ".".join(path.relative_to(SOURCE).with_suffix("").parts).removesuffix("__init__")
        module = module.strip(".")
        for imported in imports(path):
            if layer(imported) > layer(module):
                backward.append(f"{module or 'foretoken'} imports {imported}")
    assert not backward


def test_public_names_are_there_and_sorted() -> None:
    assert foretoken.__all__ == sorted(foretoken.__all__)
    assert all(hasattr(foretoken, name) for name in foretoken.__all__)
