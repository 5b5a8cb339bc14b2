"""Prompts from an argument, a file or standard input, the messages and the template that make
prompts of them, and the sampling params of each.

A line of a file may hold messages instead of a prompt, and options of its own where a command
follows them; these win over the command line's.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, NamedTuple

from foretoken.cli.option import parse_json_option, require_extra
from foretoken.errors import ForetokenError, InputError, format_value, is_whole_number
from foretoken.sampling.checks import SEED
from foretoken.sampling.params import TEXT_OPTIONS, SamplingParams, suggest_name
from foretoken.storage.files import read_text
from foretoken.text.messages import Message, require_conversation

if TYPE_CHECKING:
    from foretoken.loading.target import TargetInfo
    from foretoken.speculator import Speculator

# What a line of a file may hold, by what a command follows
PROMPT_KEYS = ("prompt", "id")
MESSAGE_KEYS = (*PROMPT_KEYS, "messages")
SAMPLING_KEYS = (*MESSAGE_KEYS, "seed", *TEXT_OPTIONS)


@dataclass(frozen=True, slots=True)
class PromptLine:
    """A prompt or messages, with its own options, seed, and the id of its completion in JSON."""

    prompt: str | list[int]
    id: Any = None
    messages: list[Message] = field(default_factory=list[Message])
    sampling: dict[str, Any] = field(default_factory=dict[str, Any])
    seed: int | None = None
    location: str = ""  # in its file, for errors

    @contextmanager
    def prefix_errors(self) -> Iterator[None]:
        """Prefix errors raised within by the line's place."""
        try:
            yield
        except ForetokenError as error:
            if not self.location:
                raise
            raise type(error)(f"{self.location}: {error}") from None


def read_prompts(
    argument: str | None, file: Path | None, keys: tuple[str, ...] = PROMPT_KEYS
) -> list[PromptLine]:
    """Read the argument, the lines of a file, or standard input as one prompt."""
    if argument is not None and file is not None:
        raise InputError("give a prompt or --prompt-file, not both")
    if file is not None:
        return [parsed() for _, parsed in number_lines(file, keys)]
    if argument is not None:
        return [PromptLine(prompt=argument)]
    try:
        text = "" if sys.stdin is None or sys.stdin.isatty() else sys.stdin.read()
    except UnicodeDecodeError as error:
        raise InputError(f"standard input is no text: {error}") from None
    if not text:
        raise InputError("no prompt; give one as an argument, in a file or on standard input")
    return [PromptLine(prompt=text.removesuffix("\n"))]


def read_first_prompts(file: Path, limit: int | None) -> list[PromptLine]:
    """Read the first `limit` prompts of a file; None: all."""
    if limit is not None and limit < 1:
        raise InputError(f"limit is {limit}; give the number of prompts to use, 1 or more")
    return read_prompts(None, file)[:limit]


def number_lines(file: Path, keys: tuple[str, ...]) -> list[tuple[int, Callable[[], PromptLine]]]:
    """Return the lines of a file that are not empty, with their numbers from 1.

    Each is a function that parses the line; it raises InputError for a bad one.
    """
    rows = _read_rows(file)
    filled = [(number, row) for number, row in enumerate(rows, 1) if row.strip()]
    if not filled:
        raise InputError(f"{file} holds no prompt; give one on each line")
    if file.suffix not in (".jsonl", ".json", ".parquet"):
        return [(number, partial(PromptLine, prompt=row)) for number, row in filled]
    return [(n, partial(_parse_line, f"{file}, line {n}", row, keys)) for n, row in filled]


def _read_rows(file: Path) -> list[str]:
    """Return the lines of a file; of a Parquet file its rows, as JSON."""
    if file.suffix != ".parquet":
        return [row.removesuffix("\r") for row in read_text(file, "prompts").split("\n")]
    return import_parquet().read_json_lines(file)


def import_parquet():  # not annotated: the type is the module's
    """Import what reads and writes Parquet files, which comes with an extra."""
    with require_extra("ray"):
        from foretoken.cluster import parquet_files
    return parquet_files


def _parse_line(location: str, row: str, keys: tuple[str, ...]) -> PromptLine:
    with PromptLine("", location=location).prefix_errors():
        options = parse_json_option("it", row)
        if not isinstance(options, dict):
            raise InputError('it is no object; give {"prompt": text or ids, "id": anything}')
        for key in options:
            require_key(key, keys)
        if ("prompt" in options) == ("messages" in options):
            raise InputError("give a prompt or messages, one of them")
        id, seed = options.pop("id", None), options.pop("seed", None)
        prompt, messages = options.pop("prompt", ""), options.pop("messages", None)
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
        return PromptLine(prompt, id, messages or [], options, seed, location)


