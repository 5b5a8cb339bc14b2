"""Compile the kernels, for every instruction set of this kind of processor, into one library.

Runs where the package is built, so it imports nothing but Python's own modules.
By hand, in a checkout: `python src/foretoken/kernels/build.py`.
"""

from __future__ import annotations

import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path

HERE = Path(__file__).parent
SOURCES, LIBRARY = HERE / "cpp", HERE / "kernels.so"
# No -ffast-math, no contraction: the arithmetic is exactly what is written. Nothing of C++'s own
# library is needed where it runs. GCC 12 takes undefined vectors of its own headers for mistakes.
FLAGS = ["-std=c++17", "-O3", "-fPIC", "-fvisibility=hidden", "-ffp-contract=off", "-pthread"]
FLAGS += ["-fno-math-errno", "-fno-exceptions", "-Wall", "-Wextra", "-Wno-unknown-warning-option"]
FLAGS += ["-Wno-uninitialized", "-Wno-maybe-uninitialized"]
AVX2 = ["-mavx2", "-mfma", "-mf16c"]
AVX512 = [*AVX2, *(f"-mavx512{name}" for name in ("f", "bw", "dq", "vl", "vnni"))]
SETS = {
    "portable": [],
    "avx2": ["-DFORETOKEN_AVX2", *AVX2],
    "avxvnni": ["-DFORETOKEN_AVX2", "-DFORETOKEN_AVXVNNI", *AVX2, "-mavxvnni"],
    "avx512": ["-DFORETOKEN_AVX512", *AVX512],
}
REMEDY = "install g++ or clang, or pip install ziglang"


class BuildError(Exception):
    """There is no compiler, or it fails."""


def own_compiler() -> list[str]:
    """Return the words that begin a compiler's command: $CXX or the machine's; none without one."""
    if given := os.environ.get("CXX"):
        return shlex.split(given)
    found = filter(None, map(shutil.which, ("c++", "g++", "clang++")))
    return list(found)[:1]


def compiler() -> list[str]:
    """Return the same, or those of the package ziglang.

    Raises:
        BuildError: There is no compiler.
    """
    if own := own_compiler():
        return own
    if find_spec("ziglang") is not None:
        return [sys.executable, "-m", "ziglang", "c++"]
    raise BuildError(f"there is no C++ compiler; {REMEDY}")


def digest() -> str:
    """Return a digest of the sources and of how they are compiled."""
    total = hashlib.sha256(repr((FLAGS, SETS)).encode())
    for file in sorted(SOURCES.iterdir()):
        total.update(file.name.encode() + b"\0" + file.read_bytes())
    return total.hexdigest()[:16]


def is_current() -> bool:
    """Return whether the library was compiled from these sources."""
    return LIBRARY.exists() and digest().encode() in LIBRARY.read_bytes()


def build(library: Path = LIBRARY, flags: tuple[str, ...] = ()) -> None:
    """Compile the library, whole or not at all.

    Args:
        library: The file to write.
        flags: More options, as for a sanitizer.

    Raises:
        BuildError: There is no compiler, or it fails.
    """
    sets = SETS if platform.machine().lower() in ("x86_64", "amd64") else {"portable": []}
    command = [*compiler(), *FLAGS, *flags]
    with tempfile.TemporaryDirectory(prefix="foretoken-") as folder:
        objects: list[Path] = []
        commands: list[list[str]] = []
        parts = [("kernels", name, more) for name, more in sets.items()]
        parts += [("library", "", [f'-DFORETOKEN_DIGEST="{digest()}"']), ("team", "", [])]
        for source, name, more in parts:
            objects.append(Path(folder) / f"{source}{name}.o")
            own = [f"-DFORETOKEN_KERNELS={name}_kernels"] if name else []
            what = ["-c", str(SOURCES / f"{source}.cpp"), "-o", str(objects[-1])]
            commands.append([*command, *more, *own, *what])
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            list(pool.map(_run, commands))
        made = Path(folder) / library.name
        # Zig would compile C++'s library for it, which takes minutes; GCC 12 lacks the option
        zig = {"zig", "ziglang"} & {Path(word).name for word in command}
        without = ["-nostdlib++", "-s"] if zig else []
        _run([*command, "-shared", *without, *map(str, objects), "-lm", "-o", str(made)])
        partial = library.with_name(f"{library.name}.{os.getpid()}")
        shutil.copy(made, partial)
        os.replace(partial, library)


def _run(command: list[str]) -> None:
    try:
        done = subprocess.run(command, capture_output=True, text=True)
    except OSError as error:  # no such program
        raise BuildError(f"{command[0]}: {error.strerror}") from None
    if done.returncode:
        raise BuildError(f"{' '.join(command)}: {done.stderr.strip()[-2000:]}")


if __name__ == "__main__":
    build()
