"""Output of `foretoken generate` as text or JSON: completions, their steps, the speed-up and, with
lenience, the distance from the target's distribution."""

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

MAX_HEADING_CHARS = 60  # of a prompt in the heading of its completion


@dataclass(frozen=True, slots=True)
class TaskAnswer:
    """A completion, with its prompt and options (`task`). `copy` is the index of the completion
    among the outputs of the same prompt."""

    task: PromptWithParams
    copy: int
    request: Request
    completion: Completion

    @property
    def name(self) -> str:
        suffix = "" if self.task.num_outputs == 1 else f", output {self.copy}"
        return f"prompt {self.task.number}{suffix}"

    @property
    def prompt_text(self) -> str:
        """The prompt as a string, or the content of the last message."""
        line = self.task.line
        if line.messages:
            return str(line.messages[-1].get("content") or "")
        return line.prompt if isinstance(line.prompt, str) else _format_ids(line.prompt)

    @property
    def input_ids(self) -> list[int]:
        """The ids of the prompt; for an encoder-decoder, the ids of the source."""
        return self.request.source or self.request.prompt

    @property
    def heading(self) -> str:
        """A heading line: the answer's name, the id given in the prompt file, if any, and the
        beginning of the prompt."""
        line = self.task.line
        suffix = "" if line.id is None else f" ({line.id})"
        text = " ".join(self.prompt_text.split())
        begins = text if len(text) <= MAX_HEADING_CHARS else f"{text[:MAX_HEADING_CHARS]}..."
        return f"==> {self.name}{suffix}: {begins} <=="

    @property
    def ended_by_context(self) -> bool:
        """True if the context length ended the output before max_new_tokens."""
        max_new_tokens, completion = self.task.params.max_new_tokens, self.completion
        return completion.finish_reason == "length" and len(completion.tokens) < max_new_tokens

    def follows_target(self, lenience: float) -> bool:
        """Return whether the output has the target's distribution with this lenience: the lenience
        is 1, or a greedy output has only argmax tokens of the target, or a sampled output has no
        draft tokens."""
        stats = self.completion.stats
        return lenience == 1 or not (stats.bias if self.task.params.greedy else stats.drafted)


