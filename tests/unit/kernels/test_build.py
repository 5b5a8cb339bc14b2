"""How the library is found, and what a machine without it, or with another, is told."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from foretoken.errors import RefusedError
from foretoken.kernels import build, library
from foretoken.loading.runtimes.native import describe_abilities

pytestmark = [pytest.mark.cpu_only, pytest.mark.native]


@pytest.fixture(autouse=True)
def anew() -> Iterator[None]:
    """The library is loaded by each test, and by those after it."""
    library.load_library.cache_clear()
    yield
    library.load_library.cache_clear()


def test_without_a_library_doctor_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(library, "LIBRARY_FILE", tmp_path / "kernels.so")
    said = describe_abilities()
    assert said.startswith("the native decoder was not compiled: install g++ or clang")
    assert said.endswith("build.py") and "\n" not in said
    monkeypatch.setattr(build, "CPP_FOLDER", tmp_path / "kernels")  # as in a wheel
    assert describe_abilities().endswith("then install foretoken again")


def test_a_library_of_other_sources_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    if not library.LIBRARY_FILE.exists():
        pytest.skip("the native decoder was not compiled")
    monkeypatch.setattr(build, "compute_digest", lambda: "0" * 16)
    with pytest.raises(RefusedError, match=r"compiled from other sources; .*build\.py"):
        library.load_library()


def test_a_file_that_is_no_library_is_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(library, "LIBRARY_FILE", tmp_path / "kernels.so")
    library.LIBRARY_FILE.write_bytes(b"no library")
    with pytest.raises(RefusedError, match="cannot be loaded"):
        library.load_library()


@pytest.mark.parametrize(("given", "said"), [("", "no C[+][+] compiler"), ("/no/c++ -x", "/no/c")])
def test_a_build_without_a_compiler_leaves_the_library_alone(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, given: str, said: str
) -> None:
    for name, value in {"CXX": given, "PATH": ""}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(build, "find_spec", lambda _name: None)
    file = tmp_path / "kernels.so"
    file.write_bytes(b"as it was")
    with pytest.raises(build.BuildError, match=said):
        build.build(file)
    assert file.read_bytes() == b"as it was"
    assert [each.name for each in tmp_path.iterdir()] == ["kernels.so"]
