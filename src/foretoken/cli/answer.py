"""Output of `foretoken generate` and `trace`: texts, steps, logprobs, the speed-up, and how far
lenience moved a text from the target's distribution; or all of it as JSON."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from foretoken.cli.prompts import ModelTask
from foretoken.cli.render import page, prose, table
from foretoken.costing.contention import remark
from foretoken.errors import shown
from foretoken.text.decoding import REPLACEMENT

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from foretoken.request import Completion, Request
    from foretoken.sampling.logprobs import Logprobs
    from foretoken.speculator import Speculator

HEADING = 60  # characters of a prompt that head its text


@dataclass(frozen=True, slots=True)
class TaskAnswer:
    """A completion with its task; `copy` numbers the texts of one prompt."""

    task: ModelTask
    copy: int
    request: Request
    completion: Completion

    @property
    def name(self) -> str:
        one = "" if self.task.texts == 1 else f", text {self.copy}"
        return f"prompt {self.task.number}{one}"

    @property
    def asked(self) -> str:
        """The prompt, or the last of the messages."""
        line = self.task.line
        if line.messages and not line.prompt:
            return str(line.messages[-1].get("content") or "")
        return line.prompt if isinstance(line.prompt, str) else _ids(line.prompt)

    @property
    def before(self) -> list[int]:
        """Ids of the prompt, or of the source of an encoder-decoder."""
        return self.request.source or self.request.prompt

    @property
    def heading(self) -> str:
        """The name, the line's id if it has one, and the beginning of the prompt."""
        line = self.task.line
        suffix = "" if line.id is None else f" ({line.id})"
        text = " ".join(self.asked.split())
        begins = text if len(text) <= HEADING else f"{text[:HEADING]}..."
        return f"==> {self.name}{suffix}: {begins} <=="

    @property
    def cut(self) -> bool:
        """True if the model's context ended the text before its limit."""
        most, done = self.task.params.max_new_tokens, self.completion
        return done.finish_reason == "length" and len(done.tokens) < most


def answers(
    tasks: list[ModelTask], requests: list[Request], completions: Iterable[Completion]
) -> Iterator[TaskAnswer]:
    """Pair completions with their tasks; after an interruption these are the first ones."""
    copies = [(task, copy) for task in tasks for copy in range(task.texts)]
    for completion, which, request in zip(completions, copies, requests, strict=False):
        yield TaskAnswer(*which, request, completion)


def show(
    spec: Speculator, answers: list[TaskAnswer], *, steps: bool, printed: bool = False
) -> None:
    """Print each text, as ids without a tokenizer; several have headings, as files have in `head`.

    steps: print its steps too. printed: the text stands there already.
    """
    several = len(answers) > 1
    for i, answer in enumerate(answers):
        completion = answer.completion
        if several:
            print("\n" * (i > 0) + answer.heading)
        if steps:
            _steps(spec, answer)
        elif not printed:
            print(_ids(completion.tokens) if completion.text is None else completion.text)
        show_likelihoods(spec.tokenizer, answer.request.prompt, completion)


def piece(text: str | None, tokens: list[int], before: int) -> str:
    """Return the next part of a text, after `before` tokens; ids if there is no tokenizer."""
    if text is not None:
        return text
    return "," * (bool(tokens) and before > 0) + _ids(tokens)


def _ids(tokens: list[Any]) -> str:
    return ",".join(map(str, tokens))


def remarks(answers: list[TaskAnswer], lenience: float, *, as_json: bool) -> Iterator[str]:
    """Yield lines for standard error: the texts that failed and, without --json, those that the
    context ended, and how far lenience moved them."""
    for answer in answers:
        if answer.completion.error is not None:
            yield f"error: {answer.name}: {answer.completion.error}"
    if as_json:
        return
    if end := cut(answers):
        yield end
    if lenience < 1:
        yield departure(answers, lenience)


