"""What rounding does to a model: bits per byte of held-out text before and after, and the agreement
of the two distributions on it.

Both read the same ids, in windows, and predict every one but the first. --gguf adds files of
llama.cpp's kinds: their values as they are, in float32 on torch, and as the native decoder
computes with their blocks, its activations rounded to eight bits. Expected: between these two no
difference in bits that the intervals show, and an overlap of 0.97 or more.

    python benchmarks/peers/make.py llama.cpp    # for --gguf alone
    python benchmarks/rounding.py --held-out FILE
    python benchmarks/rounding.py --held-out FILE --target DIR --dtypes int4 --gguf Q4_K_M Q6_K
"""

from __future__ import annotations

import argparse
import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from math import log
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

import foretoken
import machine
from foretoken.errors import InputError, RefusedError
from foretoken.lease import hold_lease
from foretoken.loading.named_models import get_asset
from foretoken.measurement.estimate import Estimate, estimate_ratio
from foretoken.models.base import Model
from foretoken.sampling.acceptance_rules import overlap
from foretoken.sampling.distributions import argmax_ids, require_valid_logits

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

HERE = Path(__file__).parent
PYTHON = HERE.parent / ".peers" / "llama.cpp" / "bin" / "python"
PIECES, LETTERS = 16, 2000  # of a text, evenly spread, and letters in each
WINDOW = 512  # ids that a prediction follows from, at most
CHUNK = 64  # positions in a pass: distributions of a whole window would take much memory


class RoundedPiece(NamedTuple):
    """A piece of text as ids, and the bytes that those behind the first stand for."""

    ids: list[int]
    bytes: int


@dataclass(frozen=True, slots=True)
class Rounding:
    """Intervals are Student's t over pieces of text."""

    tokens: int  # predicted
    bytes: int
    bits_per_byte: Estimate  # of the model as it was
    rounded_bits_per_byte: Estimate
    more_bits_per_byte: Estimate  # the difference, piece by piece
    same: Estimate  # share of positions at which both have the same likeliest token
    overlap: Estimate  # mean of sum min(p, q) at temperature 1


