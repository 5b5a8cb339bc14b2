"""Output of `foretoken generate`: texts, steps, the speed-up, and how far lenience
moved a text from the target's distribution; or all of it as JSON."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.text import Text

from foretoken.cli import token_styles
from foretoken.cli.prompts import PromptWithParams
from foretoken.cli.render import open_console, print_paragraph
from foretoken.costing.contention import describe_contention
from foretoken.sampling.params import SamplingParams
from foretoken.slow_log import show_waiting

if TYPE_CHECKING:
    from foretoken.request import Completion, Request
    from foretoken.sampling.logprobs import Logprobs
    from foretoken.speculator import Speculator

MAX_HEADING_CHARS = 60  # characters of a prompt that head its text


@dataclass(frozen=True, slots=True)
class TaskAnswer:
    """A completion with its task; `copy` numbers the texts of one prompt."""

    task: PromptWithParams
    copy: int
    request: Request
    completion: Completion

    @property
    def name(self) -> str:
        one = "" if self.task.num_outputs == 1 else f", text {self.copy}"
        return f"prompt {self.task.number}{one}"

    @property
    def prompt_text(self) -> str:
        """The prompt, or the last of the messages."""
        line = self.task.line
        if line.messages:
            return str(line.messages[-1].get("content") or "")
        return line.prompt if isinstance(line.prompt, str) else _format_ids(line.prompt)

    @property
    def input_ids(self) -> list[int]:
        """Ids of the prompt, or of the source of an encoder-decoder."""
        return self.request.source or self.request.prompt

    @property
    def heading(self) -> str:
        """The name, the line's id if it has one, and the beginning of the prompt."""
        line = self.task.line
        suffix = "" if line.id is None else f" ({line.id})"
        text = " ".join(self.prompt_text.split())
        begins = text if len(text) <= MAX_HEADING_CHARS else f"{text[:MAX_HEADING_CHARS]}..."
        return f"==> {self.name}{suffix}: {begins} <=="

    @property
    def ended_by_context(self) -> bool:
        """True if the model's context ended the text before its limit."""
        max_new_tokens, completion = self.task.params.max_new_tokens, self.completion
        return completion.finish_reason == "length" and len(completion.tokens) < max_new_tokens

    def follows_target(self, lenience: float) -> bool:
        """Return True if the text follows the target's distribution: no draft token could pass too
        easily or, at temperature 0, none did."""
        stats = self.completion.stats
        return lenience == 1 or not (stats.bias if self.task.params.greedy else stats.drafted)


def pair_answers(
    tasks: list[PromptWithParams], requests: list[Request], completions: Iterable[Completion]
) -> Iterator[TaskAnswer]:
    """Pair completions with their tasks; after an interruption these are the first ones."""
    copies = [(task, copy) for task in tasks for copy in range(task.num_outputs)]
    paired = zip(completions, copies, requests, strict=False)
    return (TaskAnswer(*which, request, completion) for completion, which, request in paired)


def print_answers(
    spec: Speculator,
    answers: list[TaskAnswer],
    *,
    steps: bool,
    printed: bool = False,
    automatic: bool = False,
) -> None:
    """Print each text, as ids without a tokenizer; several have headings, as files have in `head`.

    steps: print its steps too, and why these have few draft tokens where gamma is automatic.
    printed: the text stands there already.
    """
    for i, answer in enumerate(answers):
        completion = answer.completion
        if len(answers) > 1:
            print("\n" * (i > 0) + answer.heading)
        if steps:
            _print_steps(spec, answer)
            if automatic and (remark := _explain_plain_decoding(spec, completion)):
                print_paragraph(open_console(), remark)
        elif not printed:
            print(_format_ids(completion.tokens) if completion.text is None else completion.text)


def format_piece(text: str | None, tokens: list[int], before: int) -> str:
    """Return the next part of a text, after `before` tokens; ids if there is no tokenizer."""
    if text is not None:
        return text
    return "," * (bool(tokens) and before > 0) + _format_ids(tokens)


def _format_ids(tokens: list[Any]) -> str:
    return ",".join(map(str, tokens))


