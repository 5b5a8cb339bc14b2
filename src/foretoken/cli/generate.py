"""`foretoken generate`: continue prompts, show how, and compare with plain decoding."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer import Argument, Option

from foretoken.cli import answer, option, prompts
from foretoken.cli.command import command
from foretoken.cli.page import bar
from foretoken.cli.quiet import quiet
from foretoken.errors import InputError

if TYPE_CHECKING:
    from foretoken.request import Completion
    from foretoken.speculator import Speculator


@command
def generate(
    loading: option.PairLoading,
    prompt: Annotated[str | None, Argument(help="Text to continue.")] = None,
    prompt_file: Annotated[Path | None, Option(help=option.PROMPTS)] = None,
    target: option.Target = None,
    draft: option.Draft = None,
    gamma: Annotated[
        int | None, Option(help="Guesses per target call; 0: plain; left out: chosen every step.")
    ] = None,
    temperature: option.Temperature = 0.0,
    top_k: option.TopK = 0,
    top_p: option.TopP = 1.0,
    min_p: option.MinP = 0.0,
    max_new_tokens: option.MaxNewTokens = 64,
    seed: Annotated[int, Option(help="The same seed, pair and gamma give the same text.")] = 0,
    rule: Annotated[
        str,
        Option(
            help="block, speculative; coupled: a seed gives one text, whatever guesses; "
            "to compare: match, rejection."
        ),
    ] = "block",
    lenience: Annotated[
        float, Option(help="1 is exact; below, guesses pass more easily: another law.")
    ] = 1.0,
    show_tokens: Annotated[bool, Option("--show-tokens", help="One line per target call.")] = False,
    compare: Annotated[bool, Option("--compare", help="Also decode plainly; speed-up.")] = False,
    as_json: option.Json = False,
) -> None:
    """Continue a prompt, or many, in the target's own distribution."""
    options = {
        "max_new_tokens": max_new_tokens,
        "temperature": temperature,
        "top_k": top_k,
        "top_p": top_p,
        "min_p": min_p,
        "gamma": gamma,
        "rule": rule,
        "lenience": lenience,
    }
    from foretoken.options import keys_of, require
    from foretoken.sampling.params import SamplingParams

    # Mistakes are told before torch is imported, which takes seconds, and before models load
    params = SamplingParams(temperature, top_k, top_p, min_p, max_new_tokens=max_new_tokens)
    require(gamma, rule, lenience)
    keys_of(seed, [1])
    lines = prompts.read(prompt, prompt_file)
    if compare and len(lines) != 1:
        raise InputError(f"--compare takes one prompt, not {len(lines)}")
    loading.require(target)
    quiet()
    spec = loading.load(target, draft)
    lines = prompts.for_model(lines, spec)
    spec.requests([line.prompt for line in lines], params, seed)  # a bad one fails now
    if len(lines) == 1 and not (as_json or show_tokens):
        done = [_stream(spec, lines[0].prompt, seed, options)]
    else:
        done = list(_all(spec, lines, seed, options))
        if not as_json:
            answer.show(spec, lines, done, steps=show_tokens)
    interrupted = any(completion.finish_reason == "interrupted" for completion in done)
    comparison = None
    if compare and not interrupted:
        from foretoken.lab.bench.compare import compare as against_plain

        comparison = against_plain(spec, lines[0].prompt, seed=seed, **options)
    if as_json:
        document = answer.document(spec, lines, done, comparison, options, greedy=params.greedy)
        print(json.dumps(document, allow_nan=False))
    elif comparison:
        answer.speedup(comparison)
    if not as_json and (end := answer.cut(lines, done, max_new_tokens)):
        print(end, file=sys.stderr)
    if lenience < 1 and not as_json:
        print(answer.departure(done, lenience, greedy=params.greedy), file=sys.stderr)
    if interrupted:
        raise typer.Exit(130)


def _stream(spec: Speculator, prompt: Any, seed: int, options: dict[str, Any]) -> Completion:
    """Print text as it comes, as ids where there is no tokenizer."""
    pieces = spec.stream(prompt, seed=seed, **options)
    tokens = 0
    try:
        while True:
            piece = next(pieces)
            text = piece.text
            if text is None:
                text = "".join(f",{token}" for token in piece.tokens)
                text = text if tokens else text.removeprefix(",")
            tokens += len(piece.tokens)
            print(text, end="", flush=True)
    except StopIteration as end:
        print()
        return end.value
    except KeyboardInterrupt:
        print(f"\ninterrupted after {tokens} tokens", file=sys.stderr)
        raise typer.Exit(130) from None


def _all(
    spec: Speculator, lines: list[prompts.Line], seed: int, options: dict[str, Any]
) -> Iterator[Completion]:
    """All completions, in order, a batch at a time; of several, progress on standard error."""
    from foretoken.speculator import BATCH

    starts = range(0, len(lines), BATCH)
    for i in bar(starts, "generating") if len(starts) > 1 else starts:
        batch = lines[i : i + BATCH]
        seeds = [(seed, row) for row in range(i, i + len(batch))]
        done = spec.generate([line.prompt for line in batch], seed=seeds, **options)
        yield from done
        if any(completion.finish_reason == "interrupted" for completion in done):
            return
