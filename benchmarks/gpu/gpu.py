"""What the scripts of this folder share: a GPU or one line that says there is none, its name and
bandwidth, times by its own clock, random networks made on it, and where results go."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

import machine
from networks import FAMILIES, count, shape

DEVICE = "cuda"


def parser(about: str | None) -> argparse.ArgumentParser:
    options = argparse.ArgumentParser(
        description=about, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    options.add_argument("--out", type=Path, default=machine.RESULTS, help="a folder for the JSON")
    return options


def need() -> None:
    """Ends the script where there is no GPU."""
    if not torch.cuda.is_available():
        raise SystemExit("this script measures a GPU, and torch sees none; run it where there is")


def describe() -> dict[str, Any]:
    facts = torch.cuda.get_device_properties(0)
    gpu = {
        "name": facts.name,
        "memory": facts.total_memory,
        "multiprocessors": facts.multi_processor_count,
    }
    return machine.describe() | {"gpu": gpu | {"cuda": torch.version.cuda}}


def save(name: str, out: Path, result: dict[str, Any]) -> None:
    """OUT/NAME-DATE.json, with the machine; its path is printed."""
    document = {"machine": describe(), "command": " ".join(sys.argv), **result}
    out.mkdir(parents=True, exist_ok=True)
    path = out / f"{name}-{document['machine']['date']}.json"
    path.write_text(json.dumps(document, indent=2, default=str) + "\n")
    print(path)


def seconds(run: Callable[[], object], repeats: int = 30, warm: int = 5) -> float:
    """Median seconds of a run, from the GPU's own clock; the host may run ahead."""
    for _ in range(warm):
        run()
    times: list[float] = []
    for _ in range(repeats):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        run()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) / 1e3)
    return median(times)


def bandwidth(size: int = 2**30) -> float:
    """Bytes a second that the GPU reads, measured by a sum over `size` bytes."""
    numbers = torch.ones(size // 4, device=DEVICE)
    return size / seconds(numbers.sum)


def random_network(
    params: str, vocab: int, dtype: torch.dtype, name: str = "llama", context: int = 4096
) -> Any:
    """Made on the GPU, of about so many parameters; its text means nothing."""
    family = FAMILIES[name]
    width, layers = shape(family, count(params), vocab)
    torch.manual_seed(0)
    torch.set_default_dtype(dtype)
    try:
        with torch.device(DEVICE):
            model = family.model(family.config(width, layers, vocab, context))
    finally:
        torch.set_default_dtype(torch.float32)
    model.generation_config.eos_token_id, model.generation_config.pad_token_id = None, 0
    return model.eval().requires_grad_(False)


def weight_bytes(model: Any) -> int:
    """That a pass reads: all weights but the table of the input's embeddings."""
    table = model.get_input_embeddings().weight
    tied = model.get_output_embeddings().weight is table
    return sum(w.nbytes for w in model.parameters()) - (0 if tied else table.nbytes)
