"""Compiles the native decoder where the package is built or installed (hatchling's custom hook)."""

from __future__ import annotations

import sys
import sysconfig
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

NATIVE = Path("src/foretoken/models/native")


class KernelsHook(BuildHookInterface[Any]):
    """Adds the compiled kernels to a wheel, which then is of one platform."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Compile them; without a compiler, warn and go on: other runtimes serve the models."""
        if self.target_name != "wheel":
            return
        sys.path.insert(0, str(Path(self.root) / NATIVE))
        import build

        try:
            build.build()
        except build.BuildError as error:
            self.app.display_warning(f"the native decoder is left out: {error}")
            return
        platform = sysconfig.get_platform().replace("-", "_").replace(".", "_")
        build_data["artifacts"].append(f"/{NATIVE}/{build.LIBRARY.name}")
        build_data["tag"], build_data["pure_python"] = f"py3-none-{platform}", False
