"""`foretoken export`: the same target, draft and gamma for another system."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from foretoken.cli import option
from foretoken.cli.command import command
from foretoken.cli.render import page, prose
from foretoken.errors import InputError, shown
from foretoken.lab.export import (
    LLAMA_CPP,
    OPENVINO_GENAI,
    SGLANG,
    VLLM,
    Export,
    ExportSetting,
    Fact,
    System,
)
from foretoken.lab.export import export as make

SYSTEMS: dict[str, System] = {
    "vllm": VLLM,
    "sglang": SGLANG,
    "llama.cpp": LLAMA_CPP,
    "openvino-genai": OPENVINO_GENAI,
}


@command
def export(
    system: Annotated[str, typer.Argument(help=f"System to export to: {', '.join(SYSTEMS)}.")],
    files: Annotated[
        list[Path] | None,
        typer.Argument(
            help="Export the fastest draft and gamma of these files of foretoken measure --out."
        ),
    ] = None,
    target: option.Target = None,
    draft: Annotated[
        str | None,
        typer.Option(help="Draft: a folder or hub id, lookup or none.", show_default=False),
    ] = None,
    gamma: Annotated[
        int | None, typer.Option(help="Draft tokens per step.", show_default=False)
    ] = None,
    temperature: option.Temperature = 0.0,
    as_json: option.Json = False,
) -> None:
    """Print how to run the same target, draft and gamma in another system, and how it differs."""
    if system not in SYSTEMS:
        raise InputError(f"system is {shown(system)}; give one of {', '.join(SYSTEMS)}")
    if files and (target or draft or temperature or gamma is not None):
        raise InputError(
            "give files of measurements, or --target, --draft, --gamma and --temperature; not both"
        )
    setting = _planned(files) if files else _setting(target, draft, gamma, temperature)
    exported = make(SYSTEMS[system], setting)
    if as_json:
        print(json.dumps(_document(exported, setting), allow_nan=False))
    else:
        for line in exported.steps:
            print(line)
        _show(exported, setting, page(sys.stderr))  # not into a script that the rest is written to


def _planned(files: list[Path]) -> ExportSetting:
    from foretoken.cli.measure import saved  # late: torch takes seconds to import
    from foretoken.lab.measurement.plan import plan, setting

    planned = plan(saved(files))
    return setting(planned.first.measurement, planned.gamma)


def _setting(
    target: str | None, draft: str | None, gamma: int | None, temperature: float
) -> ExportSetting:
    if target is None:
        import foretoken

        assets = Path(foretoken.__file__).parent / "assets"
        target, draft = str(assets / "target"), draft or str(assets / "draft")
    if draft is None:
        raise InputError("a target of yours needs --draft; give a folder, a hub id, lookup or none")
    if gamma is None and draft != "none":
        raise InputError(
            "gamma is chosen before every step here, other systems take one number; give --gamma, "
            "as foretoken measure picks it"
        )
    if draft == "none" and gamma:
        raise InputError(f"gamma is {gamma} with --draft none; leave --gamma out, or name a draft")
    return ExportSetting(
        target, draft, gamma or 0, temperature, encoder_decoder=_encodes(Path(target))
    )


def _encodes(folder: Path) -> bool:
    """Return True if a folder's config is of an encoder-decoder; hub ids are not looked up."""
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        return bool(config.get("is_encoder_decoder"))
    except (OSError, ValueError, AttributeError):
        return False


def _document(exported: Export, setting: ExportSetting) -> dict[str, Any]:
    return {
        "system": exported.system.name,
        "version": exported.system.version,
        "flags": exported.system.flags,
        "setting": asdict(setting),
        "steps": exported.steps,
        "law": [{"text": fact.text, "source": fact.source} for fact in exported.distribution],
        "lacks": [{"text": fact.text, "source": fact.source} for fact in exported.lacks],
    }


def _show(exported: Export, setting: ExportSetting, console: Console) -> None:
    system = exported.system
    console.print()
    mode = f"draft {setting.draft}, gamma {setting.gamma}" if setting.gamma else "plain decoding"
    head = f"{system.name} {system.version}"
    prose(console, f"{head}, for {setting.target} with {mode}; its options: {system.flags}", head)
    for title, facts in (
        ("Its verification and the target's distribution:", exported.distribution),
        ("Differences, and options it lacks:", exported.lacks),
    ):
        if facts:
            console.print()
            prose(console, title, title)
        for fact in facts:
            _tell(fact, console)


def _tell(fact: Fact, console: Console) -> None:
    prose(console, f"- {fact.text} [{fact.source}]")
