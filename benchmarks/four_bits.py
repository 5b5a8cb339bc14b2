"""What four bits do to the target that ships: foretoken's groups and llama.cpp's, on held-out text.

Weights only are rounded in the latter; foretoken's run as a user's do, with activations in eight
bits where the processor's products round them. Expected: alike, as groups of 64 with a fitted scale
lose about what groups of 32 with the largest weight's do.

    python benchmarks/peers/make.py llama.cpp
    python benchmarks/four_bits.py --held-out FILE
"""

from __future__ import annotations

import argparse
import subprocess
import tempfile
from dataclasses import asdict
from pathlib import Path

import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from transformers import AutoModelForCausalLM, PreTrainedModel

import foretoken
import machine
from foretoken.lab.rounding import pieces, rounding
from foretoken.loading.named import asset

HERE = Path(__file__).parent
PYTHON = HERE.parent / ".peers" / "llama.cpp" / "bin" / "python"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--held-out", type=Path, required=True)
    text = parser.parse_args().held_out.read_text(encoding="utf-8", errors="replace")
    exact = foretoken.load("novels", draft="none")
    assert exact.tokenizer is not None
    held_out = pieces(text, exact.tokenizer)
    others = {
        "int4": foretoken.load("novels", draft="none", dtype="int4"),
        "int8": foretoken.load("novels", draft="none", dtype="int8"),
        "q4_0": foretoken.load(theirs(asset("target")), "none"),
    }
    table = Table("", "bits a byte", "more", "same likeliest token", "sum min(p, q)")
    rows = {}
    for name, other in others.items():
        losses = rounding(exact.target, other.target, held_out)
        rows[name] = asdict(losses)
        cells = (
            losses.rounded_bits_per_byte,
            losses.more_bits_per_byte,
            losses.same,
            losses.overlap,
        )
        texts = (f"{each.value:.4f} ± {each.error:.4f}" for each in cells)
        table.add_row(name, *texts)
    Console().print(table)
    print(machine.save("four-bits", {"rows": rows}))


def theirs(folder: Path) -> PreTrainedModel:
    """The model with the weights that llama.cpp would read."""
    model = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, trust_remote_code=False
    )
    with tempfile.TemporaryDirectory() as place:
        file = Path(place) / "weights.npz"
        subprocess.run([PYTHON, HERE / "peers" / "q4_0.py", folder, file], check=True)
        weights = {name: torch.from_numpy(values) for name, values in np.load(file).items()}
    missing = model.load_state_dict(weights, strict=False).missing_keys
    assert missing in ([], ["lm_head.weight"]), missing  # tied to the embeddings
    return model


if __name__ == "__main__":
    main()
