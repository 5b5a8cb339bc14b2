"""`foretoken chat`: a conversation, or plain text continued line by line, by a model in this
process or by a server."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, fields
from secrets import randbits
from typing import Annotated, Any

from typer import Option

from foretoken.cli import option, session
from foretoken.cli.command import command, quiet
from foretoken.cli.prompts import Rendering, Template
from foretoken.cli.sources import LocalModel, RemoteModel, local, remote
from foretoken.errors import InputError
from foretoken.sampling.params import SamplingParams

KEY = "FORETOKEN_API_KEY"


def _server(text: str) -> Any:
    return Option(help=text, rich_help_panel="Server")


@dataclass(frozen=True)
class ChatOptions:
    """Options of the models and of the whole session."""

    quick: Annotated[
        str | None, Option("--quick", "-q", help="Answer this prompt only, then exit.")
    ] = None
    raw: Annotated[
        bool, Option("--raw", help="Continue each line as plain text, without a chat template.")
    ] = False
    target: option.Target = None
    draft: option.Draft = None
    gamma: option.Guesses = None
    seed: Annotated[
        int | None,
        Option(
            help="Seed of all texts: the same seed, pair, gamma and input give the same texts. "
            "Default: random."
        ),
    ] = None
    rule: option.Rule = "block"
    lenience: option.Lenience = 1.0
    show_tokens: Annotated[
        bool, Option("--show-tokens", help="Colour each token by the fate of its draft token.")
    ] = False

    def require(self) -> None:
        """Raise InputError for values that no model could honour."""
        from foretoken.options import as_seed, require  # late: NumPy, which `--help` does without

        require(self.gamma, self.rule, self.lenience)
        if self.seed is not None:
            as_seed(self.seed)

    @property
    def speculation(self) -> dict[str, Any]:
        return {"gamma": self.gamma, "rule": self.rule, "lenience": self.lenience}


@dataclass(frozen=True)
class ServerAddress:
    """Options that name a server, to ask instead of a model in this process."""

    url: Annotated[
        str | None, _server("Ask this server, such as http://127.0.0.1:8000, and load no model.")
    ] = None
    api_key: Annotated[
        str | None, _server(f"API key of the server. Default: {KEY} in the environment.")
    ] = None
    model: Annotated[
        str | None, _server("Model to ask. Default: the first that the server lists.")
    ] = None


@command
def chat(
    asked: ChatOptions,
    sampling: option.OneAnswer,
    rendering: Rendering,
    server: ServerAddress,
    loading: option.PairLoading,
    system_prompt: Annotated[str | None, Option(help="System message of the conversation.")] = None,
) -> None:
    """Talk with a model, in its own distribution; with --raw, continue lines of plain text.

    On a terminal, /help lists commands: to take turns back, change options, save and load.
    Otherwise every line of standard input is a message, and only answers are printed.
    """
    used = [*_given(rendering), *(["--system-prompt"] if system_prompt else [])]
    if asked.raw and used:
        raise InputError(f"{used[0]} is for messages; leave it or --raw out")
    system = [{"role": "system", "content": system_prompt}] if system_prompt else []
    template, options = None if asked.raw else rendering.template, sampling.given
    with opened(asked, server, loading, template, options) as source:
        session.run(
            source,
            options,
            show_tokens=asked.show_tokens,
            quick=asked.quick,
            messages=None if asked.raw else system,
        )


@contextmanager
def opened(
    asked: ChatOptions,
    server: ServerAddress,
    loading: option.PairLoading,
    template: Template | None,
    options: Mapping[str, Any],
) -> Iterator[LocalModel | RemoteModel]:
    """Open the source that the options name, refusing first what it cannot honour.

    template: of conversations; None where prompts are plain text.
    """
    asked.require()
    SamplingParams(**options)  # before models load, which takes seconds
    messages, template = template is not None, template or Template()
    speculation = asked.speculation
    if server.url is not None:
        not_here = [f for f in _given(asked) if f in ("--target", "--draft")] + _given(loading)
        if not_here:
            raise InputError(f"{not_here[0]} is for models in this process; leave it or --url out")
        if template.text is not None:
            raise InputError("--chat-template is read by a server when it starts; give it that one")
        with remote(
            server.url,
            os.environ.get(KEY) if server.api_key is None else server.api_key,
            server.model,
            template.variables,
            messages=messages,
            seed=asked.seed,
            speculation={n: v for n, v in speculation.items() if v != getattr(ChatOptions, n)},
        ) as source:
            source.require(options)
            yield source
        return
    if only_there := _given(server):
        raise InputError(f"{only_there[0]} is for a server; add --url")
    loading.require(asked.target)
    quiet()
    spec = loading.load(asked.target, asked.draft)
    seed = randbits(62) if asked.seed is None else asked.seed
    with local(spec, template, messages=messages, seed=seed, **speculation) as source:
        source.require(options)
        yield source


def _given(group: Any) -> list[str]:
    """Return the flags of the options in a group that the user set."""
    return [option.flag(f.name) for f in fields(group) if getattr(group, f.name) != f.default]
