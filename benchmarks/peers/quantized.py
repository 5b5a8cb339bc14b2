"""A folder's model as a GGUF file of one of llama.cpp's kinds, by its own quantizer.

    .peers/llama.cpp/bin/python benchmarks/peers/quantized.py MODEL FILE KIND    # as Q4_K_M

Rows that no super-block of 256 divides get the kind that it chooses in its place.
"""

from __future__ import annotations

import sys
from pathlib import Path

import llama_cpp
from gguf_model import write


def main() -> None:
    folder, file, kind = Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3]
    whole = file.with_suffix(".float32.gguf")
    write(folder, whole, "float32")
    params = llama_cpp.llama_model_quantize_default_params()
    params.ftype = getattr(llama_cpp, f"LLAMA_FTYPE_MOSTLY_{kind.upper()}")
    failed = llama_cpp.llama_model_quantize(str(whole).encode(), str(file).encode(), params)
    whole.unlink()
    if failed:
        sys.exit(f"error: llama.cpp does not write {kind}")


if __name__ == "__main__":
    main()
