"""What `foretoken generate` prints: texts or their steps, the speed-up, how far lenience moved the
text from the target's law, or all of it as JSON."""

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
    spec: Speculator, lines: list[prompts.Line], done: list[Completion], *, steps: bool
) -> None:
    """Every text, as ids where there is no tokenizer; with `steps`, its steps as well. Several have
    headings, as files have in `head`."""
    for i, (line, completion) in enumerate(zip(lines, done, strict=False)):
        if len(lines) > 1:
            print("\n" * (i > 0) + _heading(i, line))
        if steps:
            _steps(spec, line.prompt, completion)
        elif completion.text is None:
            print(_text(completion.tokens))
        else:
            print(completion.text)


def _heading(i: int, line: prompts.Line) -> str:
    """The prompt's number, its id if it has one, and its beginning."""
    named = "" if line.id is None else f" ({line.id})"
    text = " ".join(_text(line.prompt).split())
    begins = text if len(text) <= HEADING else f"{text[:HEADING]}..."
    return f"==> prompt {i}{named}: {begins} <=="


def _text(prompt: str | list[int]) -> str:
    return prompt if isinstance(prompt, str) else ",".join(map(str, prompt))


def cut(lines: list[prompts.Line], done: list[Completion], most: int) -> str:
    """Which texts the model's context ended before `most` tokens; "" for none."""
    short = [
        i
        for i, completion in enumerate(done)
        if completion.finish_reason == "length" and len(completion.tokens) < most
    ]
    if not short:
        return ""
    if len(lines) == 1:
        count = f"after {len(done[0].tokens)} new tokens of {most} asked for"
        return f"the text ends where the model's context does, {count}"
    which = ", ".join(map(str, short[:8])) + ", ..." * (len(short) > 8)
    return (
        f"{len(short)} of {len(lines)} texts end where the model's context does, before the "
        f"{most} new tokens asked for: prompt {which}"
    )


def _steps(spec: Speculator, prompt: str | list[int], completion: Completion) -> None:
    """Figure 1 of the paper, and its caption."""
    from foretoken.lab import view

    console = Console(highlight=False)
    console.print(Text(_text(prompt), style="bold"), soft_wrap=True)  # a str would be markup
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
    """The measured speed-up, and section 3's prediction from the measured alpha, c and v."""
    console = page()
    plain, fast = comparison.plain_seconds_per_token, comparison.seconds_per_token
    guesses = f"gamma {comparison.gamma}"
    if comparison.gamma is None:
        guesses = f"{comparison.mean_gamma:.1f} guesses a step"
    prose(
        console,
        f"plain {plain * 1e3:.2f} ms a token, with {guesses} {fast * 1e3:.2f} ms a "
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
    """How far lenience moved the text from the target's law, if it did."""
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
    """Whether the text follows the target's law: no guess could pass too easily or, at temperature
    0, none did."""
    stats = completion.stats
    return lenience == 1 or not (stats.bias if greedy else stats.drafted)


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
