"""What is kept on disk is named by all the code that it depends on."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from foretoken.storage import lineage
from foretoken.storage.lineage import PACKAGE, files_of, imports


def parsed(file: Path) -> set[str]:
    names: set[str] = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return {name for name in names if name.startswith("foretoken")}


@pytest.mark.parametrize("file", sorted(PACKAGE.rglob("*.py")), ids=lambda file: file.stem)
def test_imports_are_those_that_python_sees(file: Path) -> None:
    seen = {name for name in imports(file.read_text()) if name.startswith("foretoken")}
    assert seen == parsed(file)


def copied(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    package = folder / "foretoken"
    for file in PACKAGE.rglob("*.py"):
        place = package / file.relative_to(PACKAGE)
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_text(file.read_text())
    monkeypatch.setattr(lineage, "PACKAGE", package)
    return package


def test_every_module_on_the_way_counts_and_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A graph follows from the exporters, and from what they import."""
    package = copied(tmp_path, monkeypatch)

    def digest() -> str:
        lineage.lineage.cache_clear()
        return lineage.lineage("foretoken.models.openvino.conversion", "nobody.elses")

    before = digest()
    stock = [f"stock/{name}" for name in ("causal", "attention", "seq2seq", "cache", "twin")]
    for name in (*stock, "openvino/export_block", "openvino/weights/halves"):
        file = package / "models" / f"{name}.py"
        source = file.read_text()
        file.write_text(source + "# another line\n")
        assert digest() != before, name
        file.write_text(source)
    for name in ("theory.py", "lab/measurement/plan.py", "__init__.py", "drafters/ngram.py"):
        (package / name).write_text("# another line\n")
        assert digest() == before, name
    lineage.lineage.cache_clear()


def test_others_have_no_files() -> None:
    assert files_of("torch.nn") == files_of("foretoken") == files_of("foretoken.nothing") == []
    assert [file.name for file in files_of("foretoken.models.openvino.paged")] == ["paged.py"]
