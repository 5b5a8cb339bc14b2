"""What `foretoken generate` prints: texts or their steps, the speed-up, how far lenience led from
the target, or all of it as JSON."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.text import Text

from foretoken.cli import prompts
from foretoken.cli.page import page, prose

if TYPE_CHECKING:
    from foretoken.request import Completion
    from foretoken.speculator import Speculator

HEADING = 60  # characters of a prompt that head its text


def show(
    spec: Speculator,
    lines: list[prompts.Line],
    done: list[Completion],
    *,
    steps: bool,
) -> None:
    """Every text, as ids where there is no tokenizer; with `steps`, how it came about. Of several,
    each has a line of its own above it, as files have in `head`."""
    for i, (line, completion) in enumerate(zip(lines, done, strict=False)):
        if len(lines) > 1:
            print("\n" * (i > 0) + _heading(i, line))
        if steps:
            _steps(spec, line.prompt, completion)
        elif completion.text is None:
            print(",".join(map(str, completion.tokens)))
        else:
            print(completion.text)


def _heading(i: int, line: prompts.Line) -> str:
    """Which prompt it was: its number, its id if it has one, how it begins."""
    named = "" if line.id is None else f" ({line.id})"
    shown = line.prompt if isinstance(line.prompt, str) else ",".join(map(str, line.prompt))
    shown = " ".join(shown.split())
    begins = shown if len(shown) <= HEADING else f"{shown[:HEADING]}..."
    return f"==> prompt {i}{named}: {begins} <=="


def cut(lines: list[prompts.Line], done: list[Completion], asked: int) -> str:
    """Which texts ended where the model's context does, before `asked` tokens; "" for none."""
    short = [
        i for i, one in enumerate(done) if one.finish_reason == "length" and len(one.tokens) < asked
    ]
    if not short:
        return ""
    if len(lines) == 1:
        made = f"after {len(done[0].tokens)} new tokens of {asked} asked for"
        return f"the text ends where the model's context does, {made}"
    which = ", ".join(map(str, short[:8])) + ", ..." * (len(short) > 8)
    return (
        f"{len(short)} of {len(lines)} texts end where the model's context does, before the "
        f"{asked} new tokens asked for: prompt {which}"
    )


def _steps(spec: Speculator, prompt: Any, completion: Completion) -> None:
    """Figure 1 of the paper, and its caption."""
    from foretoken.lab import view

    console = Console(highlight=False)
    shown = prompt if isinstance(prompt, str) else ",".join(map(str, prompt))
    console.print(Text(shown, style="bold"), soft_wrap=True)  # a str would be read as markup
    ids = spec.ids(prompt)
    console.print(view.paragraph(ids, completion.steps, spec.tokenizer), soft_wrap=True)
    console.print()
    marks = console.color_system is None or console.no_color
    for line in view.trace(ids, completion.steps, spec.tokenizer, marks=marks):
        console.print(line, soft_wrap=True)
    stats = completion.stats
    alpha = "" if stats.alpha is None else f", alpha {stats.alpha:.2f}"
    console.print(view.legend(marks=marks))
    console.print(
        f"{len(completion.tokens)} tokens in {stats.target_calls} target runs "
        f"({stats.tokens_per_call or 0:.2f} a run){alpha}",
        soft_wrap=True,
    )


def speedup(comparison: Any) -> None:
    """The measured speed-up, and what section 3 makes of the measured alpha, c and v."""
    console = page()
    plain, fast = comparison.plain_seconds_per_token, comparison.seconds_per_token
    prose(
        console,
        f"plain {plain * 1e3:.2f} ms a token, with {_asked(comparison)} {fast * 1e3:.2f} ms a "
        f"token: {comparison.speedup:.2f}x",
        bold=f"{comparison.speedup:.2f}x",
    )
    if comparison.alpha is not None:
        gamma = comparison.formula_gamma
        best = "" if comparison.gamma is not None else f" at its best gamma, {gamma}"
        prose(
            console,
            f"Theorem 3.8 with alpha {comparison.alpha:.2f} and c {comparison.c:.2f}{best}: "
            f"{comparison.paper:.2f}x; with the measured cost v({gamma + 1}) = "
            f"{comparison.v:.2f} of the target's pass: {comparison.predicted:.2f}x",
        )


def departure(done: list[Completion], lenience: float, *, greedy: bool) -> str:
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
        f"lenience {lenience:g}: not the target's law. A token was drawn from a law that is "
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
    return f"gamma {comparison.gamma}" if fixed else f"{comparison.mean_gamma:.1f} guesses a step"


def document(
    spec: Speculator,
    lines: list[prompts.Line],
    done: list[Completion],
    comparison: Any,
    options: dict[str, Any],
    *,
    greedy: bool,
) -> dict[str, Any]:
    """What `--json` prints."""
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
