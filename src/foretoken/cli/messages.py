"""Options for messages, and the chat template that makes a prompt of them."""

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
    """A chat template: Jinja text, None for the tokenizer's own, and its variables."""

    text: str | None = None
    variables: dict[str, Any] | None = None

    def prompt(self, line: Line, spec: Speculator) -> str | list[int]:
        """Return a line's prompt for the model; messages become ids."""
        if not line.messages:
            return prompts.for_model(line, spec)
        with line.named():
            return chat.ids(line.messages, spec.tokenizer, self.text, self.variables)


def _messages(text: str, *flags: str) -> Any:
    return Option(*flags, help=text, rich_help_panel="Messages")


@dataclass(frozen=True)
class Rendering:
    """Options of the chat template."""

    chat_template: Annotated[
        Path | None, _messages("File with a Jinja template. Default: the tokenizer's own.")
    ] = None
    chat_template_kwargs: Annotated[
        str | None, _messages('Variables of the template as JSON: {"enable_thinking": false}.')
    ] = None

    @property
    def template(self) -> Template:
        """Read the file and the variables."""
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
    """Options that make messages of prompts."""

    chat: Annotated[
        bool, _messages("Send each prompt as a user's message, for an assistant's reply.", "--chat")
    ] = False
    system: Annotated[str | None, _messages("System message before each prompt.")] = None


@dataclass(frozen=True)
class Messages(Rendering, Roles):
    """All of them; `--help` shows the roles first."""

    def wrap(self, lines: list[Line]) -> list[Line]:
        """Wrap each line. InputError for options that no line has a use for."""
        lines = [self.wrapped(line) for line in lines]
        self.require_used(lines)
        return lines

    def require_used(self, lines: list[Line]) -> None:
        """Raise InputError for options that no line has a use for."""
        if not any(line.messages for line in lines):
            for name in ("system", "chat_template", "chat_template_kwargs"):
                if getattr(self, name) is not None:
                    flag = f"--{name.replace('_', '-')}"
                    raise InputError(f"{flag} is for messages, and there are none; add --chat")

    def wrapped(self, line: Line) -> Line:
        """Return a line with messages: its own, or its prompt with --chat, after the system's."""
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
