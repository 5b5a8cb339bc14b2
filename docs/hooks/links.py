"""Links of pages to files of the repository that are outside of docs/, such as results: these files
go along with the site, so that one link works in the repository's own view and here; so does what a
page among them links to. What a page links to and is not there breaks the build."""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files, InclusionLevel

LINK = re.compile(r"(?<=\]\()(?![a-z]+:|[/#])[^)#\s]+")
FOLDER = "repository"  # of the site


def on_files(files: Files, config: Any) -> Files:
    pages = list(files.documentation_pages())
    while pages:  # a page from outside, such as a model's card, has links of its own
        page = pages.pop()
        for link in LINK.findall(page.content_string):
            path = target(link, page.src_uri, config)
            if (uri := place(path, config)) in files.src_uris or not uri.startswith(FOLDER):
                continue  # MkDocs itself checks links within docs/
            if not path.is_file():
                raise PluginError(f"{page.src_uri} links to {link}, which is no file")
            beside = InclusionLevel.NOT_IN_NAV
            linked = File.generated(config, uri, abs_src_path=str(path), inclusion=beside)
            files.append(linked)
            if linked.is_documentation_page():
                pages.append(linked)
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    uri = page.file.src_uri

    def moved(found: re.Match[str]) -> str:
        to = place(target(found[0], uri, config), config)
        return posixpath.relpath(to, posixpath.dirname(uri) or ".")

    return LINK.sub(moved, markdown)


def target(link: str, uri: str, config: Any) -> Path:
    """The file that a page's link leads to."""
    docs = Path(config.docs_dir).resolve()
    outside = Path(uri).parts[:1] == (FOLDER,)
    page = docs.parent / Path(uri).relative_to(FOLDER) if outside else docs / uri
    return page.parent.joinpath(link).resolve()


def place(path: Path, config: Any) -> str:
    """Where a file of the repository is in the site."""
    docs = Path(config.docs_dir).resolve()
    if path.is_relative_to(docs):
        return path.relative_to(docs).as_posix()
    return f"{FOLDER}/{path.relative_to(docs.parent).as_posix()}"
