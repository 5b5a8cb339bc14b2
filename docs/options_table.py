"""Writes the tables of options in docs/controls.md and docs/serving.md from what their dataclasses
declare: `python docs/options_table.py`."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

from foretoken.engine.options import ENGINE_OPTIONS as ENGINE
from foretoken.engine.options import EngineOptions
from foretoken.sampling.options import DeclaredOption
from foretoken.sampling.params import SAMPLING_OPTIONS as SAMPLING
from foretoken.server.options import OPTIONS as SERVER
from foretoken.server.options import ServerOptions

DOCS = Path(__file__).parent
BEGIN, END = "<!-- options -->\n", "<!-- end of options -->\n"
STRUCTURES = "`--json-schema`, `--regex`, `--grammar`, `--choice`"


def sampling() -> str:
    """Return the table of sampling options, in Markdown: a line for each."""
    lines = ["| option | field of a request | meaning |", "|---|---|---|"]
    for name, option in SAMPLING.items():
        flag = STRUCTURES if name == "structured" else option.flag and f"`{option.flag}`"
        note = f" On the command line: {flag}." if flag else ""
        note = note if option.panel else " Python only."
        field = f"`{option.api.name}`" if option.api else ""
        lines.append(f"| `{name}` | {field} | {option.help}{note} |")
    return "\n".join(lines) + "\n"


def serving() -> str:
    """Return the table of the server's options, in Markdown: a line for each."""
    lines = ["| option of `foretoken serve` | default | meaning |", "|---|---|---|"]
    lines += _lines(SERVER, ServerOptions()) + _lines(ENGINE, EngineOptions())
    return "\n".join(lines) + "\n"


def _lines(options: Mapping[str, DeclaredOption], defaults: object) -> list[str]:
    lines: list[str] = []
    for name, option in options.items():
        default = getattr(defaults, name)
        default = {True: "yes", None: "", (): ""}.get(default, str(default))
        if option.panel:
            lines.append(f"| `{_flag(name, option)}` | {default} | {option.help} |")
    return lines


def _flag(name: str, option: DeclaredOption) -> str:
    return option.flag or f"--{name.replace('_', '-')}"


TABLES = {"controls.md": sampling, "serving.md": serving}


def page(name: str) -> str:
    """Return the page with its table as it should be."""
    text = (DOCS / name).read_text(encoding="utf-8")
    return re.sub(f"(?s)(?<={BEGIN}).*(?={END})", lambda _: TABLES[name](), text)


if __name__ == "__main__":
    for name in TABLES:
        (DOCS / name).write_text(page(name), encoding="utf-8")
