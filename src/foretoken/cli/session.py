"""A chat session: one prompt, the lines of a pipe, or lines typed on a terminal.

On a terminal a line that begins with "/" is a command, and Ctrl-C ends an answer, not the program.
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

from foretoken.cli import fates
from foretoken.cli.answer import figures
from foretoken.cli.command import hold_messages, release_messages
from foretoken.cli.option import ANSWER_TOKENS
from foretoken.cli.prompts import require_key
from foretoken.cli.render import labelled, page
from foretoken.cli.reply import ChatReply, ReplyPart, TextError
from foretoken.errors import ForetokenError, InputError
from foretoken.sampling.params import MAX_NEW_TOKENS, OPTIONS, SamplingParams
from foretoken.storage.files import parse_json, read_text, write
from foretoken.text.decoding import REPLACEMENT
from foretoken.text.messages import require

if TYPE_CHECKING:
    from foretoken.cli.local import LocalModel
    from foretoken.cli.remote import RemoteModel

STYLES = {"accepted": fates.ACCEPTED, "corrected": fates.CORRECTED, "bonus": fates.CORRECTED}
CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")  # characters a terminal may take for orders
SETTABLE = tuple(name for name, each in OPTIONS.items() if each.panel and each.one_text)
SHORT = 8  # tokens whose pace says little
PAYS = 1.05  # times plain decoding's pace from which on it is told: less is within its noise
WIDTH = 22  # of the first column of /help
HEADS = ("system", "developer")  # roles of messages that come before the turns
Message = dict[str, Any]


class Printer:
    """Prints replies on standard output, part by part; draft tokens in colour where asked for."""

    def __init__(self, *, coloured: bool) -> None:
        self.console = Console(highlight=False)
        self.coloured, self._terminal = coloured, sys.stdout.isatty()
        self._marks = self.console.color_system is None or self.console.no_color
        self._ahead: deque[tuple[str, str]] = deque()  # characters of tokens, with their styles
        self.begun = False

    @property
    def legend(self) -> Text:
        return fates.legend(marks=self._marks, rejected=False)

    def put(self, part: ReplyPart) -> None:
        """Print the next part of the text."""
        text = self._shown(part.text)
        if text:
            self.begun = True
            hold_messages()
        if not self.coloured:
            print(text, end="", flush=True)
            return
        for token in part.tokens:
            style = STYLES.get(token.fate, "")
            spelled = self._shown(token.text)
            self._ahead += ((each, style) for each in spelled if each != REPLACEMENT)
        for style, letters in groupby(text, self._style):
            spelled = "".join(letters)
            marked = self._marks and style and not spelled.isspace()
            displayed = fates.mark(spelled, style) if marked else spelled
            self.console.print(Text(displayed, style), end="", soft_wrap=True)

    def end(self) -> None:
        """End the text."""
        print(flush=True)
        release_messages()
        self._ahead.clear()
        self.begun = False

    def _shown(self, text: str) -> str:
        return CONTROL.sub("", text) if self._terminal else text

    def _style(self, letter: str) -> str:
        """Return the next character's style, passing over what is no part of the text; none where
        no token has it."""
        if not any(each == letter for each, _ in self._ahead):
            return ""
        while self._ahead[0][0] != letter:
            self._ahead.popleft()
        return self._ahead.popleft()[1]


@dataclass(slots=True)
class Session:
    """A source, options of the next text, and the conversation; None for plain text."""

    source: LocalModel | RemoteModel
    options: dict[str, Any]
    printer: Printer
    messages: list[Message] | None = None
    reply: ChatReply | None = None  # the last one
    asked: int = 0
    on_terminal: bool = False

    def one(self, text: str) -> None:
        """Answer one prompt. Exit code 1 where its text fails."""
        try:
            self._answer(text)
        except TextError as error:
            _tell(f"error: {error}")
            raise typer.Exit(1) from None

    def piped(self) -> None:
        """Answer standard input, line by line. Exit code 1 where one of them fails."""
        count = failed = 0
        for line in _lines():
            count += 1
            try:
                self._answer(line)
            except ForetokenError as error:
                failed += 1
                _tell(f"error: line {count}: {error}")
        if not count:
            raise InputError("standard input is empty; give a line for each prompt, or --quick")
        if failed:
            raise typer.Exit(1)

    def typed(self) -> None:
        """Answer what is typed until it ends; "//" begins a prompt with a slash."""
        self.on_terminal = True
        _tell(f"{self.source.name}; /help lists the commands, Ctrl-D leaves")
        if self.printer.coloured:
            self.printer.console.print(self.printer.legend)
        with suppress(EOFError):
            while True:
                line = _typed()
                try:
                    if line.startswith("/") and not line.startswith("//"):
                        self._command(line[1:])
                    else:
                        self._answer(line[1:] if line.startswith("//") else line)
                        self._tell_speed()
                except (ForetokenError, OSError) as error:
                    _tell(f"error: {error}")
                except KeyboardInterrupt:
                    _tell(f"stopped after {self.reply.tokens if self.reply else 0} tokens")
        _tell("")

    def _answer(self, text: str) -> None:
        """Ask, and print the reply; one that broke off is kept too."""
        asked = [*(self.messages or []), {"role": "user", "content": text}]
        prompt = text if self.messages is None else asked
        options = self.source.defaults(messages=self.messages is not None) | self.options
        # The first answer's time is also that of the runtime's first passes
        plain = self.source.plain_seconds(options) if self.asked else None
        reply, start = ChatReply(plain=plain), perf_counter()
        self.reply = reply
        self.asked += 1
        try:
            with closing(self.source.parts(prompt, self.options, self.asked - 1, reply)) as parts:
                for part in parts:
                    reply.waited = reply.waited or perf_counter() - start
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
                self.messages = [*asked, {"role": "assistant", "content": reply.text}]
        self._tell_limit(reply)

    def _tell_limit(self, reply: ChatReply) -> None:
        """Say where a text was cut off: by the context, and in a conversation by the limit, but
        for the user's own in a pipe."""
        default = MAX_NEW_TOKENS if self.messages is None else ANSWER_TOKENS
        most = self.options.get("max_new_tokens", default)
        if reply.finish_reason != "length":
            return
        cut = f"the text is cut off after {reply.tokens} tokens"
        if reply.tokens < most:
            _tell(f"{cut}: there is room for no more")
        elif self.messages is not None and self.on_terminal:
            _tell(f"{cut}; /set max_new_tokens allows more")
        elif self.messages is not None and "max_new_tokens" not in self.options:
            _tell(f"{cut}; --max-new-tokens allows more")

    def _tell_speed(self) -> None:
        """Say how fast the answer was, and how that compares with plain decoding as measured."""
        reply = self.reply
        if reply is None or reply.tokens < SHORT:
            return
        each = (reply.seconds - reply.waited) / (reply.tokens - 1)
        plain = reply.plain
        gain = plain / each if plain else 0.0
        faster = f", about {gain:.2f} times plain decoding's pace" if gain >= PAYS else ""
        _tell(
            f"{reply.tokens} tokens, the first after {reply.waited:.2f} s, "
            f"then {1 / each:.0f} a second{faster}"
        )

    def _command(self, line: str) -> None:
        name, _, argument = line.partition(" ")
        commands, argument = self._commands(), argument.strip()
        if name not in commands:
            raise InputError(f"/{name} is no command; /help lists all")
        hint, _, run = commands[name]
        if (argument and not hint) or (not argument and hint == "FILE"):
            raise InputError(f"the command is /{name} {hint}".rstrip())
        if answer := run(argument):
            _tell(answer)

    def _commands(self) -> dict[str, SlashCommand]:
        talking = {
            "system": SlashCommand("[TEXT]", "Set the system message; or none.", self._system),
            "undo": SlashCommand("", "Take the last turn back.", self._undo),
            "reset": SlashCommand("", "Take all turns back.", self._reset),
            "save": SlashCommand("FILE", "Save the messages as JSON.", self._save),
            "load": SlashCommand("FILE", "Load messages in place of these.", self._load),
        }
        return (talking if self.messages is not None else {}) | {
            "set": SlashCommand(
                "[NAME VALUE]",
                "Set an option, or without VALUE unset it; alone: list all.",
                self._set,
            ),
            "stats": SlashCommand("", "Show figures of the last text.", self._stats),
            "help": SlashCommand("", "List these commands.", self._help),
            "exit": SlashCommand("", "Leave; so does Ctrl-D.", self._exit),
        }

    def _system(self, text: str) -> str:
        turns = [message for message in self.messages or [] if message["role"] not in HEADS]
        self.messages = [*([{"role": "system", "content": text}] * bool(text)), *turns]
        return "the system's message is set" if text else "there is no system's message"

    def _undo(self, _: str) -> str:
        messages = self.messages or []
        users = [i for i, message in enumerate(messages) if message["role"] == "user"]
        if not users:
            raise InputError("there is no turn to take back")
        self.messages = messages[: users[-1]]
        return f"taken back: {' '.join(str(messages[users[-1]]['content']).split())[:60]}"

    def _reset(self, _: str) -> str:
        self.messages = [each for each in self.messages or [] if each["role"] in HEADS]
        return "the conversation begins anew"

    def _save(self, file: str) -> str:
        messages, path = self.messages or [], Path(file).expanduser()
        write(path, json.dumps(messages, ensure_ascii=False, indent=1).encode() + b"\n")
        return f"{len(messages)} messages are in {path}"

    def _load(self, file: str) -> str:
        path = Path(file).expanduser()
        try:
            messages = parse_json(read_text(path, "messages"))
            require(messages)
        except ValueError as error:  # InputError is one
            raise InputError(f"{path} holds no conversation: {error}") from None
        self.messages = messages
        return f"{len(messages)} messages are from {path}"

    def _set(self, argument: str) -> str:
        """Set an option for the texts that follow, as a line of a file of prompts has it; list
        those that can be set, with their values."""
        name, _, value = re.sub(r"^(\w+)\s*=\s*", r"\1 ", argument).partition(" ")
        if not name:
            rows = [(each, self._value(each)) for each in SETTABLE if self._takes(each)]
            labelled(page(), rows, max(len(each) for each, _ in rows) + 2)
            return ""
        require_key(name, SETTABLE)
        options = {each: v for each, v in self.options.items() if each != name}
        if value:
            try:
                options[name] = parse_json(value)
            except ValueError:  # a text needs no quotation marks
                options[name] = value.strip()
        self.source.require(options)
        self.options = options
        return f"{name} is {self._value(name)}"

    def _value(self, name: str) -> str:
        """Return an option's value for the next text, as JSON."""
        defaults = self.source.defaults(messages=self.messages is not None)
        unset = getattr(SamplingParams(), name)
        return json.dumps({name: unset, **defaults, **self.options}[name], ensure_ascii=False)

    def _takes(self, name: str) -> bool:
        """Tell whether the source has this option."""
        with suppress(ForetokenError):
            self.source.require({name: getattr(SamplingParams(), name)})
            return True
        return False

    def _stats(self, _: str) -> str:
        reply = self.reply
        if reply is None:
            raise InputError("there is no text yet; write one first")
        alpha = sum(reply.overlaps) / len(reply.overlaps) if reply.overlaps else None
        away = reply.bias / max(1, reply.tokens)
        bias = f", {away:.4f} from the target's distribution (mean of its tokens)" if away else ""
        return f"{figures(reply.tokens, reply.calls, alpha)}{bias}, {reply.seconds:.2f} s"

    def _help(self, _: str) -> str:
        rows = [(f"/{name} {each.argument}", each.help) for name, each in self._commands().items()]
        rows.append(("//...", "A prompt that begins with a slash."))
        rows.append(("...\\", "The prompt goes on in the next line."))
        labelled(page(), rows, WIDTH)
        return ""

    def _exit(self, _: str) -> str:
        raise EOFError


