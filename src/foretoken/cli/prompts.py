"""Read prompts from an argument, a file or standard input, and determine the sampling params of
each prompt. Prompts that are messages are rendered by a chat template.

A line of a file may hold messages instead of a prompt. For some commands, a line may also hold
sampling options, which override options of the command line, or a category.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, NamedTuple

from foretoken.cli.benchmark_questions import convert_question, is_question
from foretoken.cli.option import parse_json_option, require_extra
from foretoken.errors import ForetokenError, InputError, format_value, is_whole_number
from foretoken.sampling.checks import SEED
from foretoken.sampling.params import TEXT_OPTIONS, SamplingParams, suggest_name
from foretoken.storage.files import read_text
from foretoken.text.messages import Message, require_conversation

if TYPE_CHECKING:
    from foretoken.loading.target import TargetInfo
    from foretoken.speculator import Speculator

# Keys that a command accepts in a line of a file
PROMPT_KEYS = ("prompt", "id")
MESSAGE_KEYS = (*PROMPT_KEYS, "messages")
BENCHMARK_KEYS = (*MESSAGE_KEYS, "category")  # with them, questions of benchmarks are also allowed
SAMPLING_KEYS = (*MESSAGE_KEYS, "seed", *TEXT_OPTIONS)


@dataclass(frozen=True, slots=True)
class PromptLine:
    """A prompt, or messages, with the options in the same line of a prompt file."""

    prompt: str | list[int]
    id: Any = None  # copied to the completion
    messages: list[Message] = field(default_factory=list[Message])  # if any, `prompt` is unused
    sampling: dict[str, Any] = field(default_factory=dict[str, Any])  # options of this line
    seed: int | None = None  # None: the command's seed
    location: str = ""  # file and line number, for errors; "": not from a file
    category: str = ""  # "": none

    @contextmanager
    def prefix_errors(self) -> Iterator[None]:
        """Context manager that puts the line's location before the message of any ForetokenError
        raised within the context."""
        try:
            yield
        except ForetokenError as error:
            if not self.location:
                raise
            raise type(error)(f"{self.location}: {error}") from None


def read_prompts(
    argument: str | None, file: Path | None, keys: tuple[str, ...] = PROMPT_KEYS
) -> list[PromptLine]:
    """Return the prompts of a command: the argument, the lines of a file, or all of standard input
    as one prompt. `keys`: the keys allowed in lines of JSON. Raises InputError if there is no
    prompt or a prompt is invalid."""
    if argument is not None and file is not None:
        raise InputError("give a prompt or --prompt-file, not both")
    if file is not None:
        return [parse() for _, parse in number_lines(file, keys)]
    if argument is not None:
        return [PromptLine(prompt=argument)]
    try:
        text = "" if sys.stdin is None or sys.stdin.isatty() else sys.stdin.read()
    except UnicodeDecodeError as error:
        raise InputError(f"standard input is not valid text: {error}") from None
    if not text:
        raise InputError("no prompt; give one as an argument, in a file or on standard input")
    return [PromptLine(prompt=text.removesuffix("\n"))]


def read_first_prompts(file: Path, limit: int | None) -> list[PromptLine]:
    """Return the first `limit` prompts of a file; all prompts if `limit` is None. Raises InputError
    for an invalid file or limit."""
    _require_limit(limit)
    return read_prompts(None, file)[:limit]


def read_benchmark_prompts(file: Path, limit: int | None) -> list[PromptLine]:
    """Return the first `limit` prompts of each category of a file; all prompts if `limit` is None.
    Either all lines or no lines have a category. Raises InputError for an invalid file or limit."""
    _require_limit(limit)
    counts = Counter[str]()
    chosen: list[PromptLine] = []
    for line in read_prompts(None, file, BENCHMARK_KEYS):
        counts[line.category] += 1
        if limit is None or counts[line.category] <= limit:
            chosen.append(line)
    if counts[""] and len(counts) > 1:
        raise InputError(f"{file}: {counts['']} lines have no category; give each line a category")
    return chosen


def _require_limit(limit: int | None) -> None:
    if limit is not None and limit < 1:
        raise InputError(f"limit is {limit}; give the number of prompts to use, 1 or more")


def number_lines(file: Path, keys: tuple[str, ...]) -> list[tuple[int, Callable[[], PromptLine]]]:
    """Return (line number from 1, function) for each line of a file that is not empty. The function
    parses the line, and raises InputError for an invalid line. `keys`: the keys allowed in lines of
    JSON."""
    lines = _read_lines(file)
    filled = [(number, line) for number, line in enumerate(lines, 1) if line.strip()]
    if not filled:
        raise InputError(f"{file} has no prompts; give one on each line")
    if file.suffix not in (".jsonl", ".json", ".parquet"):
        return [(number, partial(PromptLine, prompt=line)) for number, line in filled]
    return [(n, partial(_parse_line, f"{file}, line {n}", line, keys)) for n, line in filled]


def _read_lines(file: Path) -> list[str]:
    """Return the lines of a file, or the rows of a Parquet file as JSON."""
    if file.suffix != ".parquet":
        return [line.removesuffix("\r") for line in read_text(file, "prompts").split("\n")]
    return import_parquet().read_json_lines(file)


def import_parquet():  # not annotated: the type is the module's
    """Import and return `cluster.parquet_files`. Raises InputError if the extra is missing."""
    with require_extra("ray"):
        from foretoken.cluster import parquet_files
    return parquet_files


def _parse_line(location: str, line: str, keys: tuple[str, ...]) -> PromptLine:
    with PromptLine("", location=location).prefix_errors():
        options = parse_json_option("it", line)
        if not isinstance(options, dict):
            raise InputError(
                'it is not a JSON object; give {"prompt": text or ids, "id": anything}'
            )
        if "category" in keys and is_question(options):
            options = convert_question(options)
        for key in options:
            require_key(key, keys)
        if ("prompt" in options) == ("messages" in options):
            raise InputError("give either a prompt or messages")
        id, seed = options.pop("id", None), options.pop("seed", None)
        prompt, messages = options.pop("prompt", ""), options.pop("messages", None)
        category = options.pop("category", "")
        if not isinstance(category, str):
            raise InputError(f"category is {format_value(category)}; give a string")
        if seed is not None:
            SEED("seed", seed)
        if messages is not None:
            require_conversation(messages)
        elif not (
            isinstance(prompt, str)
            or (isinstance(prompt, list) and all(map(is_whole_number, prompt)))
        ):
            raise InputError(f"prompt is {format_value(prompt)}; give text or ids")
        elif not prompt:
            raise InputError("the prompt is empty; give text or ids")
        return PromptLine(prompt, id, messages or [], options, seed, location, category)


def require_key(key: str, keys: tuple[str, ...]) -> None:
    """Raise InputError for a key that is not among `keys`."""
    if key not in keys:
        near = suggest_name(key, keys)
        remedy = f"did you mean {near}?" if near else f"give any of {', '.join(keys)}"
        raise InputError(f"{key[:40]} is unknown here; {remedy}")


def to_model_prompt(line: PromptLine, target: Speculator | TargetInfo) -> str | list[int]:
    """Return a line's prompt. If the target has no tokenizer, a string is parsed as ids separated
    by commas; raises InputError for any other string."""
    if isinstance(line.prompt, list) or target.tokenizer is not None:
        return line.prompt
    try:
        return [int(part) for part in line.prompt.split(",") if part.strip()]
    except ValueError:
        raise InputError(
            f"the model has no tokenizer, and {line.prompt.strip()[:40]!r} is not "
            "ids separated by commas; give --tokenizer, a folder or hub id"
        ) from None


class ChatTemplate(NamedTuple):
    """A chat template with its variables."""

    text: str | None = None  # Jinja source; None: the tokenizer's own template
    variables: dict[str, Any] | None = None

    def make_prompt(self, line: PromptLine, target: Speculator | TargetInfo) -> str | list[int]:
        """Return a line's prompt for the target; messages are rendered and tokenized."""
        if not line.messages:
            return to_model_prompt(line, target)
        from foretoken.text import chat  # late: torch takes seconds

        return chat.encode_chat(line.messages, target.tokenizer, self.text, self.variables)

    def make_prompts(
        self, lines: Iterable[PromptLine], target: Speculator | TargetInfo
    ) -> list[str | list[int]]:
        """Return the prompt of each line for the target. Raises InputError for the first line that
        is invalid."""
        made: list[str | list[int]] = []
        for line in lines:
            with line.prefix_errors():
                made.append(self.make_prompt(line, target))
        return made


