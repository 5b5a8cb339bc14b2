"""`foretoken generate`: complete prompts; optionally show the steps or compare the speed with plain
decoding."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from foretoken.cli import batch_file, completion_output, option, prompts
from foretoken.cli.command import command, hold_messages, release_messages, set_up_logging
from foretoken.cli.prompts import MessageOptions, PromptWithParams
from foretoken.cli.render import track_progress
from foretoken.errors import ControlError, InputError
from foretoken.sampling.checks import SEED
from foretoken.sampling.speculation import SpeculationOptions

if TYPE_CHECKING:
    from foretoken.request import Completion, Request, SequenceState
    from foretoken.speculator import Speculator

PROMPT_FILE_HELP = (
    "File of prompts: one per line, or .jsonl or .parquet of "
    '{"prompt": text or ids, "id": any}, or "messages" instead of "prompt". Options in a line '
    '("temperature", "stop_strings", ...) override those of the command.'
)


@command
def generate(
    sampling: option.SamplingOptions,
    messages: MessageOptions,
    loading: option.PairLoadOptions,
    cluster: option.ClusterOptions,
    words: option.PromptArguments = None,
    prompt_file: Annotated[Path | None, PROMPT_FILE_HELP] = None,
    target: option.Target = None,
    draft: option.Draft = None,
    gamma: option.Gamma = None,
    seed: option.TextSeed = 0,
    rule: option.Rule = "block",
    lenience: option.Lenience = 1.0,
    output: Annotated[
        Path | None,
        "Append a line of JSON to this file for each finished prompt of --prompt-file. The same "
        "command resumes a run. For a folder, the file is results.jsonl in it; a .parquet file is "
        "converted at the end from the .jsonl file next to it.",
    ] = None,
    show_tokens: Annotated[bool, "Print a line per step, with draft tokens in colour."] = False,
    compare: Annotated[bool, "Also time plain decoding, and print the speed-up."] = False,
    as_json: option.Json = False,
) -> None:
    """Complete one or more prompts, in the target's own distribution.

    Temperature, top-k, top-p and min-p are not taken from the model's generation config. Stop
    conditions, penalties and bans come from this config, unless the command gives them.
    """
    # Report mistakes before torch is imported, which takes seconds, and before models load
    target, prompt = option.split_arguments(words, target)
    target = option.resolve_target(target)
    options, template = sampling.chosen_values, messages.template
    speculation = asdict(SpeculationOptions(gamma, rule, lenience))
    SEED("seed", seed)
    cluster.require()
    if output is not None:
        if prompt_file is None or prompt is not None or compare or show_tokens or as_json:
            raise InputError(
                "--output needs a file of prompts; give --prompt-file, and leave out the "
                "prompt, --compare, --show-tokens and --json"
            )
        tasks, bad = prompts.read_tasks(prompt_file, messages, options)
        lines = batch_file.BatchJob(tasks, (target, draft), loading, template, seed, speculation)
        if batch_file.write_completions(output, lines, cluster) or bad:
            raise typer.Exit(1)
        return
    if cluster.used:
        raise InputError("--ray and --replicas need files; give --prompt-file and --output")
    lines = prompts.read_prompts(prompt, prompt_file, prompts.SAMPLING_KEYS)
    wrapped_lines = [messages.wrap_prompt(line) for line in lines]
    messages.require_used(wrapped_lines)
    tasks = prompts.make_tasks(wrapped_lines, options)
    _require_printable(tasks, compare=compare, as_json=as_json)
    loading.require(target)
    set_up_logging()
    model_prompts: list[Any] = []
    spec = loading.load(
        target,
        draft,
        lambda known: model_prompts.extend(template.make_prompts(wrapped_lines, known)),
    )
    print_options = {"compare": compare, "show_tokens": show_tokens, "as_json": as_json}
    _print_completions(spec, tasks, model_prompts, seed, speculation, **print_options)


def _require_printable(tasks: list[PromptWithParams], *, compare: bool, as_json: bool) -> None:
    num_outputs = sum(task.num_outputs for task in tasks)
    if compare and num_outputs != 1:
        raise InputError(f"--compare takes one prompt with one output, not {num_outputs} outputs")
    asked = [(each.params.logprobs, each.params.prompt_logprobs) for each in tasks]
    if not as_json and any(each != (None, None) for each in asked):
        raise InputError("logprobs and prompt_logprobs are printed as JSON only; add --json")


def _print_completions(
    spec: Speculator,
    tasks: list[PromptWithParams],
    model_prompts: list[Any],
    seed: int,
    speculation: dict[str, Any],
    *,
    compare: bool,
    show_tokens: bool,
    as_json: bool,
) -> None:
    """Generate and print all completions. Exit with code 1 if a completion failed, 130 after
    Ctrl-C.

    With `as_json`, each completion is printed when it finishes; the JSON document is complete even
    after a failure or Ctrl-C.
    """
    keys = prompts.make_keys(tasks, seed)
    requests: list[Request] = []
    for task, prompt, key in zip(tasks, model_prompts, keys, strict=True):
        with task.line.prefix_errors():  # an invalid prompt raises here
            requests += spec.inputs.make_requests([prompt], task.params, [key])
    streamed = len(requests) == 1 and not (as_json or show_tokens)
    if not streamed or compare:  # without this preparation, streaming begins sooner
        spec = spec.prepared()
    if speculation["gamma"] is None:
        completion_output.learn_costs(spec, [request.params for request in requests])
    completions = (
        [_stream_completion(spec, tasks[0], model_prompts[0], keys, speculation)]
        if streamed
        # An invalid grammar raises here
        else _generate_completions(spec, spec.inputs.make_sequences(requests), speculation)
    )
    pairs = completion_output.pair_answers(tasks, requests, completions)
    comparison = None
    try:
        answers = list(completion_output.begin_json(spec, pairs, speculation) if as_json else pairs)
        if not as_json:
            automatic = speculation["gamma"] is None and not compare
            completion_output.print_answers(
                spec, answers, steps=show_tokens, printed=streamed, automatic=automatic
            )
        reasons = {each.completion.finish_reason for each in answers}
        broken = reasons & {"interrupted", "error"}
        if compare and not broken:
            from foretoken.measurement import races  # late: imports torch

            # The sum over steps excludes the time in which costs were measured
            steps = answers[0].completion.steps
            once = sum(x.draft_seconds + x.score_seconds + x.verify_seconds for x in steps)
            seconds = 2 * races.COMPARISON_REPEATS * once
            if seconds > 1:
                n = races.COMPARISON_REPEATS
                timing_text = f"timing {n} plain runs and {n} runs with drafts, in turn"
                print(f"{timing_text}, about {seconds:.0f} s", file=sys.stderr)
            comparison = races.compare_with_plain(
                spec, model_prompts[0], seed=seed, **tasks[0].given, **speculation
            )
    finally:
        if as_json:
            completion_output.end_json(comparison)
    if comparison and not as_json:
        completion_output.print_speedup(comparison)
    for remark in completion_output.iter_remarks(answers, speculation["lenience"], as_json=as_json):
        print(remark, file=sys.stderr)
    if broken:
        raise typer.Exit(130 if "interrupted" in reasons else 1)


def _stream_completion(
    spec: Speculator,
    task: PromptWithParams,
    prompt: Any,
    keys: list[tuple[int, int]],
    speculation: dict[str, Any],
) -> Completion:
    """Print the output of one prompt while it is generated, and return the completion. If there is
    no tokenizer, the ids are printed. Exit with code 1 if generation fails, 130 after Ctrl-C."""
    pieces = spec.stream([prompt], task.params, seed=keys, **speculation)
    tokens = 0
    try:
        while True:
            piece = next(pieces)
            text = completion_output.format_piece(piece.text, piece.tokens, tokens)
            hold_messages()
            print(text, end="", flush=True)
            tokens += len(piece.tokens)
    except StopIteration as end:
        print()
        return end.value
    except ControlError as error:
        print("\n" * (tokens > 0), end="", flush=True)
        print("error:", error, file=sys.stderr)
        raise typer.Exit(1) from None
    except KeyboardInterrupt:
        print(f"\ninterrupted after {tokens} tokens", file=sys.stderr)
        raise typer.Exit(130) from None
    finally:
        release_messages()


def _generate_completions(
    spec: Speculator, seqs: list[SequenceState], speculation: dict[str, Any]
) -> Iterator[Completion]:
    """Yield the completions in order; after Ctrl-C, only completions of sequences that had started.

    A progress bar is shown on standard error if the sequences do not fit in one batch.
    """
    from foretoken.inputs import resolve_verifier  # late: imports torch

    completions = spec.generate_completions(
        seqs, resolve_verifier(**speculation), speculation["gamma"]
    )
    many = len(seqs) > spec.costing.max_batch_size
    several = track_progress(completions, "generating", len(seqs)) if many else completions
    for seq, completion in zip(seqs, several, strict=True):
        if seq.start_time or seq.finish_reason is not None:
            yield completion
