"""`--config FILE`: a command's options from a file; those on the command line win."""

from __future__ import annotations

from difflib import get_close_matches
from pathlib import Path
from typing import Annotated, Any

import typer

from foretoken.cli import files
from foretoken.errors import InputError, one_line


def _read(context: typer.Context, path: Path | None) -> Path | None:
    """The file's values stand for options that are left out."""
    if path is not None:
        context.default_map = {**(context.default_map or {}), **_options(context, path)}
    return path


def _options(context: typer.Context, path: Path) -> dict[str, Any]:
    import yaml  # late: transformers brings it, and only this needs it

    try:
        content = yaml.safe_load(files.text(path, "a YAML mapping of options"))
    except yaml.YAMLError as error:
        raise InputError(f"{path} is no YAML: {one_line(error)}") from None
    if not isinstance(content, dict):
        raise InputError(f"{path} holds no mapping; give lines such as 'port: 8000'")
    names = {parameter.name for parameter in context.command.params} - {"config", None}
    options: dict[str, Any] = {}
    for name, value in content.items():
        option = str(name).replace("-", "_")
        if option not in names:
            near = get_close_matches(option, sorted(str(each) for each in names), 1, 0.6)
            remedy = f"did you mean {near[0]}?" if near else "see --help"
            raise InputError(f"{path} holds the unknown option {name!r}; {remedy}")
        options[option] = value
    return options


Config = Annotated[
    Path | None,
    typer.Option(
        help="YAML: these options by name; the command line wins.", callback=_read, is_eager=True
    ),
]
