"""A chat session: one prompt, the lines of a pipe, or lines typed on a terminal.

On a terminal a line that begins with "/" is a command, and Ctrl-C ends an answer, not the program.
"""

from __future__ import annotations

import json
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, NamedTuple, TypeVar, get_args, get_type_hints

import typer

from foretoken.cli.render import Printer, labelled, page
from foretoken.cli.sampling_options import OneAnswer
from foretoken.cli.sources import ChatReply, ChatSource, TextError
from foretoken.errors import ForetokenError, InputError, shown
from foretoken.sampling.params import MAX_NEW_TOKENS, meant
from foretoken.storage.files import parse_json, read_text, write
from foretoken.text import chat

W = TypeVar("W", bound=OneAnswer)
SWITCH = {"on": True, "true": True, "off": False, "false": False}
NUMBERS: dict[Any, tuple[Any, str]] = {int: (int, "a whole number"), float: (float, "a number")}
Message = dict[str, Any]
SYSTEM = ("system", "developer")
WIDTH = 22  # of the first column of /help and /stats


@dataclass(slots=True)
class Conversation:
    """Messages of a chat: the system's, if there is one, then user and assistant in turns."""

    messages: list[Message] = field(default_factory=list[Message])

    def asked(self, text: str) -> list[Message]:
        """Return all messages and the user's next."""
        return [*self.messages, {"role": "user", "content": text}]

    def keep(self, text: str, answer: str) -> None:
        """Keep a turn: the user's text and the answer."""
        self.messages = [*self.asked(text), {"role": "assistant", "content": answer}]

    def system(self, text: str) -> str:
        """Replace the system message; "" removes it."""
        messages = [{"role": "system", "content": text}] if text else []
        self.messages = [*messages, *self.messages[len(self._head) :]]
        return "the system's message is set" if text else "there is no system's message"

    def reset(self) -> str:
        """Drop all turns."""
        self.messages = self._head
        return "the conversation begins anew"

    def undo(self) -> str:
        """Drop the last turn; InputError if there is none."""
        users = [i for i, message in enumerate(self.messages) if message["role"] == "user"]
        if not users:
            raise InputError("there is no turn to take back")
        last = self.messages[users[-1]]
        del self.messages[users[-1] :]
        content = " ".join(str(last["content"]).split())
        return f"taken back: {content[:60]}{'...' * (len(content) > 60)}"

    def save(self, file: str) -> str:
        """Write the messages to a file; OSError if it cannot be written."""
        path = Path(file).expanduser()
        write(path, json.dumps(self.messages, ensure_ascii=False, indent=1).encode() + b"\n")
        return f"{len(self.messages)} messages are in {path}"

    def load(self, file: str) -> str:
        """Read the messages from a file; InputError if it holds none."""
        path = Path(file).expanduser()
        try:
            messages = parse_json(read_text(path, "messages"))
            chat.require(messages)
        except ValueError as error:  # InputError is one
            raise InputError(f"{path} holds no conversation: {error}") from None
        self.messages = [dict(message) for message in messages]
        return f"{len(messages)} messages are from {path}"

    @property
    def _head(self) -> list[Message]:
        return [message for message in self.messages[:1] if message["role"] in SYSTEM]


class SlashCommand(NamedTuple):
    """A command of the terminal: its argument, help, and function, which returns a message."""

    argument: str  # "" for none, in brackets where it may be left out
    help: str
    run: Callable[[str], str]


