"""`foretoken drafts`: list the drafts for a target, on this machine and on the Hugging Face hub."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

from typer import Argument

from foretoken.cli import option
from foretoken.cli.command import command
from foretoken.cli.render import make_table, open_console, print_paragraph
from foretoken.errors import InputError
from foretoken.loading import draft_candidates, hub_search, inventory
from foretoken.loading.draft_candidates import REASONS, DraftCandidate


@command
def drafts(
    model: Annotated[
        str,
        Argument(
            metavar="MODEL",
            help="The target: a folder, hub id, GGUF file, or a name in foretoken cache list.",
        ),
    ],
    folders: Annotated[
        list[Path] | None,
        Argument(metavar="FOLDER...", help="Also search these folders and their subfolders."),
    ] = None,
    online: Annotated[
        bool,
        "Also search the Hugging Face hub, by the base models and names of its drafts. Without "
        "this option, nothing is requested from the network.",
    ] = False,
    as_json: option.Json = False,
) -> None:
    """List the drafts for a target, the most promising first.

    The list has the matching drafts and models on this machine, the drafts in foretoken's table of
    published drafts, and the drafts that need no files except the target's. Names in the list are
    values for --draft; drafts that are not on this machine are downloaded when they are used.
    """
    models = inventory.list_models(folders or ())
    target = draft_candidates.find_target(model, models)
    found, problem = draft_candidates.list_local_drafts(model, target, models), None
    if online:
        try:
            found_online = hub_search.search_hub(model)  # and the table's drafts that still exist
            local = (each for each in found if each.local)
            found = draft_candidates.merge_drafts((*local, *found_online))
        except InputError as error:  # the local drafts are still printed
            problem = error
    if as_json:
        rows = [{**asdict(each), "supported": each.supported} for each in found]
        document = {"target": model, "drafts": rows, "problem": problem and str(problem)}
        print(json.dumps(document, allow_nan=False))
    else:
        _print_drafts(found, note=target is None and not online)
    if problem is not None:
        raise problem


def _print_drafts(found: list[DraftCandidate], *, note: bool) -> None:
    """Print the drafts as a table, and the meanings of the reasons in the table. `note`: also print
    that only names were compared, because the target's files are not on this machine."""
    console = open_console()
    view = make_table("draft", "kind", "why", "here", "license", "MB", left=5)
    for each in found:
        kind = each.kind if each.supported else f"{each.kind} (not supported)"
        megabytes = "" if each.size is None else f"{each.size / 1e6:.0f}"
        view.add_row(
            each.name, kind, each.why, "yes" if each.local else "no", each.license or "", megabytes
        )
    console.print(view)
    for why, meaning in REASONS.items():
        if any(each.why == why for each in found):
            print_paragraph(console, f"{why}: {meaning}")
    if note:
        print_paragraph(
            console,
            "The target is not on this machine, so only names were compared; --online also "
            "searches the Hugging Face hub.",
        )
