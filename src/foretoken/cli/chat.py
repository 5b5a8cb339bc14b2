"""`foretoken chat`: a conversation, or plain text continued line by line, by a model in this
process or by a server."""

from __future__ import annotations

import os
import sys
from dataclasses import asdict, dataclass, fields
from secrets import randbits
from typing import Annotated, Any, ClassVar

from typer import Option

from foretoken.cli import answer, option, session
from foretoken.cli.command import command, flag, quiet
from foretoken.cli.prompts import Rendering, Template
from foretoken.errors import InputError
from foretoken.sampling.checks import SEED
from foretoken.sampling.params import SamplingParams
from foretoken.sampling.speculation import SpeculationOptions

KEY = "FORETOKEN_API_KEY"


@dataclass(frozen=True)
class ServerAddress:
    """Options that name a server, to ask instead of a model in this process."""

    panel: ClassVar[str] = "Server"
    url: Annotated[
        str | None, "Ask this server, such as http://127.0.0.1:8000, and load no model."
    ] = None
    api_key: Annotated[str | None, f"API key of the server. Default: {KEY} in the environment."] = (
        None
    )
    model: Annotated[str | None, "Model to ask. Default: the first that the server lists."] = None


@command
def chat(
    sampling: option.OneAnswer,
    rendering: Rendering,
    server: ServerAddress,
    loading: option.PairLoading,
    place: option.Place = None,
    quick: Annotated[
        str | None, Option("--quick", "-q", help="Answer this prompt only, then exit.")
    ] = None,
    raw: Annotated[bool, "Continue each line as plain text, without a chat template."] = False,
    target: option.Target = None,
    draft: option.Draft = None,
    gamma: option.Gamma = None,
    seed: Annotated[
        int | None,
        "Seed of all texts: the same seed, pair, gamma and input give the same texts. "
        "Default: random.",
    ] = None,
    rule: option.Rule = "block",
    lenience: option.Lenience = 1.0,
    show_tokens: Annotated[bool, "Colour each token by the fate of its draft token."] = False,
    system_prompt: Annotated[str | None, "System message of the conversation."] = None,
) -> None:
    """Talk with a model, in its own distribution; with --raw, continue lines of plain text.

    On a terminal, /help lists commands: to take turns back, change options, save and load.
    Otherwise every line of standard input is a message, and only answers are printed.
    """
    # Mistakes are told before models load, which takes seconds
    target = option.target(place, target)
    options = sampling.given
    SamplingParams(**options)
    if quick is not None and not quick.strip():
        raise InputError("--quick is empty; give a text")
    speculation = asdict(SpeculationOptions(gamma, rule, lenience))
    SEED("seed", seed or 0)
    of_messages = _given(rendering) + ["--system-prompt"] * bool(system_prompt)
    if raw and of_messages:
        raise InputError(f"{of_messages[0]} is for messages; leave it or --raw out")
    template = Template() if raw else rendering.template
    spec = None
    if server.url is None:
        if of_server := _given(server):
            raise InputError(f"{of_server[0]} is for a server; add --url")
        target = option.chosen(target)
        loading.require(target)
        quiet()
        from foretoken.cli import local  # late: mistakes are told before torch is imported

        opened = local.local(
            spec := loading.load(
                target,
                draft,
                check=lambda known: None if raw else local.require_template(template, known),
            ),
            template,
            messages=not raw,
            seed=randbits(62) if seed is None else seed,
            **speculation,
        )
    else:
        given = ["--target"] * (target is not None) + ["--draft"] * (draft is not None)
        if here := given + _given(loading):
            raise InputError(f"{here[0]} is for models in this process; leave it or --url out")
        if template.text is not None:
            raise InputError("--chat-template is read by a server when it starts; give it that one")
        default = asdict(SpeculationOptions())
        with option.needing("client"):
            from foretoken.cli import remote  # late: an extra
        opened = remote.remote(
            server.url,
            os.environ.get(KEY) if server.api_key is None else server.api_key,
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
            texts = "texts are no longer in the target's distribution"
            print(f"lenience {lenience:g}: {texts}", file=sys.stderr)
        messages = None if raw else system
        if spec is not None and gamma is None:
            defaults = source.defaults(messages=not raw)
            answer.learn_costs(spec, [SamplingParams(**{**defaults, **options})])
        session.run(source, options, show_tokens=show_tokens, quick=quick, messages=messages)


def _given(group: Any) -> list[str]:
    """Return the flags of the options in a group that the user set."""
    return [flag(f.name) for f in fields(group) if getattr(group, f.name) != f.default]
