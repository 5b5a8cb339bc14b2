"""The layout tells the architecture: imports go one way."""

import ast
import re
from pathlib import Path

import pytest

import foretoken

SOURCE, TESTS = Path(foretoken.__file__).parent, Path(__file__).parent
REPRODUCTION = SOURCE.parents[1] / "reproduction"

# Folders and modules at the root; each imports from lines above its own only, so no two folders
# need each other. The drafters' base stands apart: the step needs it, and cascades the step.
LAYERS = [
    ["costing.contention", "errors", "shared_cache", "slow_log", "timing", "transfer"],
    ["kernels", "media"],
    ["text"],
    ["argument_checks", "models", "storage"],
    ["models.stock", "models.store", "sampling", "theory"],
    ["models.graph_chain"],
    ["drafters.base", "generation_config", "models.graphs", "models.native"],
    ["models.graph_blocks", "models.graph_pairs", "records"],
    ["request"],
    ["controls"],
    ["inputs", "transformers_integration"],
    ["costing.costs", "lease", "step"],
    ["costing", "drafters"],
    ["engine"],
    ["costing.probe"],
    ["costing.pair_costs"],
    ["speculator"],
    ["engine.options", "loading", "speech"],
    ["engine.engine", "transformers_integration.attach"],
    ["engine.async_engine"],
    ["server"],
    ["cluster"],
    ["", "measurement"],
    ["certificate", "train"],
    ["cli"],
    ["__main__", "reproduction"],  # beside the package, which never imports it
    ["reproduction.beam", "reproduction.execute", "reproduction.theory", "reproduction.view"],
    ["reproduction.examples"],
    ["reproduction.costs", "reproduction.recipe", "reproduction.train"],
    ["reproduction.fleet", "reproduction.held_out", "reproduction.pairs", "reproduction.serving"],
    ["reproduction.fleet_check"],
    ["reproduction.experiments"],
    ["reproduction.standins"],
    ["reproduction.results"],
    ["reproduction.report"],
    ["reproduction.page"],
    ["reproduction.cli"],
    ["reproduction.__main__"],
]


def name(path: Path) -> str:
    """A file's module, named from the package on; "" for the package itself. Modules of
    reproduction are named in full."""
    parts = path.relative_to(SOURCE if path.is_relative_to(SOURCE) else REPRODUCTION.parent)
    parts = parts.with_suffix("").parts
    return ".".join(parts).removesuffix("__init__").strip(".")


MODULES = {
    name(path): path
    for root in (SOURCE, REPRODUCTION)
    for path in root.rglob("*.py")
    if not path.is_relative_to(REPRODUCTION / "tests")
}


def unit(module: str) -> str:
    """The entry of LAYERS that a module belongs to: the longest that its name begins with."""
    parts = module.split(".")
    units = {entry for line in LAYERS for entry in line}
    for start in (".".join(parts[:cut]) for cut in range(len(parts), 0, -1)):
        if start in units:
            return start
    raise AssertionError(f"{module} is in no layer: add it to LAYERS")


def layer(module: str) -> int:
    return next(i for i, line in enumerate(LAYERS) if unit(module) in line)


def imports(source: str) -> set[str]:
    """Modules of the package that a source imports, also within functions."""
    imported: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            imported |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            inside = {f"{node.module}.{alias.name}" for alias in node.names}
            modules = {x for x in inside if x.removeprefix("foretoken.") in MODULES}
            imported |= modules if modules == inside else modules | {node.module}
    ours = {x for x in imported if x.split(".")[0] in ("foretoken", "reproduction")}
    return {re.sub(r"^foretoken\b\.?", "", x) for x in ours}


def backward(module: str, source: str) -> list[str]:
    """The imports of a module that are not from its own unit or a line above it."""
    return [
        f"{module or 'foretoken'} imports {other}"
        for other in sorted(imports(source))
        if unit(other) != unit(module) and layer(other) >= layer(module)
    ]


def test_imports_go_one_way() -> None:
    assert not [x for module, path in MODULES.items() for x in backward(module, path.read_text())]


def test_neither_the_package_nor_its_tests_import_the_reproduction() -> None:
    files = [*SOURCE.rglob("*.py"), *TESTS.parent.rglob("*.py")]
    assert not [
        str(path)
        for path in files
        if any(x.startswith("reproduction") for x in imports(path.read_text()))
    ]


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("sampling.acceptance_rules", "from foretoken.step import step"),
        ("models.native.model", "import foretoken.models.graphs"),
        ("models.rows", "def late():\n    import foretoken.models.stock.model"),
        ("drafters.base", "from foretoken.drafters.lm import LMDrafter"),
        ("step", "from foretoken import errors, load"),
        ("cli.bench", "from reproduction.experiments import arithmetic"),
    ],
)
def test_an_import_of_what_lies_below_or_beside_is_seen(module: str, source: str) -> None:
    assert backward(module, source)


def test_no_entry_is_left_over() -> None:
    assert {unit(module) for module in MODULES} == {entry for line in LAYERS for entry in line}


def test_public_names_are_there_and_sorted() -> None:
    assert foretoken.__all__ == sorted(foretoken.__all__)
    assert all(hasattr(foretoken, name) for name in foretoken.__all__)