def cut(answers: list[TaskAnswer]) -> str:
    """Name the texts that the model's context ended before their limit; "" for none."""
    short = [answer for answer in answers if answer.cut]
    if not short:
        return ""
    limits = {answer.task.params.max_new_tokens for answer in answers}
    most = f"{limits.pop()} " if len(limits) == 1 else ""
    if len(answers) == 1:
        count = f"after {len(short[0].completion.tokens)} new tokens of {most}asked for"
        return f"the text ends where the model's context does, {count}"
    numbers = list(dict.fromkeys(str(answer.task.number) for answer in short))
    which = ", ".join(numbers[:8]) + ", ..." * (len(numbers) > 8)
    return (
        f"{len(short)} of {len(answers)} texts end where the model's context does, before the "
        f"{most}new tokens asked for: prompt {which}"
    )


def _steps(spec: Speculator, answer: TaskAnswer) -> None:
    """Print figure 1 of the paper, and its caption."""
    from foretoken.lab import view

    completion, ids = answer.completion, answer.before
    console = Console(highlight=False)
    console.print(Text(answer.asked, style="bold"), soft_wrap=True)  # a str would be markup
    console.print(view.paragraph(ids, completion.steps, spec.tokenizer), soft_wrap=True)
    console.print()
    marks = console.color_system is None or console.no_color
    for line in view.trace(ids, completion.steps, spec.tokenizer, marks=marks):
        console.print(line, soft_wrap=True)
    console.print(view.legend(marks=marks))
    console.print(caption(completion), soft_wrap=True)


def caption(completion: Completion) -> str:
    """Return the number of target forwards, and alpha."""
    stats = completion.stats
    alpha = "" if stats.alpha is None else f", alpha {stats.alpha:.2f}"
    return (
        f"{len(completion.tokens)} tokens in {stats.target_calls} target runs "
        f"({stats.tokens_per_call or 0:.2f} a run){alpha}"
    )


def speedup(comparison: Any) -> None:
    """Print the measured speed-up, and section 3's prediction from the measured alpha, c and v."""
    console = page()
    plain_seconds, seconds = comparison.plain_seconds_per_token, comparison.seconds_per_token
    draft_tokens = f"gamma {comparison.gamma}"
    if comparison.gamma is None:
        draft_tokens = f"{comparison.mean_gamma:.1f} draft tokens a step"
    prose(
        console,
        f"plain {plain_seconds * 1e3:.2f} ms a token, with {draft_tokens} {seconds * 1e3:.2f} ms a "
        f"token: {comparison.speedup:.2f}x",
        bold=f"{comparison.speedup:.2f}x",
    )
    if comparison.alpha is not None:
        silent = f" (none in {comparison.silent:.0%} of the steps)" if comparison.silent else ""
        prose(
            console,
            f"Theorem 3.8 for the draft tokens made{silent}, with alpha {comparison.alpha:.2f} and "
            f"c {comparison.c:.2f}: {comparison.paper:.2f}x; with the measured cost of a target "
            f"forward, up to v = {comparison.v:.2f}: {comparison.predicted:.2f}x",
        )
    if warning := remark(comparison.others):
        prose(console, warning, bold=warning)


def departure(answers: list[TaskAnswer], lenience: float) -> str:
    """Say how far lenience moved the text from the target's distribution, if it did."""
    completions = [answer.completion for answer in answers]
    greedy = all(answer.task.params.greedy for answer in answers)
    tokens = sum(len(completion.tokens) for completion in completions)
    if all(_is_targets(answer, lenience) for answer in answers):
        why = "distribution: nothing was drafted."
        if greedy:
            why = f"greedy text: all {tokens} tokens are its first choice."
        return f"lenience {lenience:g}: still the target's {why}"
    bias = sum(completion.stats.bias * len(completion.tokens) for completion in completions)
    if greedy:
        return (
            f"lenience {lenience:g}: not the target's greedy text. {round(bias)} of {tokens} "
            f"tokens are not its first choice; each has at least {lenience:g} of that one's "
            "probability."
        )
    return (
        f"lenience {lenience:g}: not the target's distribution. Tokens were drawn from one "
        f"{bias / max(1, tokens):.4f} away from it (total variation, mean of {tokens} tokens) and "
        f"nowhere above {1 / lenience:.3g} times it."
    )


def _is_targets(answer: TaskAnswer, lenience: float) -> bool:
    """Return True if the text follows the target's distribution: no draft token could pass too
    easily or, at temperature 0, none did."""
    stats, greedy = answer.completion.stats, answer.task.params.greedy
    return lenience == 1 or not (stats.bias if greedy else stats.drafted)