@dataclass(frozen=True)
class TemplateOptions:
    """Options of the chat template."""

    panel: ClassVar[str] = "Messages"
    messages_remedy: ClassVar[str] = "give messages"
    chat_template: Annotated[
        Path | None, "File with a Jinja template. Default: the tokenizer's own."
    ] = None
    chat_template_kwargs: Annotated[
        str | None, 'Variables for the template as JSON, such as {"enable_thinking": false}.'
    ] = None

    @property
    def template(self) -> ChatTemplate:
        """The template. Raises InputError if the file cannot be read or the JSON is invalid."""
        file, arguments = self.chat_template, self.chat_template_kwargs
        text = None if file is None else read_text(file, "a Jinja template")
        if arguments is None:
            return ChatTemplate(text)
        variables = parse_json_option("chat_template_kwargs", arguments)
        if not isinstance(variables, dict):
            raise InputError(
                f"chat_template_kwargs is {format_value(arguments)}; give a JSON object"
            )
        return ChatTemplate(text, variables)

    def require_used(self, lines: list[PromptLine]) -> None:
        """Raise InputError if an option that only affects messages is given, but no line has
        messages."""
        if not any(line.messages for line in lines):
            for name in ("system", "chat_template", "chat_template_kwargs"):
                if getattr(self, name, None) is not None:
                    problem = f"--{name.replace('_', '-')} needs messages, and there are none"
                    raise InputError(f"{problem}; {self.messages_remedy}")


