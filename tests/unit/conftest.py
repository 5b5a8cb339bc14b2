"""The kernels as they are in the sources, for the proofs."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from foretoken.kernels import build, library


@pytest.fixture(scope="session")
def kernels(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A library of the sources; or the one that `test_sanitizers.py` has compiled."""
    if given := os.environ.get("FORETOKEN_KERNELS"):
        return Path(given)
    file = tmp_path_factory.mktemp("native") / "kernels.so"
    try:
        build.build(file)
    except build.BuildError as error:
        pytest.skip(str(error))
    return file


@pytest.fixture(scope="module")
def compiled(kernels: Path) -> Iterator[None]:
    """That library in place of the installed one."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(library, "LIBRARY_FILE", kernels)
        library.load_library.cache_clear()
        yield
    library.load_library.cache_clear()
