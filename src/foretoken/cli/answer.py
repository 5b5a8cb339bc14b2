"""What `foretoken generate` prints: texts or their steps, the speed-up, how far lenience moved the
text from the target's distribution, or all of it as JSON."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.text import Text

from foretoken.cli import likelihoods
from foretoken.cli.render import page, prose
from foretoken.cli.task import ModelTask
from foretoken.costing.contention import remark

if TYPE_CHECKING:
    from foretoken.request import Completion, Request
    from foretoken.speculator import Speculator

HEADING = 60  # characters of a prompt that head its text


@dataclass(frozen=True, slots=True)
class Answer:
    """A text, which one it is of its prompt's, and what was asked for."""

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
        """The prompt; of messages in its place the last."""
        line = self.task.line
        if line.messages and not line.prompt:
            return str(line.messages[-1].get("content") or "")
        return line.prompt if isinstance(line.prompt, str) else _ids(line.prompt)

    @property
    def before(self) -> list[int]:
        """The ids that the text follows; of an encoder-decoder its source."""
        return self.request.source or self.request.prompt

    @property
    def heading(self) -> str:
        """Its name, the line's id if it has one, and the prompt's beginning."""
        line = self.task.line
        suffix = "" if line.id is None else f" ({line.id})"
        text = " ".join(self.asked.split())
        begins = text if len(text) <= HEADING else f"{text[:HEADING]}..."
        return f"==> {self.name}{suffix}: {begins} <=="

    @property
    def cut(self) -> bool:
        """Whether the model's context ended it."""
        most, done = self.task.params.max_new_tokens, self.completion
        return done.finish_reason == "length" and len(done.tokens) < most


def answers(
    tasks: list[ModelTask], requests: list[Request], completions: Iterable[Completion]
) -> Iterator[Answer]:
    """The completions with what was asked for; where they were interrupted, the first ones."""
    copies = [(task, copy) for task in tasks for copy in range(task.texts)]
    for completion, which, request in zip(completions, copies, requests, strict=False):
        yield Answer(*which, request, completion)


def show(spec: Speculator, answers: list[Answer], *, steps: bool, printed: bool = False) -> None:
    """Every text, as ids where there is no tokenizer; with `steps`, its steps as well. Several have
    headings, as files have in `head`. `printed`: the text stands there already."""
    several = len(answers) > 1
    for i, answer in enumerate(answers):
        completion = answer.completion
        if several:
            print("\n" * (i > 0) + answer.heading)
        if steps:
            _steps(spec, answer)
        elif not printed:
            print(_ids(completion.tokens) if completion.text is None else completion.text)
        likelihoods.show(spec.tokenizer, answer.request.prompt, completion)


def piece(text: str | None, tokens: list[int], before: int) -> str:
    """What is printed of a text as it comes, behind so many tokens: ids without a tokenizer."""
    if text is not None:
        return text
    return "," * (bool(tokens) and before > 0) + _ids(tokens)


def _ids(tokens: list[Any]) -> str:
    return ",".join(map(str, tokens))


def remarks(answers: list[Answer], lenience: float, *, as_json: bool) -> Iterator[str]:
    """What is said beside the texts, a line each: which ones failed and, where no document says
    so, which ones the context ended and how far they are from the target's distribution."""
    for answer in answers:
        if answer.completion.error is not None:
            yield f"error: {answer.name}: {answer.completion.error}"
    if as_json:
        return
    if end := cut(answers):
        yield end
    if lenience < 1:
        yield departure(answers, lenience)


def cut(answers: list[Answer]) -> str:
    """Which texts the model's context ended before their limit; "" for none."""
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


def _steps(spec: Speculator, answer: Answer) -> None:
    """Figure 1 of the paper, and its caption."""
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
    """How many runs a text took, and how far its draft tokens agreed."""
    stats = completion.stats
    alpha = "" if stats.alpha is None else f", alpha {stats.alpha:.2f}"
    return (
        f"{len(completion.tokens)} tokens in {stats.target_calls} target runs "
        f"({stats.tokens_per_call or 0:.2f} a run){alpha}"
    )


def speedup(comparison: Any) -> None:
    """The measured speed-up, and section 3's prediction from the measured alpha, c and v."""
    console = page()
    plain_seconds, seconds = comparison.plain_seconds_per_token, comparison.seconds_per_token
    draft_tokens = f"gamma {comparison.gamma}"
    if comparison.gamma is None:
        draft_tokens = f"{comparison.mean_gamma:.1f} guesses a step"
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
            f"Theorem 3.8 for the guesses made{silent}, with alpha {comparison.alpha:.2f} and c "
            f"{comparison.c:.2f}: {comparison.paper:.2f}x; with the measured cost of the target's "
            f"pass, up to v = {comparison.v:.2f}: {comparison.predicted:.2f}x",
        )
    if warning := remark(comparison.others):
        prose(console, warning, bold=warning)


def departure(answers: list[Answer], lenience: float) -> str:
    """How far lenience moved the text from the target's distribution, if it did."""
    completions = [answer.completion for answer in answers]
    greedy = all(answer.task.params.greedy for answer in answers)
    tokens = sum(len(completion.tokens) for completion in completions)
    if all(_is_targets(answer, lenience) for answer in answers):
        why = f"greedy text: all {tokens} tokens are its first choice." if greedy else ""
        return f"lenience {lenience:g}: still the target's {why or 'law: nothing was guessed.'}"
    bias = sum(completion.stats.bias * len(completion.tokens) for completion in completions)
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


def _is_targets(answer: Answer, lenience: float) -> bool:
    """Whether the text follows the target's distribution: no draft token could pass too easily or,
    at temperature 0, none did."""
    stats, greedy = answer.completion.stats, answer.task.params.greedy
    return lenience == 1 or not (stats.bias if greedy else stats.drafted)


def begin(
    spec: Speculator, answers: Iterable[Answer], speculation: dict[str, Any]
) -> Iterator[Answer]:
    """The answers, each printed as it passes: the document of `--json`, with a line for every text,
    which `end` ends."""
    names = {"target": spec.target_name, "draft": spec.draft_name, "runtime": spec.target.runtime}
    print(json.dumps(names)[:-1], end=', "completions": [')
    for i, answer in enumerate(answers):
        line = json.dumps(_completion(answer, speculation), allow_nan=False)
        print("," * (i > 0) + "\n" + line, end="", flush=True)
        yield answer


def end(comparison: Any) -> None:
    """The rest of what `begin` began."""
    print("\n]", end="")
    if comparison:
        document = {**asdict(comparison), "speedup": comparison.speedup}
        print(f', "comparison": {json.dumps(document, allow_nan=False)}', end="")
    print("}")


def _completion(answer: Answer, speculation: dict[str, Any]) -> dict[str, Any]:
    """`params`: the wishes that were given, as a line of a prompt file has them."""
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
    """What became of a text, as JSON has it."""
    return {
        "text": completion.text,
        "tokens": completion.tokens,
        "finish_reason": completion.finish_reason,
        "stop_reason": completion.stop_reason,
        "error": completion.error,
        "seed": completion.seed,
        **likelihoods.document(completion),
        "stats": completion.stats.to_dict(),
    }
