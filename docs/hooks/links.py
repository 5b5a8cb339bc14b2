"""Links of pages to files of the repository that are outside of docs/, such as results: these files
go along with the site, so that one link works in the repository's own view and here. What a page
links to and is not there breaks the build."""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files, InclusionLevel

LINK = re.compile(r"(?<=\]\()\.\./[^)#\s]+")
FOLDER = "repository"  # of the site


def on_files(files: Files, config: Any) -> Files:
    for page in files.documentation_pages():
        for link in LINK.findall(page.content_string):
            path = outside(link, page.src_uri, Path(config.docs_dir))
            if path is None or (uri := place(path, config)) in files.src_uris:
                continue
            if not path.is_file():
                raise PluginError(f"{page.src_uri} links to {link}, which is no file")
            beside = InclusionLevel.NOT_IN_NAV
            files.append(File.generated(config, uri, abs_src_path=str(path), inclusion=beside))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    uri = page.file.src_uri

    def moved(found: re.Match[str]) -> str:
        path = outside(found[0], uri, Path(config.docs_dir))
        if path is None:
            return found[0]
        return posixpath.relpath(place(path, config), posixpath.dirname(uri) or ".")

    return LINK.sub(moved, markdown)


def outside(link: str, uri: str, docs: Path) -> Path | None:
    """What a page's link leads to; None where that is in docs/."""
    path = (docs / uri).parent.joinpath(link).resolve()
    return None if path.is_relative_to(docs.resolve()) else path


def place(path: Path, config: Any) -> str:
    """Where a file of the repository is in the site."""
    return f"{FOLDER}/{path.relative_to(Path(config.docs_dir).resolve().parent).as_posix()}"
