"""`foretoken serve`: run an OpenAI-compatible server, with a web page to try it."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from os.path import exists, samefile
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

from foretoken.cli import option
from foretoken.cli.command import Config, command, format_flag
from foretoken.cli.speculative_config import SpeculativeConfig, load_plan, parse_speculative_config
from foretoken.cluster import session
from foretoken.engine.options import ENGINE_OPTIONS as ENGINE
from foretoken.engine.options import EngineOptions
from foretoken.errors import InputError, format_value
from foretoken.loading import adapters, hub
from foretoken.loading.options import LOAD_OPTIONS as LOADING
from foretoken.sampling.options import DeclaredOption
from foretoken.sampling.speculation import SpeculationOptions
from foretoken.server.options import OPTIONS as SERVER
from foretoken.server.options import LogOptions, ServerOptions
from foretoken.server.process.messages import EngineSetup
from foretoken.storage.files import read_text

if TYPE_CHECKING:
    from foretoken.measurement.plan import Plan


def _select_options(options: Mapping[str, DeclaredOption]) -> dict[str, DeclaredOption]:
    """Return the declared options that exist on the command line, except --chat-template, which is
    declared below."""
    return {n: each for n, each in options.items() if each.panel and n != "chat_template"}


@dataclass(frozen=True)
class EngineFlags(option.make_option_group(_select_options(ENGINE), EngineOptions())):
    """Options of the engine."""


@dataclass(frozen=True)
class ServeLoadOptions(option.PairLoadOptions):
    """Options for loading a target with any number of adapters."""

    adapter: Annotated[
        list[str] | None,
        "Merge this LoRA adapter of peft into the target: a folder or hub id. NAME=FOLDER serves "
        "the merged target under NAME, in addition to the target; may be repeated.",
    ] = None

    @property
    def arguments(self) -> dict[str, Any]:
        """The keyword arguments of `foretoken.load` for the target without named adapters."""
        return super().arguments | {"adapter": self.adapters.get("")}

    @cached_property
    def adapters(self) -> dict[str, str]:
        """The folder or hub id of each adapter, by the name of the adapter ("" if it has none).
        Raises InputError for a repeated name, or if one of several adapters has no name."""
        places: dict[str, str] = {}
        for given in self.adapter or ():
            name, place = parse_adapter(given)
            if name in places:
                twice = f"the name {name!r} twice" if name else "two adapters without names"
                raise InputError(f"--adapter gives {twice}; give each adapter a different name")
            places[name] = place
        if "" in places and len(places) > 1:
            raise InputError(
                f"--adapter {places['']} has no name, and there are other adapters; give "
                "each adapter as NAME=FOLDER"
            )
        return places

    def require(self, target: str | None) -> None:
        super().require(target)
        for place in self.adapters.values():
            adapters.find_adapter(place)

    def with_measured_options(self, plan: Plan) -> ServeLoadOptions:
        """Return a copy with the loading options of a benchmark's plan, and print the added
        options. Raises InputError if the user gave an option another value than the benchmark."""
        given, defaults, new = self.arguments, ServeLoadOptions().arguments, dict[str, Any]()
        for name, default in defaults.items():
            value = plan.load.get(name, default)
            if given[name] not in (default, value):
                raise make_mismatch_error(
                    LOADING[name].flag or format_flag(name), given[name], value
                )
            new |= {name: value} if given[name] != value else {}
        if new:
            words = shlex.join(option.format_flags(new))
            print(f"options of the benchmark: {words}", file=sys.stderr)
        fields: dict[str, Any] = {n: [v] if n == "adapter" else v for n, v in new.items()}
        if fields.pop("generation_config", None):
            fields["ignore_generation_config"] = True
        return replace(self, **fields)

    def make_setups(
        self, setup: EngineSetup, name: str, cluster: option.ClusterOptions
    ) -> dict[str, EngineSetup]:
        """Return the engine setup of each served model, by the model's name: first the target,
        which has `setup` and `name`, then each named adapter. Raises InputError if an adapter has
        the target's name, or if there are named adapters on a cluster."""
        places = {each: place for each, place in self.adapters.items() if each}
        if places and cluster.used:
            raise InputError(
                "--replicas and --ray serve one model only; start a server for each adapter, with "
                "--adapter FOLDER and --served-model-name"
            )
        if name in places:
            raise InputError(
                f"--adapter {name}={places[name]} has the target's name; rename the adapter, or "
                "give the target another name with --served-model-name"
            )
        with_each = {
            each: replace(setup, loading=setup.loading | {"adapter": place})
            for each, place in places.items()
        }
        return {name: replace(setup, adapters=(*places.values(),)), **with_each}