def require_key(key: str, keys: tuple[str, ...]) -> None:
    """Raise InputError for an option of a text that is not among these."""
    if key not in keys:
        near = suggest_name(key, keys)
        remedy = f"did you mean {near}?" if near else f"give some of {', '.join(keys)}"
        raise InputError(f"{key[:40]} is unknown here; {remedy}")


def to_model_prompt(line: PromptLine, target: Speculator | TargetInfo) -> str | list[int]:
    """Return the prompt; without a tokenizer, its text is read as ids with commas between."""
    if isinstance(line.prompt, list) or target.tokenizer is not None:
        return line.prompt
    try:
        return [int(part) for part in line.prompt.split(",") if part.strip()]
    except ValueError:
        raise InputError(
            f"the model has no tokenizer, and {line.prompt.strip()[:40]!r} is not "
            "ids separated by commas; give --tokenizer, a folder or hub id with one"
        ) from None


class ChatTemplate(NamedTuple):
    """A chat template: Jinja text, None for the tokenizer's own, and its variables."""

    text: str | None = None
    variables: dict[str, Any] | None = None

    def make_prompt(self, line: PromptLine, target: Speculator | TargetInfo) -> str | list[int]:
        """Return a line's prompt for the model; messages become ids."""
        if not line.messages:
            return to_model_prompt(line, target)
        from foretoken.text import chat  # late: torch takes seconds

        return chat.encode_chat(line.messages, target.tokenizer, self.text, self.variables)

    def make_prompts(
        self, lines: Iterable[PromptLine], target: Speculator | TargetInfo
    ) -> list[str | list[int]]:
        """Return the prompts of lines. Raises InputError for the first that cannot be made."""
        made: list[str | list[int]] = []
        for line in lines:
            with line.prefix_errors():
                made.append(self.make_prompt(line, target))
        return made


@dataclass(frozen=True)
class TemplateOptions:
    """Options of the chat template."""

    panel: ClassVar[str] = "Messages"
    chat_template: Annotated[
        Path | None, "File with a Jinja template. Default: the tokenizer's own."
    ] = None
    chat_template_kwargs: Annotated[
        str | None, 'Variables of the template as JSON: {"enable_thinking": false}.'
    ] = None

    @property
    def template(self) -> ChatTemplate:
        """Read the file and the variables."""
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


@dataclass(frozen=True)
class MessageOptions(TemplateOptions):
    """The same, and options that make messages of prompts."""

    chat: Annotated[bool, "Send each prompt as a user's message, for an assistant's reply."] = False
    system: Annotated[str | None, "System message before each prompt."] = None

    def require_used(self, lines: list[PromptLine]) -> None:
        """Raise InputError for options that no line has a use for."""
        if not any(line.messages for line in lines):
            for name in ("system", "chat_template", "chat_template_kwargs"):
                if getattr(self, name) is not None:
                    flag = f"--{name.replace('_', '-')}"
                    raise InputError(f"{flag} is for messages, and there are none; add --chat")

    def wrap_prompt(self, line: PromptLine) -> PromptLine:
        """Return a line with messages: its own, or its prompt with --chat, after the system's."""
        messages = line.messages
        if not messages:
            if not self.chat:
                return line
            with line.prefix_errors():
                if not isinstance(line.prompt, str) or not line.prompt:
                    raise InputError("--chat takes a text or messages; give one, or leave it out")
            messages = [{"role": "user", "content": line.prompt}]
        if self.system is not None and messages[0]["role"] not in ("system", "developer"):
            messages = [{"role": "system", "content": self.system}, *messages]
        return replace(line, messages=messages)


@dataclass(frozen=True, slots=True)
class PromptWithParams:
    """A prompt with its number, and its options as they were given and as sampling params."""

    number: int
    line: PromptLine
    given: dict[str, Any]
    params: SamplingParams

    @property
    def num_outputs(self) -> int:
        return self.params.num_return_sequences


def make_task(number: int, line: PromptLine, options: dict[str, Any]) -> PromptWithParams:
    """Return a line's task. An error in its own options says where it stands."""
    options = options | line.sampling
    with line.prefix_errors() if line.sampling else nullcontext():
        return PromptWithParams(number, line, options, SamplingParams(**options))


def make_tasks(lines: list[PromptLine], options: dict[str, Any]) -> list[PromptWithParams]:
    """Make a task of each line."""
    return [make_task(number, line, options) for number, line in enumerate(lines)]


def read_tasks(
    file: Path, messages: MessageOptions, options: dict[str, Any]
) -> tuple[dict[int, PromptWithParams], int]:
    """Read the tasks of a file, by their lines' numbers; tell and count the bad lines."""
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
    """Return the random key of each prompt's first text.

    It is the seed and the number of texts before it, or the line's own seed and 0.
    """
    keys: list[tuple[int, int]] = []
    num_before = 0
    for task in tasks:
        line_seed = task.line.seed
        keys.append((seed, num_before) if line_seed is None else (line_seed, 0))
        num_before += task.num_outputs
    return keys