def pieces(text: str, tokenizer: PreTrainedTokenizerBase) -> list[RoundedPiece]:
    """Up to `PIECES` pieces of a text, evenly spread; InputError where it is too short for two."""
    count = min(PIECES, len(text) // LETTERS)
    if count < 2:
        raise InputError(
            f"the held-out text has {len(text)} letters; give {2 * LETTERS} or more, that the "
            "model was not trained on"
        )
    starts = [i * (len(text) - LETTERS) // (count - 1) for i in range(count)]
    return [_piece(text[at : at + LETTERS], tokenizer) for at in starts]


def _piece(text: str, tokenizer: PreTrainedTokenizerBase) -> RoundedPiece:
    """Behind the token that begins a text, where the tokenizer puts one."""
    ids: list[int] = list(tokenizer(text, add_special_tokens=False, verbose=False).input_ids)
    encoded: list[int] = list(tokenizer(text, verbose=False).input_ids)
    size = len(text.encode())
    if encoded[1 : 1 + len(ids)] == ids:
        return RoundedPiece(encoded[: 1 + len(ids)], size)
    first = str(tokenizer.decode(ids[:1]))
    return RoundedPiece(ids, size - len(first.encode()))


@torch.inference_mode()
def rounding(model: Model, rounded: Model, held_out: Sequence[RoundedPiece]) -> Rounding:
    """Compare a model with its rounded copy on pieces of text, two or more.

    Raises RefusedError for an encoder-decoder, and where one of them is in use.
    """
    if model.encoder_decoder:
        raise RefusedError(
            "an encoder-decoder predicts nothing without a source; bits per byte are measured for "
            "decoders alone"
        )
    with hold_lease(model), hold_lease(rounded):
        sums = np.array([_sums(model, rounded, piece.ids) for piece in held_out])
    bits, rounded_bits, same, shared = sums.T.tolist()
    tokens = [len(piece.ids) - 1 for piece in held_out]
    sizes = [piece.bytes for piece in held_out]
    return Rounding(
        tokens=sum(tokens),
        bytes=sum(sizes),
        bits_per_byte=_share(bits, sizes, 0),
        rounded_bits_per_byte=_share(rounded_bits, sizes, 0),
        more_bits_per_byte=_share((sums[:, 1] - sums[:, 0]).tolist(), sizes),
        same=_share(same, tokens, 0, 1),
        overlap=_share(shared, tokens, 0, 1),
    )


def _sums(model: Model, rounded: Model, ids: list[int]) -> list[float]:
    """Return the bits of both, the equal likeliest tokens and sum min(p, q), of a piece."""
    models = (model, rounded)
    window = min([WINDOW, *(each.context for each in models if each.context)])
    sums = [0.0] * 4
    for start in range(0, len(ids) - 1, window):
        for each in models:
            each.start([[]])
        end = min(start + window, len(ids) - 1)
        for at in range(start, end, CHUNK):
            block = ids[at : min(at + CHUNK, end)]
            following = torch.tensor(ids[at + 1 : at + 1 + len(block)])
            p, q = (_logits(each, block, at) for each in models)
            for i, logits in enumerate((p, q)):
                sums[i] += _bits(logits, following)
            sums[2] += int((argmax_ids(p) == argmax_ids(q)).sum())
            distributions = p.softmax(-1)[None], q.softmax(-1)[None]
            sums[3] += float(overlap(*distributions, following[None]).sum())
        for each in models:
            each.leave([0])
    return sums


def _logits(model: Model, block: list[int], at: int) -> Tensor:
    """Behind every id of a block, on the CPU, in float32 or better, `[n, V]`."""
    logits = model.score([block], [len(block)])
    require_valid_logits(logits, "target", [at], [len(block)])
    return logits[0].float().cpu() if logits.dtype != torch.float64 else logits[0].cpu()


def _bits(logits: Tensor, following: Tensor) -> float:
    """Return the negative log-likelihood of the ids, in bits."""
    nats = -logits.log_softmax(-1).gather(-1, following[:, None])
    return float(nats.double().sum()) / log(2)


def _share(tops: list[float], bottoms: list[int], *ends: float) -> Estimate:
    estimate = estimate_ratio(tops, bottoms, *ends)
    assert estimate is not None  # two pieces or more, each with a byte
    return estimate


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--held-out", type=Path, required=True)
    parser.add_argument("--target", default="novels")
    parser.add_argument("--dtypes", nargs="*", default=["int4", "int8"])
    parser.add_argument("--gguf", nargs="*", default=[])
    arguments = parser.parse_args()
    # the distribution as it is, without bans and penalties
    how: Any = {"draft": "none", "generation_config": "ignore"}
    exact = foretoken.load(arguments.target, **how)
    assert exact.tokenizer is not None
    text = arguments.held_out.read_text(encoding="utf-8", errors="replace")
    held_out = pieces(text, exact.tokenizer)
    table = Table("", "bits a byte", "more", "same most probable token", "sum min(p, q)")
    rows = {}

    def compare(name: str, model: Model, rounded: Model) -> None:
        loss = rounding(model, rounded, held_out)
        rows[name] = asdict(loss)
        cells = (loss.rounded_bits_per_byte, loss.more_bits_per_byte, loss.same, loss.overlap)
        words = [f"{each.value:.4f} ± {each.error:.4f}" for each in cells]
        print(name, *words, flush=True)
        table.add_row(name, *words)

    for dtype in arguments.dtypes:
        rounded = foretoken.load(arguments.target, dtype=dtype, **how)
        compare(dtype, exact.target, rounded.target)
    folder = get_asset("target") if arguments.target == "novels" else Path(arguments.target)
    for kind in arguments.gguf:
        with tempfile.TemporaryDirectory() as place:
            file = Path(place) / f"{kind}.gguf"
            subprocess.run(
                [PYTHON, HERE / "peers" / "quantized.py", folder, file, kind], check=True
            )
            how["tokenizer"] = exact.tokenizer
            values = foretoken.load(file, dtype="float32", runtime="transformers", **how)
            native = foretoken.load(file, dtype="int8", runtime="native", **how)
            compare(kind, exact.target, values.target)
            compare(f"{kind}, natively, over its own values", values.target, native.target)
    Console().print(table)
    print(machine.save("rounding", {"target": folder.name, "rows": rows}))


if __name__ == "__main__":
    main()
