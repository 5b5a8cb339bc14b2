"""A chat session: answers one prompt, the lines of a pipe, or lines typed on a terminal.

On a terminal a line that begins with "/" is a command, and Ctrl-C stops a reply, not the program.
"""

from __future__ import annotations

import json
import re
import signal
import sys
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Any, NamedTuple

import typer
from rich.console import Console
from rich.text import Text

from foretoken.cli import token_styles
from foretoken.cli.command import hold_messages, release_messages
from foretoken.cli.completion_output import format_figures
from foretoken.cli.option import DEFAULT_ANSWER_TOKENS
from foretoken.cli.prompts import require_key
from foretoken.cli.render import open_console, print_labelled
from foretoken.cli.reply import ChatReply, ReplyError, ReplyPart
from foretoken.errors import ForetokenError, InputError
from foretoken.sampling.params import MAX_NEW_TOKENS, SAMPLING_OPTIONS, SamplingParams
from foretoken.storage.files import parse_json, read_text, write_atomically
from foretoken.text.decoding import REPLACEMENT_CHARACTER
from foretoken.text.messages import require_conversation

if TYPE_CHECKING:
    from foretoken.cli.local_model import LocalModel
    from foretoken.cli.remote_model import RemoteModel

FATE_STYLES = {
    "accepted": token_styles.ACCEPTED_STYLE,
    "corrected": token_styles.CORRECTED_STYLE,
    "bonus": token_styles.CORRECTED_STYLE,
}
CONTROL_CHARACTERS = re.compile(
    r"[\x00-\x08\x0b-\x1f\x7f-\x9f]"
)  # may begin escape sequences of a terminal
SETTABLE_OPTIONS = tuple(
    name for name, each in SAMPLING_OPTIONS.items() if each.panel and each.one_text
)
MIN_PACE_TOKENS = 8  # the speed of a shorter reply is not reported
MIN_REPORTED_SPEEDUP = 1.05  # a smaller speed-up is within the noise
HELP_COLUMN_CHARS = 22  # of the first column of /help
HEAD_ROLES = ("system", "developer")  # of messages before the first turn
Message = dict[str, Any]


class Printer:
    """Prints replies on standard output, part by part. If `coloured`, draft tokens have colours."""

    def __init__(self, *, coloured: bool) -> None:
        self.console = Console(highlight=False)
        self.coloured, self._terminal = coloured, sys.stdout.isatty()
        self._marks = self.console.color_system is None or self.console.no_color
        # Characters of tokens that are not printed yet, each with its style
        self._pending: deque[tuple[str, str]] = deque()
        self.begun = False  # whether a part of the current reply was printed

    @property
    def legend(self) -> Text:
        return token_styles.format_legend(marks=self._marks, rejected=False)

    def put(self, part: ReplyPart) -> None:
        """Print the next part of a reply."""
        text = self._strip_control(part.text)
        if text:
            self.begun = True
            hold_messages()
        if not self.coloured:
            print(text, end="", flush=True)
            return
        for token in part.tokens:
            style = FATE_STYLES.get(token.fate, "")
            spelled = self._strip_control(token.text)
            self._pending += ((each, style) for each in spelled if each != REPLACEMENT_CHARACTER)
        for style, letters in groupby(text, self._pop_style):
            spelled = "".join(letters)
            marked = self._marks and style and not spelled.isspace()
            displayed = token_styles.add_marks(spelled, style) if marked else spelled
            self.console.print(Text(displayed, style), end="", soft_wrap=True)

    def end(self) -> None:
        """End the reply's last line, and print the log messages delayed during the reply."""
        print(flush=True)
        release_messages()
        self._pending.clear()
        self.begun = False

    def _strip_control(self, text: str) -> str:
        return CONTROL_CHARACTERS.sub("", text) if self._terminal else text

    def _pop_style(self, letter: str) -> str:
        """Return the style of the first pending character that equals `letter`, or "" if there is
        none. Remove this character and those before it, because the printed text may lack some of
        the pending characters. letter: the next character of the printed text."""
        if not any(each == letter for each, _ in self._pending):
            return ""
        while self._pending[0][0] != letter:
            self._pending.popleft()
        return self._pending.popleft()[1]


