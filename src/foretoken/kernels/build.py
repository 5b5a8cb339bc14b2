"""Compile the kernels, for all instruction sets of this processor architecture, into one library.

This runs while the package is built, so it imports only the standard library. To run it by hand in
a checkout: `python src/foretoken/kernels/build.py`.
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

KERNELS_FOLDER = Path(__file__).parent
CPP_FOLDER, LIBRARY_PATH = KERNELS_FOLDER / "cpp", KERNELS_FOLDER / "kernels.so"
# No -ffast-math and no contraction, so that the arithmetic is exactly as written. The result does
# not need the C++ standard library. Warnings of uninitialized variables are off, because GCC 12
# warns of vectors in its own headers.
COMPILER_FLAGS = [
    "-std=c++17",
    "-O3",
    "-fPIC",
    "-fvisibility=hidden",
    "-ffp-contract=off",
    "-pthread",
]
COMPILER_FLAGS += [
    "-fno-math-errno",
    "-fno-exceptions",
    "-Wall",
    "-Wextra",
    "-Wno-unknown-warning-option",
]
COMPILER_FLAGS += ["-Wno-uninitialized", "-Wno-maybe-uninitialized"]
AVX2_FLAGS = ["-mavx2", "-mfma", "-mf16c"]
AVX512_FLAGS = [*AVX2_FLAGS, *(f"-mavx512{name}" for name in ("f", "bw", "dq", "vl", "vnni"))]
INSTRUCTION_SET_FLAGS = {
    "portable": [],
    "avx2": ["-DFORETOKEN_AVX2", *AVX2_FLAGS],
    "avxvnni": ["-DFORETOKEN_AVX2", "-DFORETOKEN_AVXVNNI", *AVX2_FLAGS, "-mavxvnni"],
    "avx512": ["-DFORETOKEN_AVX512", *AVX512_FLAGS],
}
COMPILER_REMEDY = "install g++ or clang, or pip install ziglang"


class BuildError(Exception):
    """No compiler was found, or the compiler failed."""


def find_own_compiler() -> list[str]:
    """Return the command of a C++ compiler, as a list of words: $CXX if it is set, else a compiler
    that is installed; [] if there is none."""
    if given := os.environ.get("CXX"):
        return shlex.split(given)
    found = filter(None, map(shutil.which, ("c++", "g++", "clang++")))
    return list(found)[:1]


def find_compiler() -> list[str]:
    """Return the command of a C++ compiler, as a list of words: the command that
    `find_own_compiler` returns, else the command of ziglang.

    Raises:
        BuildError: No compiler was found.
    """
    if own := find_own_compiler():
        return own
    if find_spec("ziglang") is not None:
        return [sys.executable, "-m", "ziglang", "c++"]
    raise BuildError(f"no C++ compiler was found; {COMPILER_REMEDY}")


def compute_digest() -> str:
    """Return a digest of the sources and the compiler flags."""
    total = hashlib.sha256(repr((COMPILER_FLAGS, INSTRUCTION_SET_FLAGS)).encode())
    for file in sorted(CPP_FOLDER.iterdir()):
        total.update(file.name.encode() + b"\0" + file.read_bytes())
    return total.hexdigest()[:16]


def is_current() -> bool:
    """Return whether the library exists and was compiled from the present sources."""
    return LIBRARY_PATH.exists() and compute_digest().encode() in LIBRARY_PATH.read_bytes()


def build(library: Path = LIBRARY_PATH, flags: tuple[str, ...] = ()) -> None:
    """Compile the library. If compiling fails, an existing library stays unchanged.

    Args:
        library: The file to write.
        flags: Additional compiler flags, such as those of a sanitizer.

    Raises:
        BuildError: No compiler was found, or the compiler failed.
    """
    sets = (
        INSTRUCTION_SET_FLAGS
        if platform.machine().lower() in ("x86_64", "amd64")
        else {"portable": []}
    )
    command = [*find_compiler(), *COMPILER_FLAGS, *flags]
    with tempfile.TemporaryDirectory(prefix="foretoken-") as folder:
        objects: list[Path] = []
        commands: list[list[str]] = []
        parts = [("kernels", name, more) for name, more in sets.items()]
        parts += [("library", "", [f'-DFORETOKEN_DIGEST="{compute_digest()}"']), ("team", "", [])]
        for source, name, more in parts:
            objects.append(Path(folder) / f"{source}{name}.o")
            own = [f"-DFORETOKEN_KERNELS={name}_kernels"] if name else []
            what = ["-c", str(CPP_FOLDER / f"{source}.cpp"), "-o", str(objects[-1])]
            commands.append([*command, *more, *own, *what])
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            list(pool.map(_run, commands))
        built = Path(folder) / library.name
        # without -nostdlib++, Zig compiles the C++ standard library, which takes minutes; GCC 12
        # does not have this option
        zig = {"zig", "ziglang"} & {Path(word).name for word in command}
        without = ["-nostdlib++", "-s"] if zig else []
        _run([*command, "-shared", *without, *map(str, objects), "-lm", "-o", str(built)])
        partial = library.with_name(f"{library.name}.{os.getpid()}")
        shutil.copy(built, partial)
        os.replace(partial, library)


def _run(command: list[str]) -> None:
    try:
        result = subprocess.run(command, capture_output=True, text=True)
    except OSError as error:  # no such program
        raise BuildError(f"{command[0]}: {error.strerror}") from None
    if result.returncode:
        raise BuildError(f"{' '.join(command)}: {result.stderr.strip()[-2000:]}")


if __name__ == "__main__":
    build()
