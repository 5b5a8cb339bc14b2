"""`foretoken chat`: a conversation with a model in this process, or with a server."""

from __future__ import annotations

from typing import Annotated

from typer import Option

from foretoken.cli import option, session
from foretoken.cli.command import command
from foretoken.cli.conversation import Conversation
from foretoken.cli.messages import Rendering
from foretoken.cli.sampling_options import OneAnswer
from foretoken.cli.sources import Asked, Server, opened


@command
def chat(
    asked: Asked,
    wishes: OneAnswer,
    rendering: Rendering,
    server: Server,
    loading: option.SpreadLoading,
    system_prompt: Annotated[str | None, Option(help="The system's message.")] = None,
) -> None:
    """Talk with a model, in its own distribution.

    On a terminal, /help lists commands: to take turns back, set wishes, save and load. Otherwise
    every line of standard input is a message, and only answers are printed.
    """
    talk = Conversation()
    if system_prompt:
        talk.system(system_prompt)
    with opened(asked, server, loading, rendering.template, wishes.given) as source:
        session.run(
            source,
            wishes,
            show_tokens=asked.show_tokens,
            quick=asked.quick,
            conversation=talk,
        )
