"""Where answers come from: a model in this process, or a server. The options of both, and what
`foretoken chat` and `foretoken complete` have in common."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, fields
from secrets import randbits
from typing import Annotated, Any

from typer import Option

from foretoken.cli import option
from foretoken.cli.local import local
from foretoken.cli.messages import Template
from foretoken.cli.option import SpreadLoading
from foretoken.cli.quiet import quiet
from foretoken.cli.remote import remote
from foretoken.cli.reply import Source
from foretoken.errors import InputError
from foretoken.sampling.params import SamplingParams

KEY = "FORETOKEN_API_KEY"


def _server(text: str) -> Any:
    return Option(help=text, rich_help_panel="Server")


@dataclass(frozen=True)
class Asked:
    """How texts are asked for and shown."""

    quick: Annotated[str | None, Option("--quick", "-q", help="Only this one, then exit.")] = None
    target: option.Target = None
    draft: option.Draft = None
    gamma: option.Guesses = None
    seed: Annotated[
        int | None,
        Option(help="The same seed, pair, gamma and input give the same texts; left out: any."),
    ] = None
    rule: option.Rule = "block"
    lenience: option.Lenience = 1.0
    show_tokens: Annotated[
        bool, Option("--show-tokens", help="In the colours of their fates, as they come.")
    ] = False

    def require(self) -> None:
        """InputError for what no model could honour."""
        from foretoken.options import as_seed, require  # late: NumPy, which `--help` does without

        require(self.gamma, self.rule, self.lenience)
        if self.seed is not None:
            as_seed(self.seed)

    @property
    def speculation(self) -> dict[str, Any]:
        """What is not left out of how to guess."""
        dials = {"gamma": self.gamma, "rule": self.rule, "lenience": self.lenience}
        return {name: value for name, value in dials.items() if value != getattr(Asked, name)}


@dataclass(frozen=True)
class Server:
    """A server, instead of models in this process."""

    url: Annotated[
        str | None, _server("Ask this server, such as http://127.0.0.1:8000, and load no model.")
    ] = None
    api_key: Annotated[str | None, _server(f"Its key; left out: {KEY} of the environment.")] = None
    model: Annotated[str | None, _server("One of its models; left out: its first.")] = None

    def require_used(self, asked: Asked, loading: SpreadLoading) -> None:
        """InputError for options that have no use beside --url, or without it."""
        if self.url is None:
            if unused := _first_flag(self, ("api_key", "model")):
                raise InputError(f"{unused} is for a server; add --url")
            return
        names = [field.name for field in fields(loading)]
        if unused := _first_flag(asked, ("target", "draft")) or _first_flag(loading, names):
            raise InputError(f"{unused} is for models in this process; leave it or --url out")


def _first_flag(group: Any, names: Any) -> str:
    """The flag of the first of these options that is not as if it were left out; "" for none."""
    defaults = {f.name: f.default for f in fields(group)}
    changed = (name for name in names if getattr(group, name) != defaults[name])
    return "".join(f"--{name.replace('_', '-')}" for name in list(changed)[:1])


@contextmanager
def opened(
    asked: Asked,
    server: Server,
    loading: SpreadLoading,
    template: Template | None,
    wishes: Mapping[str, Any],
) -> Iterator[Source]:
    """The source that the options name. `template`: of conversations; None where prompts are plain
    text. What it cannot honour is told first."""
    asked.require()
    SamplingParams(**wishes)  # before models load, which takes seconds
    server.require_used(asked, loading)
    chat, template = template is not None, template or Template()
    if server.url is not None:
        if template.text is not None:
            raise InputError("--chat-template is read by a server when it starts; give it that one")
        key = os.environ.get(KEY) if server.api_key is None else server.api_key
        how = asked.speculation
        with remote(
            server.url,
            key,
            server.model,
            template.variables,
            messages=chat,
            seed=asked.seed,
            speculation=how,
        ) as source:
            source.require(wishes)
            yield source
        return
    loading.require(asked.target)
    quiet()
    spec = loading.load(asked.target, asked.draft)
    seed = randbits(62) if asked.seed is None else asked.seed
    how = {"gamma": asked.gamma, "rule": asked.rule, "lenience": asked.lenience}
    with local(spec, template, messages=chat, seed=seed, **how) as source:
        source.require(wishes)
        yield source
