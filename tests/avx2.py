"""A process whose processor looks like one with AVX2 alone, so that libraries choose their kernels
as they would there: no AVX-512, VNNI or AMX."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

SOURCE = Path(__file__).with_suffix(".c")


def environment(folder: Path) -> dict[str, str]:
    """Return the environment of such a process; skips the test if this machine cannot have one."""
    if platform.system() != "Linux" or platform.machine() != "x86_64":
        pytest.skip("CPUID faulting is Linux on x86-64")
    if shutil.which("cc") is None:
        pytest.skip("no C compiler")
    library = folder / "avx2.so"
    compiled = subprocess.run(["cc", "-shared", "-fPIC", "-O1", "-o", library, SOURCE, "-ldl"])
    assert compiled.returncode == 0
    made = os.environ | {"LD_PRELOAD": str(library)}
    code = "import torch; print(torch.backends.cpu.get_cpu_capability())"
    command = [sys.executable, "-c", code]
    seen = subprocess.run(command, env=made, capture_output=True, text=True).stdout.strip()
    if seen != "AVX2":
        pytest.skip(f"this processor cannot hide its instructions: {seen}")
    return made
