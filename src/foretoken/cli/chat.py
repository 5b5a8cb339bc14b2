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
from foretoken.cli.messages import Rendering, Template
from foretoken.cli.remote import remote
from foretoken.cli.sampling_options import OneAnswer
from foretoken.cli.sources import ChatSource, local
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
        """Speculation options that the user set."""
        values = {"gamma": self.gamma, "rule": self.rule, "lenience": self.lenience}
        return {n: value for n, value in values.items() if value != getattr(ChatOptions, n)}


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

    def require_used(self, asked: ChatOptions, loading: option.PairLoading) -> None:
        """Raise InputError for options that have no use beside --url, or without it."""
        if self.url is None:
            if unused := _first_flag(self, ("api_key", "model")):
                raise InputError(f"{unused} is for a server; add --url")
            return
        names = [field.name for field in fields(loading)]
        if unused := _first_flag(asked, ("target", "draft")) or _first_flag(loading, names):
            raise InputError(f"{unused} is for models in this process; leave it or --url out")


@command
def chat(
    asked: ChatOptions,
    sampling: OneAnswer,
    rendering: Rendering,
    server: ServerAddress,
    loading: option.PairLoading,
    system_prompt: Annotated[str | None, Option(help="System message of the conversation.")] = None,
) -> None:
    """Talk with a model, in its own distribution; with --raw, continue lines of plain text.

    On a terminal, /help lists commands: to take turns back, change options, save and load.
    Otherwise every line of standard input is a message, and only answers are printed.
    """
    talk = None if asked.raw else session.Conversation()
    if talk is None:
        used = _first_flag(rendering, ("chat_template", "chat_template_kwargs"))
        if used or system_prompt:
            raise InputError(f"{used or '--system-prompt'} is for messages; leave it or --raw out")
    elif system_prompt:
        talk.system(system_prompt)
    template = None if asked.raw else rendering.template
    with opened(asked, server, loading, template, sampling.given) as source:
        session.run(
            source, sampling, show_tokens=asked.show_tokens, quick=asked.quick, conversation=talk
        )


@contextmanager
def opened(
    asked: ChatOptions,
    server: ServerAddress,
    loading: option.PairLoading,
    template: Template | None,
    options: Mapping[str, Any],
) -> Iterator[ChatSource]:
    """Open the source that the options name, refusing first what it cannot honour.

    template: of conversations; None where prompts are plain text.
    """
    asked.require()
    SamplingParams(**options)  # before models load, which takes seconds
    server.require_used(asked, loading)
    messages, template = template is not None, template or Template()
    if server.url is not None:
        if template.text is not None:
            raise InputError("--chat-template is read by a server when it starts; give it that one")
        with remote(
            server.url,
            os.environ.get(KEY) if server.api_key is None else server.api_key,
            server.model,
            template.variables,
            messages=messages,
            seed=asked.seed,
            speculation=asked.speculation,
        ) as source:
            source.require(options)
            yield source
        return
    loading.require(asked.target)
    quiet()
    spec = loading.load(asked.target, asked.draft)
    seed = randbits(62) if asked.seed is None else asked.seed
    how = {"gamma": asked.gamma, "rule": asked.rule, "lenience": asked.lenience}
    with local(spec, template, messages=messages, seed=seed, **how) as source:
        source.require(options)
        yield source


def _first_flag(group: Any, names: Any) -> str:
    """Name the flag of the first of these options that the user set; "" for none."""
    defaults = {f.name: f.default for f in fields(group)}
    changed = (name for name in names if getattr(group, name) != defaults[name])
    return "".join(f"--{name.replace('_', '-')}" for name in list(changed)[:1])
