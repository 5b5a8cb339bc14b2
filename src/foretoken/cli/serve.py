"""`foretoken serve`: an OpenAI-compatible server, and a page that shows what it does."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from typer import Argument, Option

from foretoken.cli import option
from foretoken.cli.cluster import Cluster, needing
from foretoken.cli.command import Config, command
from foretoken.cli.option import Speculative, speculative
from foretoken.cli.sampling_options import group
from foretoken.errors import InputError
from foretoken.sampling.options import DeclaredOption
from foretoken.server.options import OPTIONS as SERVER
from foretoken.server.options import ServerOptions
from foretoken.serving.options import OPTIONS as ENGINE
from foretoken.serving.options import EngineOptions
from foretoken.storage.files import read_text

if TYPE_CHECKING:
    from foretoken.server.process.worker import Setup

OWN = ("chat_template",)  # of which the command line has a file


def _fields(options: Mapping[str, DeclaredOption], left_out: object) -> Any:
    """Make a dataclass of the options that the command line has as they are."""
    return group("Fields", {name: options[name] for name in _names(options)}, left_out)


def _names(options: Mapping[str, DeclaredOption]) -> list[str]:
    return [name for name, each in options.items() if each.panel and name not in OWN]


@dataclass(frozen=True)
class EngineFlags(_fields(ENGINE, EngineOptions())):
    """Options of the engine."""


@dataclass(frozen=True)
class ServerFlags(_fields(SERVER, ServerOptions())):
    """Options of the server."""

    chat_template: Annotated[
        Path | None, Option(help=SERVER["chat_template"].help, rich_help_panel="Serving")
    ] = None


@command
def serve(
    loading: option.PairLoading,
    server: ServerFlags,
    engine: EngineFlags,
    cluster: Cluster,
    model: Annotated[
        str | None, Argument(metavar="TARGET", help="Target model, as with --target.")
    ] = None,
    target: option.Target = None,
    draft: option.Draft = None,
    speculative_config: Speculative = None,
    config: Config = None,
) -> None:
    """Serve a model in OpenAI's protocol, with a page at /.

    Texts are in the target's own distribution, at most max-rows of them at a time. Clients: the
    openai package, curl, foretoken chat --url. docs/serving.md lists every field.
    """
    if "" in (server.api_key or ()):
        raise InputError("--api-key is empty, which would let everybody in; give a key")
    given, keywords = _given(server, SERVER), _given(engine, ENGINE)
    cluster.require()
    chosen = speculative(speculative_config, draft)
    target = option.target(model, target)
    loading.require(target)
    if server.chat_template is not None:
        given["chat_template"] = read_text(server.chat_template, "a Jinja template")
    with needing("serve"):
        from foretoken.server.run import run
    from foretoken.server.options import Logs
    from foretoken.server.process.worker import Setup

    given["max_texts"] = min(given["max_texts"], keywords["max_rows"] + keywords["max_waiting"])
    options = ServerOptions(**{"served_model_name": _name(target), **given}, gamma=chosen.gamma)
    setup = Setup(
        target,
        chosen.draft,
        loading.arguments,
        keywords | {"rule": chosen.rule},
        Logs(options.log_format, options.log_level),
    )
    if cluster.used:
        _run_on_ray(setup, options, cluster)
    else:
        run(setup, options)


def _run_on_ray(setup: Setup, options: ServerOptions, cluster: Cluster) -> None:
    with needing("serve,ray"):
        from foretoken.cluster import session

        session.prepare(cluster.address)  # before ray is imported
        from foretoken.cluster import front
    count, threads = cluster.replicas or 1, cluster.threads
    front.run(setup, options, replicas=count, threads=threads, address=cluster.address)


def _given(flags: object, declarations: Mapping[str, DeclaredOption]) -> Any:
    """Return the options that are set. InputError, by the flag, for one that is invalid."""
    values = {name: getattr(flags, name) for name in _names(declarations)}
    return {
        name: declarations[name].check(f"--{name.replace('_', '-')}", value)
        for name, value in values.items()
        if value is not None and value != []
    }


def _name(target: str | None) -> str:
    """Return what the model is called where nobody says."""
    if target is None:
        return "foretoken"
    return Path(target).resolve().name if Path(target).exists() else target
