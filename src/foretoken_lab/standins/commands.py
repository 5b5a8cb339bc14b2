"""The package's own commands, one after another: each goes on where it was."""

from __future__ import annotations

import argparse
import shlex
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

from foretoken.errors import ForetokenError, one_line

Sizes = Mapping[str, int]
T5_DRAFTS: dict[str, Sizes] = {  # about a fourth and a twelfth of a target of 4M parameters
    "draft-4": {
        "encoder_layers": 2,
        "decoder_layers": 1,
        "hidden": 128,
        "feed_forward": 288,
        "heads": 4,
    },
    "draft-12": {
        "encoder_layers": 1,
        "decoder_layers": 1,
        "hidden": 64,
        "feed_forward": 128,
        "heads": 4,
    },
}


def told(main: Callable[[], None]) -> None:
    """Run a script's main; bad input is one line, and exit status 2."""
    try:
        main()
    except (ForetokenError, OSError) as error:
        print(f"error: {one_line(error)}", file=sys.stderr)
        sys.exit(2)


def positive(text: str) -> int:
    """An option's value."""
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{value} is below 1")
    return value


def foretoken(*arguments: object) -> None:
    """Run `foretoken WORDS`, shown first. Where it fails, the script ends with its exit code."""
    _run("foretoken", *arguments)


def lab(*arguments: object) -> None:
    """Run `foretoken-lab WORDS`, as `foretoken`."""
    _run("foretoken-lab", *arguments)


def _run(name: str, *arguments: object) -> None:
    command = [str(word) for word in arguments]
    print(f"\n$ {name} {shlex.join(command)}", flush=True)
    module = name.replace("-", "_")
    code = subprocess.run([sys.executable, "-m", module, *command]).returncode
    if code:
        sys.exit(code)


def flags(values: Mapping[str, object]) -> list[object]:
    """{"kv_heads": 2} as --kv-heads 2; True as the flag alone, False as nothing."""
    options_given: list[object] = []
    for name, value in values.items():
        if value is False:
            continue
        flag = f"--{name.replace('_', '-')}"
        options_given += [flag] if value is True else [flag, value]
    return options_given


def seq2seq(data: Path, out: Path, options: Mapping[str, object]) -> None:
    """Train an encoder-decoder on pairs."""
    lab("train", "seq2seq", "--data", data, "--out", out, *flags(options))


def distill(data: Path, out: Path, draft: str, options: Mapping[str, object]) -> None:
    """OUT/DRAFT-taught: the draft after lessons from OUT/target."""
    models = ("--target", out / "target" / "model", "--draft", out / draft / "model")
    paths = ("--data", data, "--out", out / f"{draft}-taught")
    foretoken("train", "distill", *models, *paths, *flags(options))


def tables(out: Path, data: Path, tokenizer: Path) -> None:
    """A unigram and a bigram table."""
    for order, name in ((1, "unigram"), (2, "bigram")):
        table = out / f"{name}.safetensors"
        if not table.exists():
            source = ("--from-text", data, "--tokenizer", tokenizer)
            foretoken("train", "ngram", *source, "--order", order, "--out", table)
