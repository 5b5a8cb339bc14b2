"""A target's own texts behind given prompts, written before a draft is trained on them: a few at a
time, kept on disk, so that a run which was killed goes on behind the last."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from foretoken.errors import InputError, RefusedError
from foretoken.request import uninterrupted
from foretoken.speculator import MAX_ROWS, Speculator
from foretoken.storage import files
from foretoken.train.corpus import Example, Examples

PART = 4 * MAX_ROWS  # texts in a file


def own_texts(
    spec: Speculator,
    examples: Examples,
    folder: Path,
    *,
    length: int,
    temperatures: tuple[float, ...],
    seed: int,
    report: Callable[[int], None],
) -> Examples:
    """Return the examples, those without a reference with what the target writes: `length` tokens
    at most, at each of the temperatures in turn. report: is told how many have been written.

    Raises RefusedError for a target with an encoder, InputError where the folder holds the texts of
    other prompts.
    """
    if spec.target.encoder_decoder:
        raise RefusedError("an encoder-decoder has no text of its own; give a decoder")
    folder.mkdir(parents=True, exist_ok=True)
    _require_same(folder, spec, {"length": length, "temperatures": [*temperatures], "seed": seed})
    every = [*examples.train, *examples.held_out]
    missing = [n for n, example in enumerate(every) if not len(example.reference)]
    for at in range(0, len(missing), PART):
        some = missing[at : at + PART]
        file = folder / f"{at // PART:06d}.json"
        prompts = [[*map(int, every[n].prompt)] for n in some]
        if not file.exists():
            ids: list[list[int]] = [[] for _ in some]
            for i, temperature in enumerate(temperatures):
                own = slice(i, None, len(temperatures))
                keys = [(seed, n) for n in some[own]]
                options = {"temperature": temperature, "max_new_tokens": length, "seed": keys}
                texts = spec.generate(prompts[own], **options) if keys else []
                ids[own] = [text.tokens for text in uninterrupted(texts)]
            files.write(file, json.dumps({"prompts": prompts, "texts": ids}).encode())
        held = files.written(file)
        if held["prompts"] != prompts:
            raise InputError(
                f"{file} holds texts behind other prompts; give those, or another --out"
            )
        for n, new in zip(some, held["texts"], strict=True):
            every[n] = Example(every[n].prompt, new)
        report(at + len(some))
    count = len(examples.train)
    return Examples(every[:count], every[count:], examples.digest)


def _require_same(folder: Path, spec: Speculator, options: dict[str, Any]) -> None:
    """InputError where the folder holds texts of another target, or written in another way."""
    own = spec.target.identity or spec.target_name
    options |= {"target": own, "dtype": spec.target.compute_dtype}
    file = folder / "options.json"
    if not file.exists():
        files.write(file, json.dumps(options).encode())
    held = files.written(file)
    changed = [name for name, value in options.items() if held.get(name) != value]
    if changed:
        name = changed[0]
        raise InputError(
            f"{folder} holds texts with {name} {held.get(name)}, not {options[name]}; give that, "
            "or another --out"
        )