class SlashCommand(NamedTuple):
    """A command of the terminal: its argument, help, and function, which returns a message."""

    argument: str  # "" for none, in brackets where it may be left out
    help: str
    run: Callable[[str], str]


def _lines() -> Iterator[str]:
    """Yield the lines of standard input that are not empty."""
    if sys.stdin is None:
        return
    try:
        for line in sys.stdin:
            if line.strip():
                yield line.removesuffix("\n")
    except UnicodeDecodeError as error:
        raise InputError(f"standard input is no text: {error}") from None


def _typed() -> str:
    """Read a prompt, joining lines that end with a backslash.

    EOFError at the end: Ctrl-D, or Ctrl-C on an empty line.
    """
    text = ""
    while True:
        try:
            text += input(("... " if text else "> ") if sys.stdout.isatty() else "")
        except KeyboardInterrupt:
            _tell("")
            if not text and not _begun():
                raise EOFError from None
            text = ""
            continue
        if text.endswith("\\"):
            text = f"{text[:-1]}\n"
        elif text.strip():
            return text
        else:
            text = ""


def _begun() -> bool:
    """Return True if the line being typed holds text."""
    editor = _line_editor()
    return editor is not None and bool(editor.get_line_buffer())


def _line_editor():  # not annotated: the type is the module's
    """Import readline, which edits the lines that are typed; None where there is none."""
    try:
        import readline
    except ImportError:
        return None
    return readline


def _tell(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def run(
    source: LocalModel | RemoteModel,
    options: dict[str, Any],
    *,
    show_tokens: bool,
    quick: str | None,
    messages: list[Message] | None,
) -> None:
    """Answer `quick`, or standard input. messages: a conversation's first; None for plain text."""
    session = Session(source, options, Printer(coloured=show_tokens), messages)
    if quick is not None:
        session.one(quick)
    elif sys.stdin is not None and sys.stdin.isatty():
        _line_editor()
        # unlike Ctrl-C it ends more than an answer
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(130))
        session.typed()
    else:
        session.piped()
