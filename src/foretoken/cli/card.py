"""Cards of rounded models: how rounding changed the output, in Markdown."""

from __future__ import annotations

import hashlib
import json
import shlex
from dataclasses import asdict
from datetime import date
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console

from foretoken.cli import option
from foretoken.errors import InputError, RefusedError
from foretoken.storage.files import read_text

if TYPE_CHECKING:
    from foretoken.lab.estimate import Estimate
    from foretoken.lab.rounding import Rounding
    from foretoken.speculator import Speculator

EXACT = "float32"


def make(
    console: Console,
    model: str | None,
    origin: option.Origin,
    placing: option.Placing,
    held_out: Path,
    *,
    as_json: bool,
) -> None:
    """Measure on a text and print the card.

    Raises InputError and RefusedError for a model that cannot be rounded or read.
    """
    from foretoken.loading.options import ROUNDED, LoadOptions

    LoadOptions(**vars(placing))
    if placing.dtype not in ROUNDED:
        raise InputError(
            f"--dtype is {placing.dtype}, which rounds no weights; give {' or '.join(ROUNDED)}"
        )
    content = read_text(held_out, "held-out text")
    exact = _load(model, EXACT, origin, placing)
    if exact.tokenizer is None:
        raise RefusedError(f"{model} has no tokenizer, so no bits per byte; save one in its folder")
    from foretoken.lab.rounding import pieces, rounding  # late: as above

    texts = pieces(content, exact.tokenizer)
    rounded = _load(model, placing.dtype, origin, placing)
    loss = rounding(exact.target, rounded.target, texts)
    digest = hashlib.sha256(content.encode()).hexdigest()
    description = f"{held_out.name} (sha256 {digest[:12]})"
    command = _command(model, placing.dtype, held_out)
    card = markdown(rounded.target_name, placing.dtype, loss, description, command)
    if as_json:
        names = {"model": rounded.target_name, "dtype": placing.dtype, "held_out_sha256": digest}
        print(json.dumps({**names, **asdict(loss)}, allow_nan=False))
        return
    console.print(card, markup=False, soft_wrap=True, end="")


def markdown(name: str, dtype: str, loss: Rounding, text: str, command: str) -> str:
    """Write the card."""
    return "\n".join(
        [
            f"# {name} in {dtype}",
            "",
            f"Measured on {loss.tokens} tokens of {text}, {date.today().isoformat()}; "
            "± is 95 %, over pieces of the text.",
            "",
            f"| | {EXACT} | {dtype} |",
            "|---|---|---|",
            f"| bits per byte | {loss.bits_per_byte.value:.3f} | "
            f"{loss.rounded_bits_per_byte.value:.3f} ({_signed(loss.more_bits_per_byte)}) |",
            f"| likeliest token is {EXACT}'s | | {_share(loss.same)} |",
            f"| sum min(p, q) at temperature 1 | | {loss.overlap.value:.4f} ± "
            f"{loss.overlap.error:.4f} |",
            "",
            f"Made by `{command}`.",
            "",
        ]
    )


def _load(
    model: str | None, dtype: str, origin: option.Origin, placing: option.Placing
) -> Speculator:
    from foretoken.loading.load import load  # late: torch takes seconds to import

    return load(
        model,
        "none",
        dtype=dtype,
        device=placing.device,
        runtime=placing.runtime,
        revision=origin.revision,
        trust_remote_code=origin.trust_remote_code,
        generation_config="ignore",  # the distribution as it is, without bans and penalties
    )


def _command(model: str | None, dtype: str, held_out: Path) -> str:
    models = [] if model is None else [model]
    arguments = ["foretoken", "doctor", *models, "--dtype", dtype, "--held-out", str(held_out)]
    return shlex.join(arguments)


def _signed(estimate: Estimate) -> str:
    return f"{estimate.value:+.4f} ± {estimate.error:.4f}"


def _share(estimate: Estimate) -> str:
    return f"{estimate.value:.1%} ± {estimate.error:.1%}"
