"""No page loads anything from the network: one that does breaks the build."""

from __future__ import annotations

import re
from typing import Any

from mkdocs.exceptions import PluginError

LOAD = re.compile(
    r"""<(?:script|img|iframe|source|video|audio|embed)\b[^>]*\bsrc=["']?(?:https?:)?//[^"'\s>]+"""
    r"""|<link\b(?=[^>]*\brel=["']?(?:stylesheet|preload|preconnect|icon))[^>]*\bhref=["']?(?:https?:)?//[^"'\s>]+"""
    r"""|(?:@import|url\()\s*["']?(?:https?:)?//[^"'\s)]+"""
)


def on_post_page(output: str, page: Any, config: Any) -> str:
    if found := LOAD.search(output):
        raise PluginError(f"{page.file.src_uri} would load from the network: {found[0]}")
    return output