def iter_remarks(answers: list[TaskAnswer], lenience: float, *, as_json: bool) -> Iterator[str]:
    """Yield lines for standard error: the texts that failed and, without --json, those that the
    context ended, and how far lenience moved them."""
    for answer in answers:
        if answer.completion.error is not None:
            yield f"error: {answer.name}: {answer.completion.error}"
    if as_json:
        return
    if cut := [answer.name for answer in answers if answer.ended_by_context]:
        yield (
            f"{len(cut)} of {len(answers)} texts end where the model's context does, before "
            f"max_new_tokens: {', '.join(cut[:8])}{', ...' * (len(cut) > 8)}"
        )
    for greedy in (True, False) if lenience < 1 else ():
        if same := [answer for answer in answers if answer.task.params.greedy is greedy]:
            yield describe_departure(same, lenience)


def _print_steps(spec: Speculator, answer: TaskAnswer) -> None:
    """Print figure 1 of the paper, and its caption."""
    completion, ids = answer.completion, answer.input_ids
    console = Console(highlight=False)
    console.print(Text(answer.prompt_text, style="bold"), soft_wrap=True)  # a str would be markup
    console.print(
        token_styles.format_completion(ids, completion.steps, spec.tokenizer), soft_wrap=True
    )
    console.print()
    marks = console.color_system is None or console.no_color
    for line in token_styles.format_steps(ids, completion.steps, spec.tokenizer, marks=marks):
        console.print(line, soft_wrap=True)
    console.print(token_styles.format_legend(marks=marks))
    stats = completion.stats
    counts = format_figures(len(completion.tokens), stats.target_calls, stats.alpha)
    console.print(counts, soft_wrap=True)


def format_figures(tokens: int, calls: int, alpha: float | None) -> str:
    """Return the figures of a text in words."""
    runs = f" in {calls} target runs ({tokens / calls:.2f} a run)" if calls else ""
    return f"{tokens} tokens{runs}{'' if alpha is None else f', alpha {alpha:.2f}'}"


def learn_costs(spec: Speculator, params: list[SamplingParams]) -> None:
    """Learn what steps cost before the first token of these texts, which run together."""
    if spec.costing.drafts:
        with show_waiting("measuring what steps cost"):
            spec.costing.ensure_costs(params, len(params))


MIN_SILENT_SHARE = (
    0.9  # share of the steps without draft tokens, above which there is nothing to compare
)
SELDOM_TEXT = (
    "it made draft tokens in {:.0%} of the steps, as elsewhere there were none or they do not pay "
    "here"
)
OTHER_DRAFTS_TEXT = "--gamma 2 makes all that there are, --draft names another draft"


def _explain_plain_decoding(spec: Speculator, completion: Completion) -> str | None:
    """Say that automatic gamma decoded plainly; None where it did not, or there is no draft."""
    made = [step.drafted > 0 for step in completion.steps]
    if not spec.costing.drafts or not made or sum(made) >= (1 - MIN_SILENT_SHARE) * len(made):
        return None
    return f"gamma is automatic: {SELDOM_TEXT.format(sum(made) / len(made))}; {OTHER_DRAFTS_TEXT}"


def print_speedup(comparison: Any) -> None:
    """Print the measured speed-up, and section 3's prediction from the measured alpha, c and v."""
    console = open_console()
    plain_seconds, seconds = comparison.plain_seconds_per_token, comparison.seconds_per_token
    times = f"plain {plain_seconds * 1e3:.2f} ms a token"
    if comparison.gamma is None and comparison.silent > MIN_SILENT_SHARE:
        print_paragraph(
            console,
            f"{times}, automatic gamma {seconds * 1e3:.2f}: "
            f"{SELDOM_TEXT.format(1 - comparison.silent)}, so this is no speed-up, nor a loss; "
            f"{OTHER_DRAFTS_TEXT}",
        )
    else:
        _print_ratio(console, times, comparison)
    if warning := describe_contention(comparison.others):
        print_paragraph(console, warning, bold=warning)


