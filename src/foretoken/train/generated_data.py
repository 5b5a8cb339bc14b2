"""Generates outputs of the target for prompts without a reference output, before a draft is trained
on them. Each file stores the outputs of a few prompts, so that a run that was killed resumes after
the last file."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from foretoken.errors import InputError, RefusedError
from foretoken.request import require_uninterrupted
from foretoken.speculator import MAX_BATCH_SIZE, Speculator
from foretoken.storage import files
from foretoken.train.corpus import Example, Examples

SEQUENCES_PER_FILE = 4 * MAX_BATCH_SIZE


def generate_references(
    spec: Speculator,
    examples: Examples,
    folder: Path,
    *,
    length: int,
    temperatures: tuple[float, ...],
    seed: int,
    report: Callable[[int], None],
) -> Examples:
    """Return the examples, with an output of the target as the reference of each example that has
    none. The outputs have at most `length` tokens, use each of the temperatures in turn, and are
    stored in `folder`. `report` is called with the number of outputs that are done.

    Raises RefusedError for an encoder-decoder target, InputError if the folder holds outputs of
    other prompts or options.
    """
    if spec.target.encoder_decoder:
        raise RefusedError(
            "an encoder-decoder target cannot generate training text; give a decoder-only target"
        )
    folder.mkdir(parents=True, exist_ok=True)
    _require_same_options(
        folder, spec, {"length": length, "temperatures": [*temperatures], "seed": seed}
    )
    examples_and_held_out = [*examples.train, *examples.held_out]
    missing = [n for n, example in enumerate(examples_and_held_out) if not len(example.reference)]
    for start in range(0, len(missing), SEQUENCES_PER_FILE):
        indices = missing[start : start + SEQUENCES_PER_FILE]
        file = folder / f"{start // SEQUENCES_PER_FILE:06d}.json"
        prompts = [[*map(int, examples_and_held_out[n].prompt)] for n in indices]
        if not file.exists():
            ids: list[list[int]] = [[] for _ in indices]
            for i, temperature in enumerate(temperatures):
                turn = slice(i, None, len(temperatures))
                keys = [(seed, n) for n in indices[turn]]
                options = {"temperature": temperature, "max_new_tokens": length, "seed": keys}
                completions = spec.generate(prompts[turn], **options) if keys else []
                ids[turn] = [output.tokens for output in require_uninterrupted(completions)]
            files.write_atomically(file, json.dumps({"prompts": prompts, "texts": ids}).encode())
        stored = files.read_own_json(file)
        if stored["prompts"] != prompts:
            raise InputError(
                f"{file} holds outputs of other prompts; give those prompts, or another --out"
            )
        for n, tokens in zip(indices, stored["texts"], strict=True):
            examples_and_held_out[n] = Example(examples_and_held_out[n].prompt, tokens)
        report(start + len(indices))
    count = len(examples.train)
    return Examples(examples_and_held_out[:count], examples_and_held_out[count:], examples.digest)


def _require_same_options(folder: Path, spec: Speculator, options: dict[str, Any]) -> None:
    """Raise InputError if the folder holds outputs of another target or of other options."""
    target = spec.target.identity or spec.target_name
    options |= {"target": target, "dtype": spec.target.compute_dtype}
    file = folder / "options.json"
    if not file.exists():
        files.write_atomically(file, json.dumps(options).encode())
    stored = files.read_own_json(file)
    changed = [name for name, value in options.items() if stored.get(name) != value]
    if changed:
        name = changed[0]
        raise InputError(
            f"{folder} holds outputs with {name} {stored.get(name)}, not {options[name]}; give "
            f"{name} {stored.get(name)}, or another --out"
        )
