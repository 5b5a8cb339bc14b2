"""`foretoken generate`: continue prompts, show how, and compare with plain decoding."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.progress import track
from rich.text import Text

from foretoken.cli import prompts
from foretoken.cli.quiet import quiet
from foretoken.errors import InputError

if TYPE_CHECKING:
    from foretoken.request import Completion
    from foretoken.speculator import Speculator

Model = Annotated[str | None, typer.Option(help="Folder or hub id; left out: the pair that ships.")]


def generate(
    prompt: Annotated[str | None, typer.Argument(help="Text to continue.")] = None,
    prompt_file: Annotated[
        Path | None,
        typer.Option(help='One prompt a line, or .jsonl: {"prompt": text or ids, "id": any}.'),
    ] = None,
    target: Model = None,
    draft: Annotated[
        str | None,
        typer.Option(help="Folder, hub id, heads:FILE, ngram:FILE, lookup, copy, uniform or none."),
    ] = None,
    gamma: Annotated[
        int | None,
        typer.Option(help="Guesses per target call; 0: plain; left out: chosen every step."),
    ] = None,
    temperature: Annotated[float, typer.Option(help="0 is greedy.")] = 0.0,
    top_k: Annotated[int, typer.Option(help="0 is off.")] = 0,
    top_p: Annotated[float, typer.Option(help="1 is off.")] = 1.0,
    min_p: Annotated[float, typer.Option(help="0 is off.")] = 0.0,
    max_new_tokens: Annotated[int, typer.Option(help="New tokens at most.")] = 64,
    seed: Annotated[
        int, typer.Option(help="The same seed, pair and gamma give the same text.")
    ] = 0,
    rule: Annotated[
        str,
        typer.Option(
            help="block, speculative; coupled: a seed gives one text, whatever guesses; "
            "to compare: match, rejection."
        ),
    ] = "block",
    lenience: Annotated[
        float, typer.Option(help="1 is exact; below, guesses pass more easily: another law.")
    ] = 1.0,
    dtype: Annotated[
        str,
        typer.Option(
            help="float32, bfloat16, float16, float64, auto; int8: rounded weights, another model."
        ),
    ] = "float32",
    draft_dtype: Annotated[
        str | None, typer.Option(help="The draft's; it never changes the output's law.")
    ] = None,
    device: Annotated[str, typer.Option(help="cpu, cuda, ...")] = "cpu",
    runtime: Annotated[
        str, typer.Option(help="auto (the fastest that is exact), openvino, graphs, transformers.")
    ] = "auto",
    exact_shapes: Annotated[
        bool,
        typer.Option(
            "--exact-shapes", help="The same text to the bit with and without guesses; slower."
        ),
    ] = False,
    show_tokens: Annotated[
        bool, typer.Option("--show-tokens", help="One line per target call.")
    ] = False,
    compare: Annotated[
        bool, typer.Option("--compare", help="Also decode plainly; speed-up.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON document.")] = False,
    ignore_generation_config: Annotated[
        bool, typer.Option(help="Pass over entries of the generation config that are refused.")
    ] = False,
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
    from foretoken.distributions import SamplingParams  # late: torch takes seconds to import
    from foretoken.loading import load
    from foretoken.options import check, keys_of
    from foretoken.speculator import BATCH

    quiet()
    # What is wrong fails before models load
    params = SamplingParams(temperature, top_k, top_p, min_p)
    check(params, max_new_tokens, gamma, rule, lenience)
    keys_of(seed, 1)
    lines = prompts.read(prompt, prompt_file)
    if compare and len(lines) != 1:
        raise InputError(f"--compare takes one prompt, not {len(lines)}")
    spec = load(
        target,
        draft,
        dtype=dtype,
        draft_dtype=draft_dtype,
        device=device,
        runtime=runtime,
        exact_shapes=exact_shapes,
        generation_config="ignore" if ignore_generation_config else None,
    )
    if spec.tokenizer is None:
        lines = [prompts.as_ids(line) for line in lines]
    spec.requests([line.prompt for line in lines], max_new_tokens, seed)  # a bad one fails now
    if len(lines) == 1 and not (as_json or show_tokens):
        done = [_stream(spec, lines[0].prompt, seed, options)]
    else:
        done = list(_all(spec, lines, seed, options, bar=len(lines) > BATCH))
        if not as_json:
            _print(spec, lines, done, show_tokens=show_tokens)
    interrupted = any(completion.finish_reason == "interrupted" for completion in done)
    comparison = _compare(spec, lines, seed, options) if compare and not interrupted else None
    if as_json:
        document = _document(spec, lines, done, comparison, options, greedy=params.greedy)
        print(json.dumps(document, allow_nan=False))
    elif comparison:
        _report(comparison)
    if lenience < 1 and not as_json:
        print(_departure(done, lenience, greedy=params.greedy), file=sys.stderr)
    if interrupted:
        raise typer.Exit(130)


def _stream(spec: Speculator, prompt: Any, seed: int, options: dict[str, Any]) -> Completion:
    """Print text as it comes."""
    pieces = spec.stream(prompt, seed=seed, **options)
    tokens = 0
    try:
        while True:
            piece = next(pieces)
            shown = piece.text
            if shown is None:
                shown = "".join(f",{token}" for token in piece.tokens).removeprefix(
                    "," * (not tokens)
                )
            tokens += len(piece.tokens)
            print(shown, end="", flush=True)
    except StopIteration as end:
        print()
        return end.value
    except KeyboardInterrupt:
        print(f"\ninterrupted after {tokens} tokens", file=sys.stderr)
        raise typer.Exit(130) from None


def _all(
    spec: Speculator,
    lines: list[prompts.Line],
    seed: int,
    options: dict[str, Any],
    *,
    bar: bool,
) -> Iterator[Completion]:
    """All completions, in order, a batch at a time; with `bar` progress on standard error."""
    from foretoken.speculator import BATCH

    starts = range(0, len(lines), BATCH)
    shown = track(starts, "generating", console=Console(stderr=True)) if bar else starts
    for i in shown:
        batch = lines[i : i + BATCH]
        seeds = [(seed, row) for row in range(i, i + len(batch))]
        done = spec.generate([line.prompt for line in batch], seed=seeds, **options)
        yield from done
        if any(completion.finish_reason == "interrupted" for completion in done):
            return


def _print(
    spec: Speculator,
    lines: list[prompts.Line],
    done: list[Completion],
    *,
    show_tokens: bool,
) -> None:
    for line, completion in zip(lines, done, strict=False):
        if show_tokens:
            _show(spec, line.prompt, completion)
        elif completion.text is None:
            print(",".join(map(str, completion.tokens)))
        else:
            print(completion.text)


def _show(spec: Speculator, prompt: Any, completion: Completion) -> None:
    """Figure 1 of the paper, and its caption."""
    from foretoken.lab import view

    console = Console(highlight=False)
    shown = prompt if isinstance(prompt, str) else ",".join(map(str, prompt))
    console.print(Text(shown, style="bold"), soft_wrap=True)  # a str would be read as markup
    ids = spec.ids(prompt)
    console.print(view.paragraph(ids, completion.steps, spec.tokenizer), soft_wrap=True)
    console.print()
    for line in view.trace(ids, completion.steps, spec.tokenizer):
        console.print(line, soft_wrap=True)
    stats = completion.stats
    alpha = "" if stats.alpha is None else f", alpha {stats.alpha:.2f}"
    console.print(view.legend())
    console.print(
        f"{len(completion.tokens)} tokens in {stats.target_calls} target runs "
        f"({stats.tokens_per_call or 0:.2f} a run){alpha}",
        soft_wrap=True,
    )


def _compare(
    spec: Speculator, lines: list[prompts.Line], seed: int, options: dict[str, Any]
) -> Any:
    from foretoken.lab.compare import compare

    return compare(spec, lines[0].prompt, seed=seed, **options)


def _report(comparison: Any) -> None:
    """The measured speed-up, and what section 3 makes of the measured alpha, c and v."""
    console = Console(highlight=False)
    plain, fast = comparison.plain_seconds_per_token, comparison.seconds_per_token
    console.print(
        f"plain {plain * 1e3:.2f} ms a token, {_asked(comparison)} {fast * 1e3:.2f} ms: "
        f"[bold]{comparison.speedup:.2f}x[/bold]",
        soft_wrap=True,
    )
    if comparison.alpha is not None:
        gamma = comparison.formula_gamma
        best = "" if comparison.gamma is not None else f" at its best gamma, {gamma}"
        console.print(
            f"Theorem 3.8 with alpha {comparison.alpha:.2f} and c {comparison.c:.2f}{best}: "
            f"{comparison.paper:.2f}x; with the measured cost v({gamma + 1}) = "
            f"{comparison.v:.2f} of the target's pass: {comparison.predicted:.2f}x",
            soft_wrap=True,
        )


def _departure(done: list[Completion], lenience: float, *, greedy: bool) -> str:
    """How far lenience led from the target, if it did."""
    tokens = sum(len(completion.tokens) for completion in done)
    if all(_is_targets(completion, lenience, greedy=greedy) for completion in done):
        why = f"greedy text: all {tokens} tokens are its first choice." if greedy else ""
        return f"lenience {lenience:g}: still the target's {why or 'law: nothing was guessed.'}"
    bias = sum(completion.stats.bias * len(completion.tokens) for completion in done)
    if greedy:
        return (
            f"lenience {lenience:g}: not the target's greedy text. {round(bias)} of {tokens} "
            f"tokens are not its first choice; each has at least {lenience:g} of that one's "
            "probability."
        )
    return (
        f"lenience {lenience:g}: not the target's law. A token was drawn from one that is "
        f"{bias / max(1, tokens):.4f} away (total variation, mean of {tokens} tokens) and nowhere "
        f"above {1 / lenience:.3g} times it."
    )


def _is_targets(completion: Completion, lenience: float, *, greedy: bool) -> bool:
    """Whether the text is in the target's law: no guess had the chance to pass too easily, or, at
    temperature 0, none did."""
    stats = completion.stats
    return lenience == 1 or not (stats.bias if greedy else stats.drafted)


def _asked(comparison: Any) -> str:
    fixed = comparison.gamma is not None
    return f"gamma {comparison.gamma}" if fixed else f"gamma {comparison.mean_gamma:.1f} a step"


def _document(
    spec: Speculator,
    lines: list[prompts.Line],
    done: list[Completion],
    comparison: Any,
    options: dict[str, Any],
    *,
    greedy: bool,
) -> dict[str, Any]:
    completions = [
        {
            "id": line.id,
            "text": completion.text,
            "tokens": completion.tokens,
            "finish_reason": completion.finish_reason,
            "seed": completion.seed,
            "gamma": options["gamma"],
            "rule": options["rule"],
            "lenience": options["lenience"],
            "law": "the target's"
            if _is_targets(completion, options["lenience"], greedy=greedy)
            else "not the target's",
            "gammas": [step.gamma for step in completion.steps],
            "stats": completion.stats.to_dict(),
        }
        for line, completion in zip(lines, done, strict=False)
    ]
    document: dict[str, Any] = {
        "target": spec.target_name,
        "draft": spec.draft_name,
        "runtime": spec.target.runtime,
        "completions": completions,
    }
    if comparison:
        document["comparison"] = {**asdict(comparison), "speedup": comparison.speedup}
    return document
