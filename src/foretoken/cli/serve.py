"""`foretoken serve`: an OpenAI-compatible server, and a page that shows what it does."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

from typer import Argument, Option

from foretoken.cli import files, option
from foretoken.cli.cluster import Cluster, needing
from foretoken.cli.command import command
from foretoken.cli.settings import Config
from foretoken.cli.speculative import Speculative, speculative
from foretoken.errors import InputError, shown

LEVELS = ("debug", "info", "warning", "error")
FORMATS = ("text", "json")


def _serving(text: str, *flags: str) -> Any:
    return Option(*flags, help=text, rich_help_panel="Serving")


@command
def serve(
    loading: option.PairLoading,
    cluster: Cluster,
    model: Annotated[
        str | None, Argument(metavar="TARGET", help="Folder or hub id, as --target.")
    ] = None,
    target: option.Target = None,
    draft: option.Draft = None,
    speculative_config: Speculative = None,
    host: Annotated[str, _serving("Where to listen; 0.0.0.0: everywhere.")] = "127.0.0.1",
    port: Annotated[int, _serving("Port; 0: any that is free.")] = 8000,
    served_model_name: Annotated[
        str | None, _serving("The name in answers and requests; left out: the target's.")
    ] = None,
    api_key: Annotated[
        list[str] | None, _serving("A key that clients must send; give it again for another.")
    ] = None,
    allowed_origin: Annotated[
        list[str] | None, _serving("An origin whose pages may ask (CORS); give it again.")
    ] = None,
    chat_template: Annotated[
        Path | None, _serving("A file: a Jinja template instead of the model's own.")
    ] = None,
    max_rows: Annotated[int, _serving("Texts that are written at a time.")] = 16,
    max_waiting: Annotated[int, _serving("Texts that may wait beside them.")] = 1024,
    max_length: Annotated[
        int | None, _serving("Tokens of a text, prompt included; left out: the context.")
    ] = None,
    kv_memory: Annotated[
        int | None,
        _serving(
            "Bytes for keys and values; left out: what texts need, and up to 1 GB of those that "
            "have left."
        ),
    ] = None,
    max_tokens: Annotated[int | None, _serving("New tokens of a text at most.")] = None,
    max_texts: Annotated[int, _serving("Texts of one request at most.")] = 16,
    max_body: Annotated[int, _serving("Bytes of one request at most.")] = 4_000_000,
    prefix_cache: Annotated[
        bool,
        _serving(
            "Keep what was read for texts that begin alike.", "--prefix-cache/--no-prefix-cache"
        ),
    ] = True,
    metrics_compat: Annotated[str | None, _serving("vllm: its names too, at /metrics.")] = None,
    log_format: Annotated[str, _serving("text or json.")] = "text",
    log_level: Annotated[str, _serving("debug, info, warning or error.")] = "info",
    drain: Annotated[float, _serving("Seconds for texts that are written, at the end.")] = 30.0,
    config: Config = None,
) -> None:
    """Serve a model in OpenAI's protocol, with a page at /.

    Texts are in the target's own distribution, at most max-rows of them at a time. Clients: the
    openai package, curl, foretoken chat --url. docs/serving.md lists every field.
    """
    counts = {"max-rows": max_rows, "max-waiting": max_waiting, "max-length": max_length}
    counts |= {"kv-memory": kv_memory, "max-tokens": max_tokens, "max-texts": max_texts}
    _require(port, metrics_compat, log_format, log_level, counts | {"max-body": max_body})
    if not 0 <= drain <= 3600:
        raise InputError(f"--drain is {drain:g}; give seconds from 0 to 3600")
    if "" in (api_key or ()):
        raise InputError("--api-key is empty, which would let everybody in; give a key")
    cluster.require()
    chosen = speculative(speculative_config, draft)
    target = option.target(model, target)
    loading.require(target)
    template = None if chat_template is None else files.text(chat_template, "a Jinja template")
    with needing("serve"):
        from foretoken.server.run import run
    from foretoken.server.app import ServerSettings
    from foretoken.server.limits import Keys, Limits
    from foretoken.server.logs import Logs
    from foretoken.server.process.worker import Setup

    settings = ServerSettings(
        name=served_model_name or _name(target),
        limits=Limits(max_body, max_tokens, min(max_texts, max_rows + max_waiting)),
        keys=Keys(tuple(api_key or ())),
        origins=tuple(allowed_origin or ()),
        chat_template=template,
        gamma=chosen.gamma,
        vllm_metrics=metrics_compat == "vllm",
        patience=drain,
    )
    engine = {
        "max_rows": max_rows,
        "max_waiting": max_waiting,
        "max_length": max_length,
        "kv_memory": kv_memory,
        "prefix_cache": prefix_cache,
        "rule": chosen.rule,
    }
    logs = Logs(log_format, log_level)
    setup = Setup(target, chosen.draft, loading.arguments, engine, logs)
    if not cluster.used:
        run(setup, settings, host, port)
        return
    with needing("serve,ray"):
        from foretoken.cluster import session

        session.prepare(cluster.address)  # before ray is imported
        from foretoken.cluster import front
    count, threads = cluster.replicas or 1, cluster.threads
    front.run(setup, settings, host, port, replicas=count, threads=threads, address=cluster.address)


def _require(
    port: int, compat: str | None, log_format: str, log_level: str, counts: dict[str, int | None]
) -> None:
    """InputError for values that are wrong whatever the model."""
    if not 0 <= port < 65536:
        raise InputError(f"--port is {port}; give one from 0 to 65535")
    if compat not in (None, "vllm"):
        raise InputError(f"--metrics-compat is {shown(compat)}; give vllm, or leave it out")
    for name, value, choices in (("format", log_format, FORMATS), ("level", log_level, LEVELS)):
        if value not in choices:
            raise InputError(f"--log-{name} is {shown(value)}; give one of {', '.join(choices)}")
    for name, number in counts.items():
        if number is not None and number < 1:
            raise InputError(f"--{name} is {number}; give a whole number from 1")


def _name(target: str | None) -> str:
    """What the model is called where nobody says."""
    if target is None:
        return "foretoken"
    return Path(target).resolve().name if Path(target).exists() else target
