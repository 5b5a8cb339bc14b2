"""`foretoken complete`: continue plain text, line by line, by a model in this process or a
server."""

from __future__ import annotations

from foretoken.cli import option, session
from foretoken.cli.command import command
from foretoken.cli.sampling_options import OneText
from foretoken.cli.sources import Asked, Server, opened


@command
def complete(asked: Asked, wishes: OneText, server: Server, loading: option.SpreadLoading) -> None:
    """Continue lines of text, each by itself, in the model's own distribution.

    On a terminal, /help lists commands. Otherwise every line of standard input is continued, and
    only what follows it is printed.
    """
    with opened(asked, server, loading, None, wishes.given) as source:
        session.run(source, wishes, show_tokens=asked.show_tokens, quick=asked.quick)