@dataclass(slots=True)
class Session:
    """A chat session: a source of replies, the sampling options of the next reply, and the
    conversation so far."""

    source: LocalModel | RemoteModel
    options: dict[str, Any]
    printer: Printer
    messages: list[Message] | None = None  # None: plain text is continued
    reply: ChatReply | None = None  # the last reply
    num_prompts: int = 0
    on_terminal: bool = False

    def answer_once(self, text: str) -> None:
        """Answer one prompt. Exit with code 1 if the reply fails."""
        try:
            self._answer(text)
        except ReplyError as error:
            _print_message(f"error: {error}")
            raise typer.Exit(1) from None

    def answer_lines(self) -> None:
        """Answer each line of standard input. Exit with code 1 at the end if any reply failed."""
        count = failed = 0
        for line in _read_lines():
            count += 1
            try:
                self._answer(line)
            except ForetokenError as error:
                failed += 1
                _print_message(f"error: line {count}: {error}")
        if not count:
            raise InputError("standard input is empty; give a line for each prompt, or --quick")
        if failed:
            raise typer.Exit(1)

    def run_interactive(self) -> None:
        """Answer lines typed on the terminal until Ctrl-D. A line that begins with "/" is a
        command; "//" begins a prompt that starts with a slash."""
        self.on_terminal = True
        _print_message(f"{self.source.name}; /help lists the commands, Ctrl-D leaves")
        if self.printer.coloured:
            self.printer.console.print(self.printer.legend)
        with suppress(EOFError):
            while True:
                line = _read_prompt()
                try:
                    if line.startswith("/") and not line.startswith("//"):
                        self._run_command(line[1:])
                    else:
                        self._answer(line[1:] if line.startswith("//") else line)
                        self._print_speed()
                except (ForetokenError, OSError) as error:
                    _print_message(f"error: {error}")
                except KeyboardInterrupt:
                    _print_message(f"stopped after {self.reply.tokens if self.reply else 0} tokens")
        _print_message("")

    def _answer(self, text: str) -> None:
        """Print the reply to `text` while it is generated. Add `text` and the reply to the
        conversation, even if the reply is interrupted."""
        prompt_messages = [*(self.messages or []), {"role": "user", "content": text}]
        prompt = text if self.messages is None else prompt_messages
        options = self.source.get_default_options(messages=self.messages is not None) | self.options
        # Do not compare the first reply's speed: the backend's first forward passes are slow
        plain = self.source.get_plain_seconds(options) if self.num_prompts else None
        reply, start = ChatReply(plain_seconds_per_token=plain), perf_counter()
        self.reply = reply
        self.num_prompts += 1
        try:
            with closing(
                self.source.stream_reply(prompt, self.options, self.num_prompts - 1, reply)
            ) as parts:
                for part in parts:
                    reply.first_token_seconds = reply.first_token_seconds or perf_counter() - start
                    reply.text += part.text
                    self.printer.put(part)
        except BaseException:
            if self.printer.begun:
                self.printer.end()
            raise
        else:
            self.printer.end()
        finally:
            reply.seconds = perf_counter() - start
            if self.messages is not None and (reply.text or reply.finish_reason == "stop"):
                self.messages = [*prompt_messages, {"role": "assistant", "content": reply.text}]
        self._print_limit(reply)

    def _print_limit(self, reply: ChatReply) -> None:
        """Print a message if the context length or, in a conversation, max_new_tokens cut the reply
        off. If lines come from a pipe and the user set max_new_tokens, that limit is intended, so
        nothing is printed."""
        default = MAX_NEW_TOKENS if self.messages is None else DEFAULT_ANSWER_TOKENS
        max_new_tokens = self.options.get("max_new_tokens", default)
        if reply.finish_reason != "length":
            return
        cut = f"the reply is cut off after {reply.tokens} tokens"
        if reply.tokens < max_new_tokens:
            _print_message(f"{cut}: the context is full")
        elif self.messages is not None and self.on_terminal:
            _print_message(f"{cut}; /set max_new_tokens allows more")
        elif self.messages is not None and "max_new_tokens" not in self.options:
            _print_message(f"{cut}; --max-new-tokens allows more")

    def _print_speed(self) -> None:
        """Print the speed of the last reply. If the reply was clearly faster than plain decoding,
        also print the ratio of the two speeds."""
        reply = self.reply
        if reply is None or reply.tokens < MIN_PACE_TOKENS:
            return
        seconds_per_token = (reply.seconds - reply.first_token_seconds) / (reply.tokens - 1)
        plain = reply.plain_seconds_per_token
        gain = plain / seconds_per_token if plain else 0.0
        faster = (
            f", about {gain:.2f} times as fast as plain decoding"
            if gain >= MIN_REPORTED_SPEEDUP
            else ""
        )
        _print_message(
            f"{reply.tokens} tokens, the first after {reply.first_token_seconds:.2f} s, "
            f"then {1 / seconds_per_token:.0f} tokens/s{faster}"
        )

    def _run_command(self, line: str) -> None:
        name, _, argument = line.partition(" ")
        commands, argument = self._list_commands(), argument.strip()
        if name not in commands:
            raise InputError(f"/{name} is not a command; /help lists all commands")
        hint, _, run = commands[name]
        if (argument and not hint) or (not argument and hint == "FILE"):
            raise InputError(f"give the command as /{name} {hint}".rstrip())
        if answer := run(argument):
            _print_message(answer)

    def _list_commands(self) -> dict[str, SlashCommand]:
        conversation = {
            "system": SlashCommand(
                "[TEXT]", "Set the system message; without TEXT remove it.", self._set_system
            ),
            "undo": SlashCommand("", "Remove the last turn.", self._undo),
            "reset": SlashCommand("", "Remove all turns.", self._reset),
            "save": SlashCommand("FILE", "Save the messages as JSON.", self._save),
            "load": SlashCommand("FILE", "Replace the messages by those in FILE.", self._load),
        }
        return (conversation if self.messages is not None else {}) | {
            "set": SlashCommand(
                "[NAME VALUE]",
                "Set an option; without VALUE reset it; without NAME list all options.",
                self._set,
            ),
            "stats": SlashCommand("", "Show statistics of the last reply.", self._format_stats),
            "help": SlashCommand("", "List these commands.", self._print_help),
            "exit": SlashCommand("", "Leave; so does Ctrl-D.", self._exit),
        }

    def _set_system(self, text: str) -> str:
        turns = [message for message in self.messages or [] if message["role"] not in HEAD_ROLES]
        self.messages = [*([{"role": "system", "content": text}] * bool(text)), *turns]
        return "the system message is set" if text else "there is no system message"

    def _undo(self, _: str) -> str:
        messages = self.messages or []
        users = [i for i, message in enumerate(messages) if message["role"] == "user"]
        if not users:
            raise InputError("there is no turn to remove; give a prompt first")
        self.messages = messages[: users[-1]]
        return f"removed: {' '.join(str(messages[users[-1]]['content']).split())[:60]}"

    def _reset(self, _: str) -> str:
        self.messages = [each for each in self.messages or [] if each["role"] in HEAD_ROLES]
        return "all turns are removed"

    def _save(self, file: str) -> str:
        messages, path = self.messages or [], Path(file).expanduser()
        write_atomically(path, json.dumps(messages, ensure_ascii=False, indent=1).encode() + b"\n")
        return f"saved {len(messages)} messages in {path}"

    def _load(self, file: str) -> str:
        path = Path(file).expanduser()
        try:
            messages = parse_json(read_text(path, "messages"))
            require_conversation(messages)
        except ValueError as error:  # InputError is one
            raise InputError(f"{path} is not a valid conversation: {error}") from None
        self.messages = messages
        return f"loaded {len(messages)} messages from {path}"

    def _set(self, argument: str) -> str:
        """Run "/set NAME VALUE": set an option of the following replies; prompt files have the same
        names. Without VALUE reset the option; without NAME list all options and their values."""
        name, _, value = re.sub(r"^(\w+)\s*=\s*", r"\1 ", argument).partition(" ")
        if not name:
            rows = [
                (each, self._format_value(each))
                for each in SETTABLE_OPTIONS
                if self._accepts_option(each)
            ]
            print_labelled(open_console(), rows, max(len(each) for each, _ in rows) + 2)
            return ""
        require_key(name, SETTABLE_OPTIONS)
        options = {each: v for each, v in self.options.items() if each != name}
        if value:
            try:
                options[name] = parse_json(value)
            except ValueError:  # strings need no quotation marks
                options[name] = value.strip()
        self.source.require(options)
        self.options = options
        return f"{name} is {self._format_value(name)}"

    def _format_value(self, name: str) -> str:
        """Return an option's value for the next reply, as JSON."""
        defaults = self.source.get_default_options(messages=self.messages is not None)
        unset = getattr(SamplingParams(), name)
        return json.dumps({name: unset, **defaults, **self.options}[name], ensure_ascii=False)

    def _accepts_option(self, name: str) -> bool:
        """Return whether the source of replies supports an option."""
        with suppress(ForetokenError):
            self.source.require({name: getattr(SamplingParams(), name)})
            return True
        return False

    def _format_stats(self, _: str) -> str:
        reply = self.reply
        if reply is None:
            raise InputError("there is no reply yet; give a prompt first")
        alpha = sum(reply.overlaps) / len(reply.overlaps) if reply.overlaps else None
        away = reply.bias / max(1, reply.tokens)
        bias = f", {away:.4f} from the target's distribution (mean over tokens)" if away else ""
        figures = format_figures(reply.tokens, reply.num_forwards, alpha)
        return f"{figures}{bias}, {reply.seconds:.2f} s"

    def _print_help(self, _: str) -> str:
        rows = [
            (f"/{name} {each.argument}", each.help) for name, each in self._list_commands().items()
        ]
        rows.append(("//...", "A prompt that begins with a slash."))
        rows.append(("...\\", "The prompt continues in the next line."))
        print_labelled(open_console(), rows, HELP_COLUMN_CHARS)
        return ""

    def _exit(self, _: str) -> str:
        raise EOFError


