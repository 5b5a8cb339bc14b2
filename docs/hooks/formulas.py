"""Blocks of ```math as MathML, which browsers draw themselves: no script and no font is loaded, and
the repository's own view draws the same blocks."""

from __future__ import annotations

from typing import Any

from latex2mathml.converter import convert


def on_config(config: Any) -> Any:
    fences = config.mdx_configs.setdefault("pymdownx.superfences", {})
    fences.setdefault("custom_fences", []).append(
        {"name": "math", "class": "formula", "format": formula}
    )
    return config


def formula(source: str, language: str, css_class: str, *_: Any, **__: Any) -> str:
    """One block."""
    return f'<div class="{css_class}">{convert(source.strip(), display="block")}</div>'
