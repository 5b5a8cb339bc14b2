"""Names of models: a folder, or the hub and its cache. A name that leads nowhere is
refused at once; the libraries would retry for twenty seconds.

Imports no torch, so that a mistake on the command line is reported without delay.
"""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path
from typing import Any

from foretoken.errors import InputError, one_line, shown

HUB_ID = re.compile(r"(?=.{1,96}$)[\w.-]+(/[\w.-]+)?")
WAIT = 5.0  # seconds for the hub to answer
REMEDY = "give a model's folder or a hub id"


def path(name: str | Path) -> str:
    """Return the folder or hub id as a string. Raises InputError for a name that can be neither."""
    if not isinstance(name, str | Path):
        raise InputError(f"target is {shown(name)}; give a folder, a hub id or a model")
    if is_folder(name):
        return str(name)
    if isinstance(name, Path) or not HUB_ID.fullmatch(name):
        raise InputError(f"{str(name)!r:.100} is no folder; {REMEDY}")
    return name


def is_folder(name: str | Path) -> bool:
    try:
        return bool(str(name)) and Path(name).is_dir()
    except OSError:  # a name that is too long
        return False


def way(place: str, revision: str | None) -> dict[str, Any]:
    """Return options with which the libraries read a folder or hub id: `local_files_only` where the
    hub cannot be reached but its cache has the model. Raises InputError where neither has it, and
    for a revision of a folder."""
    if not is_folder(place):
        return dict(_hub_options(place, revision))
    if revision is not None:
        raise InputError(
            f"revision is {shown(revision)}, but {place} is a folder, which has none; leave it out"
        )
    return {}


@cache  # asked once for a model and its tokenizer
def _hub_options(name: str, revision: str | None) -> dict[str, Any]:
    from huggingface_hub import errors as hub  # late: `--help` does without it
    from huggingface_hub import get_hf_file_metadata, hf_hub_url, try_to_load_from_cache

    try:
        get_hf_file_metadata(hf_hub_url(name, "config.json", revision=revision), timeout=WAIT)
        return {}
    except (hub.GatedRepoError, hub.EntryNotFoundError):
        return {}  # the hub has it; transformers says what is wrong with it
    except hub.RevisionNotFoundError:
        raise InputError(f"the hub has {name}, but no revision {revision!r}") from None
    except hub.HFValidationError:
        raise InputError(f"{name!r} is no folder; {REMEDY}") from None
    except hub.RepositoryNotFoundError:
        why = "the hub has no such model"
    except hub.OfflineModeIsEnabled:
        why = "HF_HUB_OFFLINE keeps the hub from being asked"
    except Exception as error:  # network errors are of many types
        if getattr(getattr(error, "response", None), "status_code", None) == 404:
            why = "the hub has no such model"
        else:
            why = f"the hub cannot be reached ({one_line(error)})"
    if isinstance(try_to_load_from_cache(name, "config.json", revision=revision), str):
        return {"local_files_only": True}
    raise InputError(f"there is no folder {name!r}, and {why}; {REMEDY}")