@dataclass(slots=True)
class Session:
    """A source, options of the next text, and the conversation; None for plain text."""

    source: ChatSource
    options: OneAnswer
    printer: Printer
    conversation: Conversation | None = None
    reply: ChatReply | None = None  # the last one
    asked: int = 0
    over: bool = False
    _at_first: OneAnswer = field(init=False)

    def __post_init__(self) -> None:
        self._at_first = self.options

    def one(self, text: str) -> None:
        """Answer one prompt. Exit code 1 where its text fails."""
        if not text.strip():
            raise InputError("--quick is empty; give a text")
        try:
            self._tell_cut(self._answer(text))
        except TextError as error:
            _tell(f"error: {error}")
            raise typer.Exit(1) from None

    def piped(self) -> None:
        """Answer standard input, line by line. Exit code 1 where one of them fails."""
        count = failed = 0
        for line in _lines():
            count += 1
            try:
                self._tell_cut(self._answer(line))
            except ForetokenError as error:
                failed += 1
                _tell(f"error: line {count}: {error}")
        if not count:
            raise InputError("standard input is empty; give a line for each prompt, or --quick")
        if failed:
            raise typer.Exit(1)

    def typed(self) -> None:
        """Answer what is typed until it ends."""
        _tell(f"{self.source.name}; /help lists the commands, Ctrl-D leaves")
        if self.printer.coloured:
            self.printer.console.print(self.printer.legend)
        while not self.over and (line := _typed()) is not None:
            try:
                self._take(line)
            except (ForetokenError, FileError) as error:
                _tell(f"error: {error}")
            except KeyboardInterrupt:
                reply = self.reply
                _tell(f"stopped after {reply.tokens if reply else 0} tokens")

    def _take(self, line: str) -> None:
        """Run a line as a command or answer it as a prompt; "//" begins a prompt with a slash."""
        if line.startswith("/") and not line.startswith("//"):
            self._command(line[1:])
            return
        reply = self._answer(line[1:] if line.startswith("//") else line)
        self._tell_cut(reply, limit=self.conversation is not None)

    def _answer(self, text: str) -> ChatReply:
        """Ask, and print the reply; one that broke off is kept too."""
        talk, number = self.conversation, self.asked
        prompt = text if talk is None else talk.asked(text)
        reply = self.reply = ChatReply()
        self.asked += 1
        try:
            with closing(self.source.parts(prompt, self.options.given, number, reply)) as parts:
                for part in parts:
                    reply.text += part.text
                    self.printer.put(part)
        except BaseException:
            if self.printer.begun:
                self.printer.end()
            raise
        else:
            self.printer.end()
        finally:
            if talk is not None and (reply.text or reply.finish_reason == "stop"):
                talk.keep(text, reply.text)
        return reply

    def _tell_cut(self, reply: ChatReply, *, limit: bool = False) -> None:
        """Say where a text was cut off; `limit`: also where the user set the limit."""
        if reply.finish_reason != "length":
            return
        most = self.options.max_new_tokens
        if most is None and self.conversation is None:
            most = MAX_NEW_TOKENS
        if most is None or reply.tokens < most:
            _tell(f"the text is cut off after {reply.tokens} tokens: there is room for no more")
        elif limit:
            _tell(f"the text is cut off after {most} tokens; /set max_new_tokens allows more")

    def _command(self, line: str) -> None:
        name, _, argument = line.partition(" ")
        commands, argument = self._commands(), argument.strip()
        if name not in commands:
            near = get_close_matches(name, commands, 1, 0.5)
            remedy = f"did you mean /{near[0]}?" if near else "/help lists all"
            raise InputError(f"/{name} is no command; {remedy}")
        argument_hint, _, run = commands[name]
        if argument and not argument_hint:
            raise InputError(f"/{name} takes nothing; leave {argument!r:.40} out")
        if not argument and argument_hint and not argument_hint.startswith("["):
            raise InputError(f"give /{name} {argument_hint}")
        if answer := run(argument):
            _tell(answer)

    def _commands(self) -> dict[str, SlashCommand]:
        talk = self.conversation
        commands = {
            "set": SlashCommand(
                "[NAME VALUE]", "Set an option; without VALUE, as at first.", self._set
            ),
            "stats": SlashCommand("", "Show figures of the last text.", self._stats),
            "help": SlashCommand("", "List these commands.", self._help),
            "exit": SlashCommand("", "Leave; so does Ctrl-D.", self._exit),
        }
        if talk is None:
            return commands
        return {
            "system": SlashCommand(
                "[TEXT]", "Set the system message; without TEXT, none.", talk.system
            ),
            "undo": SlashCommand("", "Take the last turn back.", lambda _: talk.undo()),
            "reset": SlashCommand("", "Take all turns back.", lambda _: talk.reset()),
            "save": SlashCommand("FILE", "Save the messages as JSON.", _file(talk.save)),
            "load": SlashCommand("FILE", "Load messages in place of these.", talk.load),
        } | commands

    def _set(self, argument: str) -> str:
        """Set an option for the texts that follow; without a name, list those set."""
        name, _, value = argument.partition(" ")
        if name:
            options = changed(self.options, self._at_first, name, value.strip())
            self.source.require(options.given)
            self.options = options
        options = self.options.given
        return ", ".join(f"{name} {value}" for name, value in options.items()) or "nothing is set"

    def _stats(self, _: str) -> str:
        if self.reply is None:
            raise InputError("there is no text yet")
        labelled(page(), _rows(self.reply, self.source), WIDTH)
        return ""

    def _help(self, _: str) -> str:
        rows = [(f"/{name} {each.argument}", each.help) for name, each in self._commands().items()]
        rows.append(("//...", "A prompt that begins with a slash."))
        rows.append(("...\\", "The prompt goes on in the next line."))
        labelled(page(), rows, WIDTH)
        return ""

    def _exit(self, _: str) -> str:
        self.over = True
        return ""


class FileError(Exception):
    """A file that cannot be written: unlike a terminal that is gone, this ends nothing."""


def _file(save: Callable[[str], str]) -> Callable[[str], str]:
    def named(argument: str) -> str:
        try:
            return save(argument)
        except OSError as error:
            raise FileError(str(error)) from None

    return named