def _print_ratio(console: Console, times: str, comparison: Any) -> None:
    """Print the speed-up and its prediction."""
    draft_tokens = f"gamma {comparison.gamma}"
    if comparison.gamma is None:
        draft_tokens = f"{comparison.mean_gamma:.1f} draft tokens a step"
    speed, seconds = f"{comparison.speedup:.2f}x", comparison.seconds_per_token
    print_paragraph(
        console,
        f"{times}, with {draft_tokens} {seconds * 1e3:.2f} ms a token: {speed}",
        bold=speed,
    )
    if comparison.alpha is not None:
        silent = f" (none in {comparison.silent:.0%} of the steps)" if comparison.silent else ""
        print_paragraph(
            console,
            f"Theorem 3.8 for the draft tokens made{silent}, with alpha {comparison.alpha:.2f} and "
            f"c {comparison.c:.2f}: {comparison.paper:.2f}x; with the measured cost of a target "
            f"forward, up to v = {comparison.v:.2f}: {comparison.predicted:.2f}x",
        )


def describe_departure(answers: list[TaskAnswer], lenience: float) -> str:
    """Say how far lenience moved texts, all greedy or none, from the target's distribution."""
    if all(answer.follows_target(lenience) for answer in answers):
        return f"lenience {lenience:g}: still the target's distribution"
    completions = [answer.completion for answer in answers]
    tokens = sum(len(completion.tokens) for completion in completions)
    bias = sum(completion.stats.bias * len(completion.tokens) for completion in completions)
    if answers[0].task.params.greedy:
        return (
            f"lenience {lenience:g}: not the target's greedy text: {round(bias)} of {tokens} "
            f"tokens are not its first choice; each has at least {lenience:g} of that one's "
            "probability"
        )
    return (
        f"lenience {lenience:g}: not the target's distribution but {bias / max(1, tokens):.4f} "
        f"away from it (total variation, mean of {tokens} tokens) and nowhere above "
        f"{1 / lenience:.3g} times it"
    )


def begin_json(
    spec: Speculator, answers: Iterable[TaskAnswer], speculation: dict[str, Any]
) -> Iterator[TaskAnswer]:
    """Yield the answers, printing each as a line of the document of `--json`; `end` ends that."""
    print(json.dumps(describe_pair(spec))[:-1], end=', "completions": [')
    for i, answer in enumerate(answers):
        line = json.dumps(answer_to_dict(answer, speculation), allow_nan=False)
        print("," * (i > 0) + f"\n{line}", end="", flush=True)
        yield answer


def end_json(comparison: Any) -> None:
    """Print the rest of the document."""
    print("\n]", end="")
    if comparison:
        compared = {**asdict(comparison), "speedup": comparison.speedup}
        print(f', "comparison": {json.dumps(compared, allow_nan=False)}', end="")
    print("}")


def describe_pair(spec: Speculator) -> dict[str, Any]:
    """Return the names that head the document of `--json`."""
    return {
        "target": spec.target_name,
        "draft": spec.draft_name,
        "runtime": spec.target.runtime,
    }


def answer_to_dict(answer: TaskAnswer, speculation: dict[str, Any]) -> dict[str, Any]:
    """Return an answer as `--json` has it; `params`: as a line of a prompt file has them."""
    return {
        "prompt": answer.task.number,
        "id": answer.task.line.id,
        **completion_to_dict(answer.completion),
        "params": answer.task.given,
        **speculation,
        "law": f"{'' if answer.follows_target(speculation['lenience']) else 'not '}the target's",
        "gammas": [step.gamma for step in answer.completion.steps],
    }


def completion_to_dict(completion: Completion) -> dict[str, Any]:
    """Return a completion as JSON has it; logprobs where they were asked for."""
    lists = {name: getattr(completion, name) for name in ("logprobs", "prompt_logprobs")}
    return {
        "text": completion.text,
        "tokens": completion.tokens,
        "finish_reason": completion.finish_reason,
        "stop_reason": completion.stop_reason,
        "error": completion.error,
        "seed": completion.seed,
        **{
            name: list(map(_logprobs_to_dict, each))
            for name, each in lists.items()
            if each is not None
        },
        "stats": completion.stats.to_dict(),
    }


def _logprobs_to_dict(likelihood: Logprobs) -> dict[str, Any]:
    top = [[token, _finite_or_none(logprob)] for token, logprob in likelihood.top]
    return {"token": likelihood.token, "logprob": _finite_or_none(likelihood.logprob), "top": top}


def _finite_or_none(logprob: float) -> float | None:
    """Return None for a token that could not occur: JSON has no infinity."""
    return logprob if math.isfinite(logprob) else None
