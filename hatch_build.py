"""Compiles the native decoder where the package is built or installed (hatchling's custom hook)."""

from __future__ import annotations

import os
import platform
import sysconfig
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

KERNELS = Path("src/foretoken/kernels")
found = spec_from_file_location("kernels", Path(__file__).parent / KERNELS / "build.py")
build = module_from_spec(found)
found.loader.exec_module(build)

# A whole compiler from PyPI, where it has one for this machine: else pip would end with an error
ZIG, SYSTEMS = "ziglang==0.17.*", ("Linux", "Darwin")
PROCESSORS = ("x86_64", "aarch64", "arm64")


class KernelsHook(BuildHookInterface[Any]):
    """Adds the compiled kernels to a wheel, which then is of one platform."""

    def dependencies(self) -> list[str]:
        """Return what an isolated build has to install: a compiler, if the machine has none."""
        served = platform.system() in SYSTEMS and platform.machine() in PROCESSORS
        lacking = self.target_name == "wheel" and not build.find_own_compiler()
        return [ZIG] if lacking and served else []

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Compile them; without a compiler, warn and go on: other runtimes serve the models."""
        if self.target_name != "wheel":
            return
        try:
            # pip builds twice, for the metadata first
            if "CXX" in os.environ or not build.is_current():
                build.build()
        except build.BuildError as error:
            self.app.display_warning(f"the native decoder is left out: {error}")
            build.LIBRARY_PATH.unlink(missing_ok=True)  # of other sources
            return
        here = sysconfig.get_platform().replace("-", "_").replace(".", "_")
        build_data["artifacts"].append(f"/{KERNELS}/{build.LIBRARY_PATH.name}")
        build_data["tag"], build_data["pure_python"] = f"py3-none-{here}", False
