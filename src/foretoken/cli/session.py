"""Prompts one after the other: a single one, the lines of a pipe, or what is typed, where a line
that begins with "/" is a command and Ctrl-C ends an answer, not the program."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from dataclasses import dataclass, field
from difflib import get_close_matches
from typing import NamedTuple

import typer

from foretoken.cli.change import changed
from foretoken.cli.conversation import Conversation
from foretoken.cli.page import labelled, page
from foretoken.cli.reply import Printer, Reply, Source, TextError
from foretoken.cli.sampling_options import OneText
from foretoken.errors import ForetokenError, InputError

WIDTH = 22  # of the first column of /help and /stats


class Command(NamedTuple):
    """What follows its name, what it does, and that itself: it returns what is to be said."""

    argument: str  # "" for none, in brackets where it may be left out
    help: str
    run: Callable[[str], str]


@dataclass(slots=True)
class Session:
    """A source, the wishes of the next text, and where prompts are messages those before it."""

    source: Source
    wishes: OneText
    printer: Printer
    conversation: Conversation | None = None
    reply: Reply | None = None  # the last one
    asked: int = 0
    over: bool = False
    _left_out: OneText = field(init=False)

    def __post_init__(self) -> None:
        self._left_out = self.wishes

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
        """A line: a command, or a prompt; "//" begins one with a slash."""
        if line.startswith("/") and not line.startswith("//"):
            self._command(line[1:])
            return
        reply = self._answer(line[1:] if line.startswith("//") else line)
        self._tell_cut(reply, limit=self.conversation is not None)

    def _answer(self, text: str) -> Reply:
        """Ask and print what comes; what came of an answer that broke off is kept too."""
        talk, number = self.conversation, self.asked
        prompt = text if talk is None else talk.asked(text)
        reply = self.reply = Reply()
        self.asked += 1
        try:
            with closing(self.source.parts(prompt, self.wishes.given, number, reply)) as parts:
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

    def _tell_cut(self, reply: Reply, *, limit: bool = False) -> None:
        """Where a text ends that was not over; `limit`: also where that was asked for."""
        if reply.finish_reason != "length":
            return
        most = self.wishes.max_new_tokens
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

    def _commands(self) -> dict[str, Command]:
        talk = self.conversation
        commands = {
            "set": Command("[NAME VALUE]", "A wish; without VALUE as at first.", self._set),
            "stats": Command("", "Of the last text.", self._stats),
            "help": Command("", "These commands.", self._help),
            "exit": Command("", "Leave; so does Ctrl-D.", self._exit),
        }
        if talk is None:
            return commands
        return {
            "system": Command("[TEXT]", "The system's message; without TEXT none.", talk.system),
            "undo": Command("", "Take the last turn back.", lambda _: talk.undo()),
            "reset": Command("", "Take all turns back.", lambda _: talk.reset()),
            "save": Command("FILE", "The messages, as JSON.", _file(talk.save)),
            "load": Command("FILE", "Messages instead of these.", talk.load),
        } | commands

    def _set(self, argument: str) -> str:
        """Another wish for the texts that follow; or all that there are."""
        name, _, value = argument.partition(" ")
        if name:
            wishes = changed(self.wishes, self._left_out, name, value.strip())
            self.source.require(wishes.given)
            self.wishes = wishes
        options = self.wishes.given
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


def _rows(reply: Reply, source: Source) -> Iterator[tuple[str, str]]:
    """What there is to know of a reply."""
    runs = f" in {reply.calls} target runs" if reply.calls else ""
    rate = f" ({reply.tokens / reply.calls:.2f} a run)" if reply.calls else ""
    yield "tokens", f"{reply.tokens}{runs}{rate}"
    if reply.calls:
        overlaps = reply.overlaps
        alpha = f", alpha {sum(overlaps) / len(overlaps):.2f}" if overlaps else ""
        counts = f"{reply.accepted} of {reply.drafted} kept"
        share = f" ({reply.accepted / reply.drafted:.2f}){alpha}" if reply.drafted else ""
        yield "guesses", f"{counts}{share}" if reply.drafted else "none"
    if reply.bias:
        away = reply.bias / max(1, reply.tokens)
        yield "law", f"{away:.4f} from the target's (total variation, a token's mean)"
    speed = f", {reply.tokens / reply.seconds:.1f} tokens a second" if reply.seconds else ""
    yield "seconds", f"{reply.seconds:.2f}{speed}"
    if source.runtime:
        yield "runs on", source.runtime
    yield "ended by", reply.finish_reason or "a stop on the way"


def _lines() -> Iterator[str]:
    """The lines of standard input that are not empty, as they come."""
    if sys.stdin is None:
        return
    try:
        for line in sys.stdin:
            if line.strip():
                yield line.removesuffix("\n")
    except UnicodeDecodeError as error:
        raise InputError(f"standard input is no text: {error}") from None


def _typed() -> str | None:
    """What is typed, with the lines that a backslash adds; None where it ends: by Ctrl-D, or Ctrl-C
    where nothing stands."""
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
    """Whether something stands in the line that is typed."""
    with suppress(ImportError):  # where there is no readline nothing can be known
        import readline

        return bool(readline.get_line_buffer())
    return False


def _terminated(*_: object) -> None:
    sys.exit(130)


def _tell(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def run(source: Source, wishes: OneText, *, show_tokens: bool, quick: str | None,
        conversation: Conversation | None = None) -> None:  # fmt: skip
    """Answer what `quick` or standard input asks."""
    printer = Printer(coloured=show_tokens and source.colours)
    session = Session(source, wishes, printer, conversation)
    if quick is not None:
        session.one(quick)
    elif sys.stdin is not None and sys.stdin.isatty():
        with suppress(ImportError):  # where there is none, lines are typed as the terminal has them
            import readline  # noqa: F401
        signal.signal(signal.SIGTERM, _terminated)  # unlike Ctrl-C it ends more than an answer
        session.typed()
    else:
        session.piped()