class SlashCommand(NamedTuple):
    """A slash command of a terminal session."""

    argument: str  # name of the argument, in brackets if optional; "": no argument
    help: str
    run: Callable[[str], str]  # takes the argument, returns a message to print or ""


def _read_lines() -> Iterator[str]:
    """Yield the lines of standard input that are not empty."""
    if sys.stdin is None:
        return
    try:
        for line in sys.stdin:
            if line.strip():
                yield line.removesuffix("\n")
    except UnicodeDecodeError as error:
        raise InputError(f"standard input is not valid text: {error}") from None


def _read_prompt() -> str:
    """Read a prompt. If a line ends with a backslash, the prompt continues in the next line.

    Raises EOFError after Ctrl-D, or Ctrl-C on an empty line.
    """
    text = ""
    while True:
        try:
            text += input(("... " if text else "> ") if sys.stdout.isatty() else "")
        except KeyboardInterrupt:
            _print_message("")
            if not text and not _has_typed_text():
                raise EOFError from None
            text = ""
            continue
        if text.endswith("\\"):
            text = f"{text[:-1]}\n"
        elif text.strip():
            return text
        else:
            text = ""


def _has_typed_text() -> bool:
    """Return whether the line being typed is not empty."""
    editor = _import_readline()
    return editor is not None and bool(editor.get_line_buffer())


def _import_readline():  # not annotated: the type is the module's
    """Import readline, which enables line editing, and return it; None if Python lacks it."""
    try:
        import readline
    except ImportError:
        return None
    return readline


def _print_message(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def run_session(
    source: LocalModel | RemoteModel,
    options: dict[str, Any],
    *,
    show_tokens: bool,
    quick: str | None,
    messages: list[Message] | None,
) -> None:
    """Run a chat session.

    Args:
        source: The model that replies.
        options: Sampling options of the replies.
        show_tokens: Print draft tokens in colour.
        quick: Answer only this prompt; None: answer the lines of standard input.
        messages: First messages of the conversation; None: continue plain text instead.
    """
    session = Session(source, options, Printer(coloured=show_tokens), messages)
    if quick is not None:
        session.answer_once(quick)
    elif sys.stdin is not None and sys.stdin.isatty():
        _import_readline()
        # SIGTERM ends the program; Ctrl-C stops only the current reply
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(130))
        session.run_interactive()
    else:
        session.answer_lines()