def pair_answers(
    tasks: list[PromptWithParams], requests: list[Request], completions: Iterable[Completion]
) -> Iterator[TaskAnswer]:
    """Yield each completion with its task and request, in order. After an interruption there are
    fewer completions than requests; requests without a completion are left out."""
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
    """Print completions; without a tokenizer, print ids. Several completions get headings.

    Args:
        steps: Print the steps of each completion instead of plain text.
        printed: The only completion was streamed, so it is not printed again.
        automatic: Gamma is automatic. If few steps had draft tokens, explain why after the steps.
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
    """Return the next part of an output for printing: `text`, or the ids separated by commas if
    `text` is None (no tokenizer). `before`: the number of tokens before this part."""
    if text is not None:
        return text
    return "," * (bool(tokens) and before > 0) + _format_ids(tokens)


def _format_ids(tokens: list[Any]) -> str:
    return ",".join(map(str, tokens))


def iter_remarks(answers: list[TaskAnswer], lenience: float, *, as_json: bool) -> Iterator[str]:
    """Yield the lines to print on standard error after the answers: failures; without --json also
    the outputs that the context length ended and, with lenience, the distance from the target's
    distribution."""
    for answer in answers:
        if answer.completion.error is not None:
            yield f"error: {answer.name}: {answer.completion.error}"
    if as_json:
        return
    if cut := [answer.name for answer in answers if answer.ended_by_context]:
        yield (
            f"the context length ended {len(cut)} of {len(answers)} outputs before "
            f"max_new_tokens: {', '.join(cut[:8])}{', ...' * (len(cut) > 8)}"
        )
    for greedy in (True, False) if lenience < 1 else ():
        if same := [answer for answer in answers if answer.task.params.greedy is greedy]:
            yield describe_departure(same, lenience)


def _print_steps(spec: Speculator, answer: TaskAnswer) -> None:
    """Print a completion, its steps in the style of figure 1 of the paper, a legend and
    statistics."""
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
    """Return a line of statistics about an output: tokens, target forwards (`calls`; 0: unknown)
    and alpha (None: unknown)."""
    per_forward = f" in {calls} target forwards ({tokens / calls:.2f} per forward)" if calls else ""
    return f"{tokens} tokens{per_forward}{'' if alpha is None else f', alpha {alpha:.2f}'}"


def learn_costs(spec: Speculator, params: list[SamplingParams]) -> None:
    """Measure the costs of steps for a batch with these sampling params, unless the costs are known
    or the pair has no draft."""
    if spec.costing.drafts:
        with show_waiting("measuring the costs of steps"):
            spec.costing.ensure_costs(params, len(params))


# If a larger share of the steps has no draft tokens, no speed-up is reported
MIN_SILENT_SHARE = 0.9
SELDOM_TEXT = (
    "only {:.0%} of the steps had draft tokens; in the other steps the drafter proposed none, or "
    "draft tokens would not have made decoding faster"
)
OTHER_DRAFTS_TEXT = "--gamma 2 always drafts, --draft chooses another draft"


def _explain_plain_decoding(spec: Speculator, completion: Completion) -> str | None:
    """Return a remark if most steps with automatic gamma had no draft tokens; None otherwise, and
    if the pair has no draft."""
    made = [step.drafted > 0 for step in completion.steps]
    if not spec.costing.drafts or not made or sum(made) >= (1 - MIN_SILENT_SHARE) * len(made):
        return None
    return f"gamma is automatic: {SELDOM_TEXT.format(sum(made) / len(made))}; {OTHER_DRAFTS_TEXT}"


def print_speedup(comparison: Any) -> None:
    """Print the speed-up of a `races.Comparison`, and the paper's prediction from the measured
    alpha, c and v. If automatic gamma mostly chose plain decoding, print both times without a
    speed-up."""
    console = open_console()
    plain_seconds, seconds = comparison.plain_seconds_per_token, comparison.seconds_per_token
    times = f"plain {plain_seconds * 1e3:.2f} ms per token"
    if comparison.gamma is None and comparison.silent > MIN_SILENT_SHARE:
        print_paragraph(
            console,
            f"{times}, automatic gamma {seconds * 1e3:.2f}: "
            f"{SELDOM_TEXT.format(1 - comparison.silent)}, so both are plain decoding; "
            f"{OTHER_DRAFTS_TEXT}",
        )
    else:
        _print_ratio(console, times, comparison)
    if warning := describe_contention(comparison.others):
        print_paragraph(console, warning, bold=warning)


def _print_ratio(console: Console, times: str, comparison: Any) -> None:
    """Print the measured speed-up and, if alpha is known, the speed-up that Theorem 3.8 predicts.
    `times`: the time of plain decoding, in words."""
    draft_tokens = f"gamma {comparison.gamma}"
    if comparison.gamma is None:
        draft_tokens = f"{comparison.mean_gamma:.1f} draft tokens per step"
    speed, seconds = f"{comparison.speedup:.2f}x", comparison.seconds_per_token
    print_paragraph(
        console,
        f"{times}, with {draft_tokens} {seconds * 1e3:.2f} ms per token: {speed}",
        bold=speed,
    )
    if comparison.alpha is not None:
        silent = f" (none in {comparison.silent:.0%} of the steps)" if comparison.silent else ""
        print_paragraph(
            console,
            f"Theorem 3.8 predicts for these draft tokens{silent}, with alpha "
            f"{comparison.alpha:.2f} and c {comparison.c:.2f}: {comparison.paper:.2f}x; with the "
            "measured cost of a target forward over a block, up to "
            f"v = {comparison.v:.2f}: {comparison.predicted:.2f}x",
        )


def describe_departure(answers: list[TaskAnswer], lenience: float) -> str:
    """Describe how far outputs with lenience are from the target's distribution. The outputs must
    be all greedy or all sampled."""
    if all(answer.follows_target(lenience) for answer in answers):
        return f"lenience {lenience:g}: still the target's distribution"
    completions = [answer.completion for answer in answers]
    tokens = sum(len(completion.tokens) for completion in completions)
    bias = sum(completion.stats.bias * len(completion.tokens) for completion in completions)
    if answers[0].task.params.greedy:
        return (
            f"lenience {lenience:g}: not the target's greedy output: {round(bias)} of {tokens} "
            "tokens are not the target's most probable token, but each has at least "
            f"{lenience:g} times the probability of that token"
        )
    return (
        f"lenience {lenience:g}: not the target's distribution but {bias / max(1, tokens):.4f} "
        f"away from it (total variation, mean of {tokens} tokens); no token has more than "
        f"{1 / lenience:.3g} times its probability there"
    )


def begin_json(
    spec: Speculator, answers: Iterable[TaskAnswer], speculation: dict[str, Any]
) -> Iterator[TaskAnswer]:
    """Print the beginning of the JSON document, then each answer as a line. Yield each answer after
    it is printed. `end_json` prints the end of the document."""
    print(json.dumps(describe_pair(spec))[:-1], end=', "completions": [')
    for i, answer in enumerate(answers):
        line = json.dumps(answer_to_dict(answer, speculation), allow_nan=False)
        print("," * (i > 0) + f"\n{line}", end="", flush=True)
        yield answer


def end_json(comparison: Any) -> None:
    """Print the end of the JSON document of `begin_json`, with the comparison unless it is None."""
    print("\n]", end="")
    if comparison:
        compared = {**asdict(comparison), "speedup": comparison.speedup}
        print(f', "comparison": {json.dumps(compared, allow_nan=False)}', end="")
    print("}")


def describe_pair(spec: Speculator) -> dict[str, Any]:
    """Return the names of target, draft and backend for the beginning of the JSON document."""
    return {
        "target": spec.target_name,
        "draft": spec.draft_name,
        "runtime": spec.target.runtime,
    }


def answer_to_dict(answer: TaskAnswer, speculation: dict[str, Any]) -> dict[str, Any]:
    """Return an answer as a JSON object for --json. Its `params` have the format of the options in
    a line of a prompt file."""
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
    """Return a completion as a JSON object, with logprobs if requested."""
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


def _logprobs_to_dict(logprobs: Logprobs) -> dict[str, Any]:
    top = [[token, _finite_or_none(logprob)] for token, logprob in logprobs.top]
    return {"token": logprobs.token, "logprob": _finite_or_none(logprobs.logprob), "top": top}


def _finite_or_none(logprob: float) -> float | None:
    """Return the logprob, or None for -inf (a token of probability 0), which JSON lacks."""
    return logprob if math.isfinite(logprob) else None
