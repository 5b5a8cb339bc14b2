"""The package as users get it: an sdist and a wheel are built, the wheel is installed in a clean
environment of each Python, and a text is generated there. Run by `make package` and `make lowest`.
On Linux the wheel is for systems as old as 2019's.

    python tests/package.py python3.11 python3.12 python3.13
    python tests/package.py --lowest python3.11    # with the oldest dependencies that are allowed
"""

from __future__ import annotations

import argparse
import os
import platform
import re
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
WORK = ROOT / "build" / "package"
MOST = 20e6  # bytes of the wheel
TORCH_INDEX = os.environ.get("TORCH_INDEX", "https://download.pytorch.org/whl/cpu")
GLIBC = "2.28"
TEXT = "The captain looked"
# Written in the package's own words, so that a failure to compute is one
SMOKE = f"""
import foretoken
spec = foretoken.load()
plain, drafted = (spec.generate({TEXT!r}, max_new_tokens=24, gamma=g)[0] for g in (0, 4))
assert plain.tokens == drafted.tokens and len(plain.tokens) == 24
assert spec.target.runtime == "native"
print(spec.target.runtime, repr(drafted.text))
"""


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("pythons", nargs="+", help="commands, such as python3.12")
    parser.add_argument("--lowest", action="store_true", help="the oldest dependencies")
    arguments = parser.parse_args()
    wheel = build(arguments.pythons[0])
    for python in arguments.pythons:
        at = WORK / (f"{Path(python).name}-lowest" if arguments.lowest else Path(python).name)
        run(python, "-m", "venv", "--clear", at)
        pip = at / "bin" / "python", "-m", "pip"
        limits = lowest(at) if arguments.lowest else ROOT / "constraints.txt"
        options = "--quiet", "--constraint", limits
        run(*pip, "install", *options, "--no-deps", "--extra-index-url", TORCH_INDEX, "torch")
        run(*pip, "install", *options, f"foretoken[serve,gguf] @ {wheel.as_uri()}")
        run(*pip, "check")
        run(at / "bin" / "python", "-c", SMOKE)
        generate = "generate", "--target", "novels", TEXT, "--max-new-tokens", "8"
        run(at / "bin" / "foretoken", *generate)
        print(f"{python}: passed", flush=True)


def build(python: str) -> Path:
    """Build the sdist, and the wheel from it; returns the wheel."""
    tools, out = WORK / "tools", WORK / "dist"
    run(python, "-m", "venv", "--clear", tools)
    run(tools / "bin" / "python", "-m", "pip", "install", "--quiet", "build", "ziglang==0.17.*")
    for old in out.glob("*"):
        old.unlink()
    old_linux = {}
    if sys.platform == "linux":
        target = f"{platform.machine()}-linux-gnu.{GLIBC}"
        tag = f"manylinux_{GLIBC.replace('.', '_')}_{platform.machine()}"
        compiler = f"{tools / 'bin' / 'python'} -m ziglang c++ -target {target}"
        old_linux = {"CXX": compiler, "_PYTHON_HOST_PLATFORM": tag}
    run(tools / "bin" / "python", "-m", "build", "--outdir", out, ROOT, **old_linux)
    (wheel,), (sdist,) = out.glob("*.whl"), out.glob("*.tar.gz")
    for file in (wheel, sdist):
        print(f"{file.name}: {file.stat().st_size / 1e6:.1f} MB", flush=True)
    tops = {name.split("/")[0] for name in zipfile.ZipFile(wheel).namelist()}
    if not all(top.startswith("foretoken") for top in tops):  # it, and foretoken-VERSION.dist-info
        sys.exit(f"{wheel.name} holds more than the package: {', '.join(sorted(tops))}")
    if old_linux:
        require_old(wheel)
    if wheel.stat().st_size > MOST:
        sys.exit(f"{wheel.name} has more than {MOST / 1e6:.0f} MB")
    return wheel


def require_old(wheel: Path) -> None:
    """End where the library in a wheel needs a newer system than its name says, or C++'s own."""
    (name,) = (n for n in zipfile.ZipFile(wheel).namelist() if n.endswith("/kernels.so"))
    data = zipfile.ZipFile(wheel).read(name)
    needed = {each.decode() for each in re.findall(rb"GLIBC_([0-9.]+)\0", data)}
    newer = [n for n in needed if numbers(n) > numbers(GLIBC)]
    if newer or b"GLIBCXX" in data or b"libc++" in data:
        sys.exit(f"{wheel.name} needs glibc {', '.join(newer)} or C++'s library")
    print(f"{name}: {len(data) / 1e6:.1f} MB, glibc {max(needed, key=numbers)}", flush=True)


def numbers(version: str) -> list[int]:
    return [int(part) for part in version.split(".")]


def lowest(at: Path) -> Path:
    """A file of constraints with the least versions that pyproject.toml allows."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    lines = [*project["dependencies"], *extras["serve"], *extras["gguf"]]
    found = [re.match(r"([\w.-]+)>=([\w.]+)", line) for line in lines]
    file = at / "lowest.txt"
    file.write_text("".join(f"{each[1]}=={each[2]}\n" for each in found if each))
    return file


def run(*command: object, **more: str) -> None:
    environment = os.environ | {"XDG_CACHE_HOME": str(WORK / "cache")} | more
    environment.pop("PYTHONPATH", None)
    if subprocess.run([*map(str, command)], env=environment, cwd=WORK.parent).returncode:
        sys.exit(f"failed: {' '.join(map(str, command))}")


if __name__ == "__main__":
    WORK.mkdir(parents=True, exist_ok=True)
    main()