def _rows(reply: ChatReply, source: ChatSource) -> Iterator[tuple[str, str]]:
    """Yield the figures of a reply, each with its label."""
    runs = f" in {reply.calls} target runs" if reply.calls else ""
    rate = f" ({reply.tokens / reply.calls:.2f} a run)" if reply.calls else ""
    yield "tokens", f"{reply.tokens}{runs}{rate}"
    if reply.calls:
        overlaps = reply.overlaps
        alpha = f", alpha {sum(overlaps) / len(overlaps):.2f}" if overlaps else ""
        counts = f"{reply.accepted} of {reply.drafted} accepted"
        share = f" ({reply.accepted / reply.drafted:.2f}){alpha}" if reply.drafted else ""
        yield "draft tokens", f"{counts}{share}" if reply.drafted else "none"
    if reply.bias:
        away = reply.bias / max(1, reply.tokens)
        yield "distribution", f"{away:.4f} from the target's (total variation, a token's mean)"
    speed = f", {reply.tokens / reply.seconds:.1f} tokens a second" if reply.seconds else ""
    yield "seconds", f"{reply.seconds:.2f}{speed}"
    if source.runtime:
        yield "runs on", source.runtime
    yield "ended by", reply.finish_reason or "a stop on the way"


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


def _typed() -> str | None:
    """Read a prompt, joining lines that end with a backslash.

    None at the end: Ctrl-D, or Ctrl-C on an empty line.
    """
    lines: list[str] = []
    while True:
        try:
            line = input(("... " if lines else "> ") if sys.stdout.isatty() else "")
        except EOFError:
            _tell("")
            return None
        except KeyboardInterrupt:
            _tell("")
            if not lines and not _begun():
                return None
            lines = []
            continue
        if line.endswith("\\"):
            lines.append(line[:-1])
        elif (text := "\n".join([*lines, line])).strip():
            return text


def _begun() -> bool:
    """Return True if the line being typed holds text."""
    with suppress(ImportError):  # where there is no readline nothing can be known
        import readline

        return bool(readline.get_line_buffer())
    return False


def _terminated(*_: object) -> None:
    sys.exit(130)


def _tell(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def run(
    source: ChatSource,
    options: OneAnswer,
    *,
    show_tokens: bool,
    quick: str | None,
    conversation: Conversation | None = None,
) -> None:
    """Answer `quick`, or standard input."""
    printer = Printer(coloured=show_tokens and source.colours)
    session = Session(source, options, printer, conversation)
    if quick is not None:
        session.one(quick)
    elif sys.stdin is not None and sys.stdin.isatty():
        with suppress(ImportError):  # where there is none, lines are typed as the terminal has them
            import readline  # noqa: F401
        signal.signal(signal.SIGTERM, _terminated)  # unlike Ctrl-C it ends more than an answer
        session.typed()
    else:
        session.piped()


def changed(options: W, first: W, name: str, value: str) -> W:
    """Set one option, read as its flag on the command line is; "" sets it back as in `first`.

    Raises InputError for an unknown name or a value of the wrong kind; `given` checks the rest.
    """
    names = _names(type(options))
    key = names.get(name.lstrip("-").replace("-", "_"))
    if key is None:
        near = meant(name, names)
        remedy = f"did you mean {near}?" if near else f"give one of {', '.join(names)}"
        raise InputError(f"{shown(name)} cannot be set; {remedy}")
    read = _read(key, get_type_hints(type(options))[key], value) if value else getattr(first, key)
    return replace(options, **{key: read})


def _names(kind: type) -> dict[str, str]:
    """Map names of options to fields: their own, and those of their flags, such as stop."""
    names: dict[str, str] = {}
    for name, hint in get_type_hints(kind, include_extras=True).items():
        option = hint.__metadata__[0]
        # Typer takes the first flag for a default until the command is made
        flags = [f for f in (option.default, *(option.param_decls or ())) if isinstance(f, str)]
        names |= {flag.lstrip("-").replace("-", "_"): name for flag in flags} | {name: name}
    return names


def _read(name: str, hint: Any, value: str) -> Any:
    """Read a value of the option's type."""
    kinds = get_args(hint) if isinstance(hint, UnionType) else (hint,)
    kind = next(kind for kind in kinds if kind is not NoneType)
    if kind in NUMBERS:
        convert, remedy = NUMBERS[kind]
        try:
            return convert(value)
        except ValueError:
            raise InputError(f"{name} is {shown(value)}; give {remedy}") from None
    if kind is bool:
        if value.lower() not in SWITCH:
            raise InputError(f"{name} is {shown(value)}; give on or off")
        return SWITCH[value.lower()]
    if kind is Path:
        return Path(value).expanduser()
    return value if kind is str else _texts(name, value)


def _texts(name: str, value: str) -> list[str]:
    """Read one text, or a JSON list of them, so that a line end can be written down."""
    if not value.startswith("["):
        return [value]
    try:
        read = parse_json(value)
    except ValueError as error:
        raise InputError(f"{name} is {shown(value)}, which is no JSON: {error}") from None
    if not all(isinstance(text, str) for text in read):
        raise InputError(f"{name} is {shown(value)}; give a list of texts")
    return read
