"""Options that make messages of prompts."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

from typer import Option

from foretoken.cli import prompts
from foretoken.cli.prompts import Line
from foretoken.cli.sampling_options import as_json
from foretoken.errors import InputError, shown
from foretoken.storage.files import read_text
from foretoken.text import chat

if TYPE_CHECKING:
    from foretoken.speculator import Speculator


class Template(NamedTuple):
    """What makes a prompt of messages: Jinja text, None for the tokenizer's own, and variables."""

    text: str | None = None
    variables: dict[str, Any] | None = None

    def prompt(self, line: Line, spec: Speculator) -> str | list[int]:
        """A line as the model reads it: messages as ids."""
        if not line.messages:
            return prompts.for_model(line, spec)
        with line.named():
            return chat.ids(line.messages, spec.tokenizer, self.text, self.variables)


def _messages(text: str, *flags: str) -> Any:
    return Option(*flags, help=text, rich_help_panel="Messages")


@dataclass(frozen=True)
class Rendering:
    """How messages become text."""

    chat_template: Annotated[
        Path | None, _messages("A file with a Jinja template instead of the tokenizer's.")
    ] = None
    chat_template_kwargs: Annotated[
        str | None, _messages('Its variables: {"enable_thinking": false}.')
    ] = None

    @property
    def template(self) -> Template:
        """What makes prompts of messages, the file read."""
        file, arguments = self.chat_template, self.chat_template_kwargs
        text = None if file is None else read_text(file, "a Jinja template")
        if arguments is None:
            return Template(text)
        variables = as_json("chat_template_kwargs", arguments)
        if not isinstance(variables, dict):
            raise InputError(f"chat_template_kwargs is {shown(arguments)}; give a JSON object")
        return Template(text, variables)


@dataclass(frozen=True)
class Roles:
    """Whether prompts are messages."""

    chat: Annotated[
        bool, _messages("Every prompt is a user's message, for an assistant's reply.", "--chat")
    ] = False
    system: Annotated[str | None, _messages("The system's message before it.")] = None


@dataclass(frozen=True)
class Messages(Rendering, Roles):
    """Both; `--help` has the roles first."""

    def wrap(self, lines: list[Line]) -> list[Line]:
        """The lines, with `chat` as messages; InputError for options that no line has a use for."""
        lines = [self.wrapped(line) for line in lines]
        self.require_used(lines)
        return lines

    def require_used(self, lines: list[Line]) -> None:
        """InputError for options that no line has a use for."""
        if not any(line.messages for line in lines):
            for name in ("system", "chat_template", "chat_template_kwargs"):
                if getattr(self, name) is not None:
                    flag = f"--{name.replace('_', '-')}"
                    raise InputError(f"{flag} is for messages, and there are none; add --chat")

    def wrapped(self, line: Line) -> Line:
        """A line, with `chat` as messages."""
        messages = line.messages
        if not messages:
            if not self.chat:
                return line
            with line.named():
                if not isinstance(line.prompt, str):
                    raise InputError("--chat takes text or messages, not ids; leave it out")
                if not line.prompt:
                    raise InputError("the prompt is empty; give a text")
            messages = [{"role": "user", "content": line.prompt}]
        if self.system is not None and messages[0]["role"] not in ("system", "developer"):
            messages = [{"role": "system", "content": self.system}, *messages]
        return replace(line, messages=messages)