def make_mismatch_error(flag: str, given: object, measured: object) -> InputError:
    return InputError(
        f"{flag} is {format_value(given)}, but the benchmark of --speculative-config used "
        f"{format_value(measured)}; leave out {flag}, or run foretoken bench with it"
    )


def get_measured_target(plan: Plan, target: str | None) -> str:
    """Return the target that a benchmark measured. Raises InputError if `target`, from the command
    line, is a different model."""
    measured = plan.load["target"]
    if target is not None and target != measured:
        folders = exists(target) and exists(measured)
        if not folders or not samefile(target, measured):
            raise make_mismatch_error("--target", target, measured)
    return measured


def parse_adapter(given: str) -> tuple[str, str]:
    """Return (name, place) for a value of --adapter: NAME=PLACE, or PLACE alone, with the name "".
    The place is a folder or hub id. Raises InputError if NAME or PLACE is empty."""
    name, equals, place = given.partition("=")
    if not equals or hub.is_folder(adapters.expand_home(given)):
        name, place = "", given
    elif not name or not place:
        raise InputError(f"--adapter is {given!r}; give NAME=FOLDER, or a folder")
    return name, adapters.expand_home(place)


@dataclass(frozen=True)
class ServerFlags(option.make_option_group(_select_options(SERVER), ServerOptions())):
    """Options of the server."""

    panel: ClassVar[str] = "Serving"
    chat_template: Annotated[Path | None, SERVER["chat_template"].help] = None


@command
def serve(
    loading: ServeLoadOptions,
    server: ServerFlags,
    engine: EngineFlags,
    cluster: option.ClusterOptions,
    place: option.TargetArgument = None,
    target: option.Target = None,
    draft: option.Draft = None,
    gamma: option.Gamma = None,
    rule: option.Rule = "block",
    speculative_config: SpeculativeConfig = None,
    config: Config = None,
) -> None:
    """Serve a model with OpenAI's API, and a web page at / to try it.

    Outputs have the target's own distribution; at most --max-rows are generated at a time. Clients:
    the openai package, curl, foretoken chat --url. docs/serving.md lists every field.
    """
    if "" in (server.api_key or ()):
        raise InputError("--api-key is empty, which would admit every client; give a key")
    given, keywords = _collect_options(server, SERVER), _collect_options(engine, ENGINE)
    draft, gamma, rule = parse_speculative_config(speculative_config, draft, gamma, rule)
    SpeculationOptions(gamma, rule)
    cluster.require()
    target = option.merge_target(place, target)
    if plan := load_plan(speculative_config):
        target, loading = get_measured_target(plan, target), loading.with_measured_options(plan)
    target = option.resolve_target(target)
    loading.require(target)
    if server.chat_template is not None:
        given["chat_template"] = read_text(server.chat_template, "a Jinja template")
    with option.require_extra("serve"):
        from foretoken.server.run import run
    given["max_texts"] = min(given["max_texts"], keywords["max_rows"] + keywords["max_waiting"])
    given["served_model_name"] = given.get("served_model_name") or (
        Path(target).resolve().name if Path(target).exists() else target
    )
    options = ServerOptions(**given, gamma=gamma)
    setup = EngineSetup(
        target,
        draft,
        loading.arguments,
        keywords | {"rule": rule},
        LogOptions(options.log_format, options.log_level),
        chat_template=options.chat_template,
        tool_parser=options.tool_parser,
        max_pixels=options.max_pixels,
        max_seconds=options.max_seconds,
    )
    setups = loading.make_setups(setup, options.name, cluster)
    if not cluster.used:
        run(setups, options)
        return
    session.prepare_environment(cluster.address)  # before ray is imported
    with option.require_extra("serve,ray"):
        from foretoken.cluster import serve
    count, threads = cluster.replicas or 1, cluster.threads
    serve.run(setup, options, replicas=count, threads=threads, address=cluster.address)


def _collect_options(flags: object, declarations: Mapping[str, DeclaredOption]) -> Any:
    """Return the values of the declared options that the user set, by name. Raises InputError, with
    the flag in the message, for an invalid value."""
    values = {name: getattr(flags, name) for name in _select_options(declarations)}
    return {
        name: declarations[name].check(format_flag(name), value)
        for name, value in values.items()
        if value is not None and value != []
    }