def begin(
    spec: Speculator, answers: Iterable[TaskAnswer], speculation: dict[str, Any]
) -> Iterator[TaskAnswer]:
    """Begin the document of `--json`, and print each answer's line as it passes."""
    names = {"target": spec.target_name, "draft": spec.draft_name, "runtime": spec.target.runtime}
    print(json.dumps(names)[:-1], end=', "completions": [')
    for i, answer in enumerate(answers):
        line = json.dumps(_completion(answer, speculation), allow_nan=False)
        print("," * (i > 0) + "\n" + line, end="", flush=True)
        yield answer


def end(comparison: Any) -> None:
    """End the document that `begin` began."""
    print("\n]", end="")
    if comparison:
        document = {**asdict(comparison), "speedup": comparison.speedup}
        print(f', "comparison": {json.dumps(document, allow_nan=False)}', end="")
    print("}")


def _completion(answer: TaskAnswer, speculation: dict[str, Any]) -> dict[str, Any]:
    """Return the line of a text; `params`: its options, as a line of a prompt file has them."""
    completion = answer.completion
    exact = _is_targets(answer, speculation["lenience"])
    return {
        "prompt": answer.task.number,
        "id": answer.task.line.id,
        **result(completion),
        "params": answer.task.given,
        **speculation,
        "law": "the target's" if exact else "not the target's",
        "gammas": [step.gamma for step in completion.steps],
    }


def result(completion: Completion) -> dict[str, Any]:
    """Return a completion as JSON has it."""
    return {
        "text": completion.text,
        "tokens": completion.tokens,
        "finish_reason": completion.finish_reason,
        "stop_reason": completion.stop_reason,
        "error": completion.error,
        "seed": completion.seed,
        **_likelihoods(completion),
        "stats": completion.stats.to_dict(),
    }


def show_likelihoods(
    tokenizer: PreTrainedTokenizerBase | None, prompt: list[int], completion: Completion
) -> None:
    """Print a table of logprobs for the prompt and one for the text, where asked for."""
    if completion.prompt_logprobs is not None:
        page().print(_likelihood_table("prompt", tokenizer, prompt[:1], completion.prompt_logprobs))
    if completion.logprobs is not None:
        page().print(_likelihood_table("token", tokenizer, prompt, completion.logprobs))


def _likelihood_table(
    name: str,
    tokenizer: PreTrainedTokenizerBase | None,
    before: list[int],
    likelihoods: list[Logprobs],
) -> Table:
    """Make a table with a row for every token after `before`."""
    view = table(name, "logprob")
    if any(each.top for each in likelihoods):
        view.add_column("likeliest")
    so_far = list(before)
    for each in likelihoods:
        top = "  ".join(f"{_spell(tokenizer, so_far, i)} {value:.3f}" for i, value in each.top)
        cells = [_spell(tokenizer, so_far, each.token), f"{each.logprob:.3f}", top]
        view.add_row(*map(Text, cells[: len(view.columns)]))
        so_far.append(each.token)
    return view


def _spell(tokenizer: PreTrainedTokenizerBase | None, before: list[int], token: int) -> str:
    """Quote a token's text; spell it as the vocabulary does where it is no text by itself."""
    from foretoken.lab import view  # late: torch

    if tokenizer is None:
        return str(token)
    text = view.spell(tokenizer, before, token)
    if not text or REPLACEMENT in text:
        return str(tokenizer.convert_ids_to_tokens(token))
    return shown(text)


def _likelihoods(completion: Completion) -> dict[str, Any]:
    """Return logprobs as JSON has them, where asked for."""
    names = ("logprobs", "prompt_logprobs")
    lists = {name: getattr(completion, name) for name in names}
    return {
        n: [_entry(each) for each in likelihoods]
        for n, likelihoods in lists.items()
        if likelihoods is not None
    }


def _entry(likelihood: Logprobs) -> dict[str, Any]:
    top = [[token, _finite(logprob)] for token, logprob in likelihood.top]
    return {"token": likelihood.token, "logprob": _finite(likelihood.logprob), "top": top}


def _finite(logprob: float) -> float | None:
    """Return None for a token that could not occur: JSON has no infinity."""
    return logprob if math.isfinite(logprob) else None
