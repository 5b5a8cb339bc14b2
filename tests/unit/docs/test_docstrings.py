"""Docstrings of every public name: sections that agree with its signature, examples that run; and
of all code: the names that they name are there."""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Iterator
from doctest import NORMALIZE_WHITESPACE, DocTestFinder, DocTestRunner
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import griffe
import pytest

import foretoken
from scripts import ROOT

PAGE = (ROOT / "docs" / "api.md").read_text()


def members(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    """The public functions of a module and methods of a class, those that the page shows."""
    if inspect.ismodule(value):
        names = getattr(value, "__all__", None) or [
            n
            for n, each in vars(value).items()
            if inspect.isfunction(each) and each.__module__ == value.__name__
        ]
    else:
        shown = re.search(rf"foretoken\.{name}\n +options:\n +members: \[(.*)\]", PAGE)
        names = shown[1].split(", ") if shown else [n for n in vars(value) if n != "__call__"]
    for each in names:
        member = getattr(value, each)
        if each.startswith("_") and each != "__call__":
            continue
        if inspect.ismodule(value) and inspect.isclass(member):
            yield f"{name}.{each}", member
            yield from members(f"{name}.{each}", member)
        elif inspect.isroutine(member):
            # the methods of a drafter are documented once, on the base class
            if value is foretoken.Drafter or not hasattr(foretoken.Drafter, each):
                yield f"{name}.{each}", member


PUBLIC = {name: getattr(foretoken, name) for name in foretoken.__all__}
EXEMPLARY = PUBLIC | {
    n: each
    for name, value in PUBLIC.items()
    if inspect.ismodule(value)
    for n, each in members(name, value)
    if n.count(".") == 1
}
EVERY = EXEMPLARY | {
    n: each
    for name, value in PUBLIC.items()
    if not inspect.isfunction(value)
    for n, each in members(name, value)
}


def parameters(value: Any) -> list[str]:
    """What a caller gives: names, with their stars."""
    own = inspect.isfunction(value) or inspect.ismethod(value) or _constructed(value)
    if not own:
        return []
    every = inspect.signature(value).parameters.values()
    stars = {inspect.Parameter.VAR_POSITIONAL: "*", inspect.Parameter.VAR_KEYWORD: "**"}
    return [stars.get(each.kind, "") + each.name for each in every if each.name != "self"]


def _keywords(value: Any) -> list[str]:
    """The keys of the TypedDict that a `**options: Unpack[...]` stands for."""
    annotations = [each.annotation for each in inspect.signature(value).parameters.values()]
    names = [found[1] for each in annotations if (found := re.match(r"Unpack\[(\w+)\]", str(each)))]
    module = vars(inspect.getmodule(value))
    return [key for name in names for key in module[name].__annotations__]


def _constructed(value: Any) -> bool:
    """Whether callers make objects of this class, other than of an error that has one message, or
    of a base class, which they derive from."""
    if not inspect.isclass(value) or value.__init__ is object.__init__:
        return False
    return not issubclass(value, Exception) or "__init__" in vars(value)


def mistakes(value: Any) -> list[str]:
    """Return what a docstring lacks or has wrong, beside its signature."""
    docstring = griffe.Docstring(inspect.getdoc(value) or "", parser="google")
    sections = {each.kind.value: each.value for each in docstring.parse(warnings=False)}
    found = [] if sections.get("text") else ["it has no summary"]
    takes = parameters(value)
    if same := re.search(r"rguments are those of\s+`([.\w]+)`", docstring.value):
        (other,) = [each for name, each in EVERY.items() if f".{name}".endswith(f".{same[1]}")]
        own = [each.name for each in sections.get("parameters", [])]
        takes = [name for name in takes if name in own or name not in parameters(other)]
    if inspect.isclass(value) and "parameters" not in sections:
        told = [each.name for each in sections.get("attributes", [])]
        takes = list(getattr(value, "_fields", takes))
    else:
        told = [each.name for each in sections.get("parameters", [])]
        if takes and takes[-1].startswith("**") and takes[-1] not in told:  # told one by one
            takes = [*takes[:-1], *_keywords(value)]
    if _constructed(value) or inspect.isroutine(value):
        found += [f"Args has no {name}" for name in takes if name not in told]
        found += [f"the signature has no {name}" for name in told if name not in takes]
    if inspect.isroutine(value):
        gives = inspect.signature(value).return_annotation != "None"
        if gives != bool({"returns", "yields"} & sections.keys()):
            found += ["Returns is missing" if gives else "nothing is returned"]
    return found


@pytest.mark.parametrize("name", EVERY)
def test_sections_agree_with_the_signature(name: str) -> None:
    value = EVERY[name]
    if isinstance(value, ModuleType):
        assert value.__doc__
    else:
        assert not mistakes(value)


# Named in docstrings, and not ours: of transformers, of typer and of Python
THEIRS = {"guidance_scale", "max_length", "min_length", "from_pretrained", "help", "convert_model"}
THEIRS |= {"__set_name__"}
Documented = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


def documented(tree: ast.Module) -> list[tuple[Documented, str]]:
    """Each part that has a docstring, and the docstring, which the tree is left without."""
    found: list[tuple[Documented, str]] = []
    for node in ast.walk(tree):
        if isinstance(node, Documented) and (text := ast.get_docstring(node)):
            found.append((node, text))
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            node.value.value = ...  # also those below a field
    return found


def words(node: ast.AST) -> set[str]:
    return set(re.findall(r"\w+", ast.unparse(node)))


def lost(sources: dict[Path, str]) -> list[str]:
    """Return the names in docstrings of these files that nothing has: in Args and Attributes one
    that its own function or class lacks; in backticks one that its file lacks, unless a module or a
    class is called so or, outside of classes, a function."""
    trees = {path: ast.parse(source) for path, source in sources.items()}
    texts = {path: documented(tree) for path, tree in trees.items()}
    nodes = [node for tree in trees.values() for node in ast.walk(tree)]
    named = {part for path in trees for part in path.with_suffix("").parts} | THEIRS
    classes = {node.name: node for node in nodes if isinstance(node, ast.ClassDef)}
    named |= classes.keys()
    functions = {node.name for node in nodes if isinstance(node, ast.FunctionDef)}
    found: list[str] = []
    for path, tree in trees.items():
        here = words(tree) | named
        for node, text in texts[path]:
            known = here if isinstance(node, ast.ClassDef) else here | functions
            told = set(re.findall(r"(?<!`)`([A-Za-z_]\w*)`", text)) - known
            parts = griffe.Docstring(text, parser="google").parse(warnings=False)
            kinds = ("parameters", "attributes")
            sections = [each for part in parts if part.kind.value in kinds for each in part.value]
            names = {name for each in sections for name in re.findall(r"\w+", each.name)}
            own = words(node.args if isinstance(node, ast.FunctionDef) else node)
            bases = [classes.get(getattr(b, "id", "")) for b in getattr(node, "bases", ())]
            own = own.union(*(words(base) for base in bases if base))
            told |= names - own
            where = getattr(node, "name", "its own docstring")
            found += [f"{path}, {where}: {name}" for name in sorted(told)]
    return found


def test_names_in_docstrings_exist() -> None:
    source = ROOT / "src"
    files = {path.relative_to(source): path.read_text() for path in source.rglob("*.py")}
    assert len(files) > 100 and lost(files) == []


@pytest.mark.parametrize("name", EXEMPLARY)
def test_the_example_runs(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(foretoken, "load", loaded)
    assert examples(EXEMPLARY[name], name)


def examples(value: Any, name: str) -> int:
    """Run the examples of a docstring, not those of its members; how many there were."""
    module = value if inspect.ismodule(value) else inspect.getmodule(value)
    finder = DocTestFinder(recurse=False)
    (test,) = finder.find(value, name, module=module, globs=dict(vars(module)))
    runner = DocTestRunner(verbose=False, optionflags=NORMALIZE_WHITESPACE)
    output: list[str] = []
    result = runner.run(test, out=output.append)
    assert not result.failed, "".join(output)
    return result.attempted


@cache
def _load(*args: Any, **options: Any) -> Any:
    return foretoken.loading.load.load(*args, **options)


def loaded(*args: Any, **options: Any) -> Any:
    """`foretoken.load`, once for equal arguments: the examples take the shipped pair."""
    return _load(*args, **options)