@dataclass(frozen=True)
class MessageOptions(TemplateOptions):
    """Options of the chat template, and options that turn prompts into messages."""

    messages_remedy: ClassVar[str] = "add --chat"
    chat: Annotated[bool, "Send each prompt as a user message."] = False
    system: Annotated[str | None, "System message, with --chat or messages."] = None

    def wrap_prompt(self, line: PromptLine) -> PromptLine:
        """Return a line with --chat and --system applied: with --chat a prompt becomes a user
        message; --system is put in front of messages that have no system message."""
        messages = line.messages
        if not messages:
            if not self.chat:
                return line
            with line.prefix_errors():
                if not isinstance(line.prompt, str) or not line.prompt:
                    raise InputError(
                        "--chat needs a prompt of text, not ids; give text, or leave out --chat"
                    )
            messages = [{"role": "user", "content": line.prompt}]
        if self.system is not None and messages[0]["role"] not in ("system", "developer"):
            messages = [{"role": "system", "content": self.system}, *messages]
        return replace(line, messages=messages)


@dataclass(frozen=True, slots=True)
class PromptWithParams:
    """A prompt with its sampling params."""

    number: int  # of the prompt or of its line in the file
    line: PromptLine
    given: dict[str, Any]  # the options that the user set, in the command or in the line
    params: SamplingParams  # made from `given`

    @property
    def num_outputs(self) -> int:
        return self.params.num_return_sequences


def make_task(number: int, line: PromptLine, options: dict[str, Any]) -> PromptWithParams:
    """Return a line with its sampling params. `options`: options of the command, which the line's
    options override. Raises InputError for an invalid option; if the line has options, the error
    names the line."""
    options = options | line.sampling
    with line.prefix_errors() if line.sampling else nullcontext():
        return PromptWithParams(number, line, options, SamplingParams(**options))


def make_tasks(lines: list[PromptLine], options: dict[str, Any]) -> list[PromptWithParams]:
    """Return each line with its number, from 0, and its sampling params."""
    return [make_task(number, line, options) for number, line in enumerate(lines)]


def read_tasks(
    file: Path, messages: MessageOptions, options: dict[str, Any]
) -> tuple[dict[int, PromptWithParams], int]:
    """Return the valid prompts of a file by line number, and the number of invalid lines. Print the
    errors of the invalid lines."""
    good, bad = dict[int, PromptWithParams](), 0
    for number, parse in number_lines(file, SAMPLING_KEYS):
        try:
            good[number] = make_task(number, messages.wrap_prompt(parse()), options)
        except ForetokenError as error:
            bad += 1
            print(f"error: {error}", file=sys.stderr)
    messages.require_used([task.line for task in good.values()])
    return good, bad


def make_keys(tasks: list[PromptWithParams], seed: int) -> list[tuple[int, int]]:
    """Return the random key of the first output of each prompt: (seed, number of outputs before
    it), or (the line's seed, 0) if the line has a seed."""
    keys: list[tuple[int, int]] = []
    num_before = 0
    for task in tasks:
        line_seed = task.line.seed
        keys.append((seed, num_before) if line_seed is None else (line_seed, 0))
        num_before += task.num_outputs
    return keys
