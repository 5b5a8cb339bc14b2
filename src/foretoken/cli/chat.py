"""`foretoken chat`: chat with a model in this process or on a server, or let the model continue
lines of plain text."""

from __future__ import annotations

import os
import sys
from dataclasses import asdict, dataclass, fields
from secrets import randbits
from typing import Annotated, Any, ClassVar

from typer import Option

from foretoken.cli import completion_output, option, session
from foretoken.cli.command import command, format_flag, set_up_logging
from foretoken.cli.prompts import ChatTemplate, TemplateOptions
from foretoken.errors import InputError
from foretoken.sampling.checks import SEED
from foretoken.sampling.params import SamplingParams
from foretoken.sampling.speculation import SpeculationOptions

API_KEY_VARIABLE = "FORETOKEN_API_KEY"


@dataclass(frozen=True)
class ServerAddress:
    """A server to use instead of a model in this process."""

    panel: ClassVar[str] = "Server"
    url: Annotated[
        str | None, "Use this server, such as http://127.0.0.1:8000, and load no model."
    ] = None
    api_key: Annotated[
        str | None, f"API key of the server. Default: environment variable {API_KEY_VARIABLE}."
    ] = None
    model: Annotated[str | None, "Model to use. Default: the first that the server lists."] = None


@command
def chat(
    sampling: option.ChatSamplingOptions,
    rendering: TemplateOptions,
    server: ServerAddress,
    loading: option.PairLoadOptions,
    place: option.TargetArgument = None,
    quick: Annotated[
        str | None, Option("--quick", "-q", help="Answer this prompt only, then exit.")
    ] = None,
    raw: Annotated[bool, "Continue each line as plain text, without a chat template."] = False,
    target: option.Target = None,
    draft: option.Draft = None,
    gamma: option.Gamma = None,
    seed: Annotated[
        int | None,
        "Seed of the random numbers: the same seed, pair, gamma and input give the same replies. "
        "Default: random.",
    ] = None,
    rule: option.Rule = "block",
    lenience: option.Lenience = 1.0,
    show_tokens: Annotated[bool, "Colour accepted draft tokens and tokens of the target."] = False,
    system_prompt: Annotated[str | None, "System message of the conversation."] = None,
) -> None:
    """Chat with a model, in its own distribution. With --raw, continue lines of plain text.

    On a terminal, /help lists commands to remove turns, change options, save and load. Without a
    terminal, every line of standard input is a message, and only the replies are printed.
    """
    # Report mistakes before models load, which takes seconds
    target = option.merge_target(place, target)
    options = sampling.chosen_values
    SamplingParams(**options)
    if quick is not None and not quick.strip():
        raise InputError("--quick is empty; give a prompt")
    speculation = asdict(SpeculationOptions(gamma, rule, lenience))
    SEED("seed", seed or 0)
    message_flags = _list_given_flags(rendering) + ["--system-prompt"] * bool(system_prompt)
    if raw and message_flags:
        raise InputError(
            f"{message_flags[0]} has an effect only on chat messages, which --raw does not use; "
            "leave out one of the two"
        )
    template = ChatTemplate() if raw else rendering.template
    spec = None
    if server.url is None:
        if server_flags := _list_given_flags(server):
            raise InputError(f"{server_flags[0]} needs a server; add --url")
        target = option.resolve_target(target)
        loading.require(target)
        set_up_logging()
        from foretoken.cli import local_model  # late: imports torch

        opened = local_model.open_local_model(
            spec := loading.load(
                target,
                draft,
                check=lambda known: None if raw else local_model.require_template(template, known),
            ),
            template,
            messages=not raw,
            seed=randbits(62) if seed is None else seed,
            **speculation,
        )
    else:
        given = ["--target"] * (target is not None) + ["--draft"] * (draft is not None)
        if local_flags := given + _list_given_flags(loading):
            raise InputError(f"{local_flags[0]} does not work with --url; leave out one of the two")
        if template.text is not None:
            raise InputError("--chat-template does not work with --url; give it to foretoken serve")
        default = asdict(SpeculationOptions())
        with option.require_extra("client"):
            from foretoken.cli import remote_model  # late: an extra
        opened = remote_model.open_remote_model(
            server.url,
            os.environ.get(API_KEY_VARIABLE) if server.api_key is None else server.api_key,
            server.model,
            template.variables,
            messages=not raw,
            seed=seed,
            speculation={n: value for n, value in speculation.items() if value != default[n]},
        )
    system = [{"role": "system", "content": system_prompt}] if system_prompt else []
    with opened as source:
        source.require(options)
        if lenience < 1 and gamma != 0:
            warning = "replies do not have the target's distribution"
            print(f"lenience {lenience:g}: {warning}", file=sys.stderr)
        messages = None if raw else system
        if spec is not None and gamma is None:
            defaults = source.get_default_options(messages=not raw)
            completion_output.learn_costs(spec, [SamplingParams(**{**defaults, **options})])
        session.run_session(
            source, options, show_tokens=show_tokens, quick=quick, messages=messages
        )


def _list_given_flags(group: Any) -> list[str]:
    """Return the flags of the options in a dataclass that differ from their defaults."""
    return [format_flag(f.name) for f in fields(group) if getattr(group, f.name) != f.default]
