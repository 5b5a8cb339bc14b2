"""The weights of a Llama's folder as llama.cpp's four bits hold them, written as float32 (.npz).

    .peers/llama.cpp/bin/python benchmarks/peers/q4_0.py MODEL FILE

The embeddings and the output layer are q8_0, as in the file that the benchmark gives llama.cpp.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
from gguf import GGMLQuantizationType
from gguf.quants import dequantize, quantize
from gguf_model import ENDS, tensors


def main() -> None:
    weights: dict[str, np.ndarray] = {}
    for name, values in tensors(Path(sys.argv[1])):
        if values.ndim > 1:
            kind = GGMLQuantizationType.Q8_0 if name in ENDS else GGMLQuantizationType.Q4_0
            values = dequantize(quantize(values, kind), kind)
        weights[name] = values
    np.savez(sys.argv[2], **weights)


if __name__ == "__main__":
    main()
