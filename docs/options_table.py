"""Writes the table of sampling options in docs/controls.md from what `SamplingParams` declares:
`python docs/options_table.py`."""

from __future__ import annotations

import re
from pathlib import Path

from foretoken.sampling.params import OPTIONS

PAGE = Path(__file__).with_name("controls.md")
BEGIN, END = "<!-- options -->\n", "<!-- end of options -->\n"
STRUCTURES = "`--json-schema`, `--regex`, `--grammar`, `--choice`"


def table() -> str:
    """Return the table, in Markdown: a line for each option."""
    lines = ["| option | command line | field of a request | meaning |", "|---|---|---|---|"]
    for name, option in OPTIONS.items():
        flag = (
            f"`{option.flag or '--' + name.replace('_', '-')}`" if option.panel else "Python only"
        )
        flag = STRUCTURES if name == "structured" else flag
        field = f"`{option.api.name}`" if option.api else ""
        lines.append(f"| `{name}` | {flag} | {field} | {option.help} |")
    return "\n".join(lines) + "\n"


def page() -> str:
    """Return the page with the table as it should be."""
    text = PAGE.read_text(encoding="utf-8")
    return re.sub(f"(?s)(?<={BEGIN}).*(?={END})", lambda _: table(), text)


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
