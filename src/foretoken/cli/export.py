"""`foretoken export`: the same target, draft and gamma for another system, and how that differs.

The facts about a system, with their sources, and its commands are data (systems.toml).
"""

from __future__ import annotations

import json
import shlex
import sys
import tomllib
from dataclasses import asdict, dataclass, replace
from importlib.resources import files as resources
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from foretoken.cli import option
from foretoken.cli.command import command
from foretoken.cli.render import page, prose
from foretoken.errors import InputError, RefusedError, shown
from foretoken.loading import hub, named

if TYPE_CHECKING:
    from foretoken.measurement.plan import Plan

SYSTEMS = ("vllm", "sglang", "llama.cpp", "openvino-genai")
OURS = ("self", "heads", "ngram", "copy", "uniform")  # drafts, by the word before their colon
TOLD = ("target", "draft", "revision", "draft_revision")  # keywords of load that a setting has
VLLM_NGRAM = 8  # tokens of a match at most that vLLM is told: it wants a number, ours matches any


@dataclass(frozen=True, slots=True)
class ExportSetting:
    """A plan in the terms of this package: models as folders or hub ids, draft tokens per target
    call, and the temperature that requests will have."""

    target: str
    draft: str  # "none" for plain decoding
    gamma: int
    temperature: float = 0.0
    revision: str | None = None
    draft_revision: str | None = None
    encoder_decoder: bool = False
    measured: str = ""  # flags of the measurement beside the above

    @classmethod
    def of(cls, plan: Plan) -> ExportSetting:
        """Return the setting of a benchmark's fastest draft and gamma."""
        target = plan.load["target"]
        apart = {name: x for name, x in plan.load.items() if name not in TOLD}
        return cls(
            target,
            plan.draft,
            plan.gamma,
            plan.temperature,
            plan.load.get("revision"),
            plan.load.get("draft_revision"),
            _encodes(Path(target)),
            " ".join(option.flags(apart)),
        )

    @property
    def kind(self) -> str:
        """Kind of draft: "plain", "lookup" or "model"."""
        if self.draft == "none" or not self.gamma:
            return "plain"
        return "lookup" if self.draft == "lookup" else "model"


@command
def export(
    system: Annotated[str, typer.Argument(help=f"System to export to: {', '.join(SYSTEMS)}.")],
    file: Annotated[
        Path | None,
        typer.Argument(help="Export the fastest draft and gamma of a file of foretoken bench."),
    ] = None,
    target: option.Target = None,
    draft: Annotated[
        str | None,
        typer.Option(help="Draft: a folder or hub id, mtp, lookup or none.", show_default=False),
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
    if file and ((target, draft, gamma) != (None, None, None) or temperature):
        raise InputError(
            "give a file of foretoken bench, or --target, --draft, --gamma and --temperature; "
            "not both"
        )
    setting = _planned(file) if file else _setting(target, draft, gamma, temperature)
    known = known_of(system)
    require(known, setting)
    document = {
        "system": known["name"],
        "version": known["version"],
        "flags": known["flags"],
        "setting": asdict(setting),
        "steps": steps(known, setting),
        "law": facts(known["law"], setting) if setting.gamma else [],
        "lacks": [*_left_out(setting), *facts(known["lacks"], setting)],
    }
    if as_json:
        print(json.dumps(document, allow_nan=False))
        return
    for line in document["steps"]:
        print(line)
    _show(document, setting)


def _planned(file: Path) -> ExportSetting:
    from foretoken.measurement.plan import read_plan  # late: pydantic

    return ExportSetting.of(read_plan(file))


def _setting(
    target: str | None, draft: str | None, gamma: int | None, temperature: float
) -> ExportSetting:
    from foretoken.sampling.params import SamplingParams  # late: NumPy

    SamplingParams(temperature)  # raises InputError
    for name, value in (("target", target), ("draft", draft)):
        if value == "":
            raise InputError(f"{name} is empty; give a folder or a hub id, or leave it out")
    target = option.chosen(target)
    if pair := named.pair(target):
        target, draft = str(pair.target), draft or (str(pair.draft) if pair.draft else None)
    draft = str(named.draft(draft) or draft) if draft else None
    if draft is None:
        raise InputError("a target of yours needs --draft; give a folder, a hub id, lookup or none")
    if gamma is None and draft != "none":
        raise InputError(
            "gamma is chosen before every step here, other systems take one number; give --gamma, "
            "as foretoken bench picks it"
        )
    if (gamma or 0) < 0 or (draft == "none" and gamma):
        raise InputError(
            f"gamma is {gamma} with --draft {draft}; give 1 or more with a draft, or leave it out "
            "with --draft none"
        )
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


def known_of(system: str) -> dict[str, Any]:
    """Return what is known of another system."""
    text = (resources("foretoken.cli") / "systems.toml").read_text(encoding="utf-8")
    return tomllib.loads(text)[system]


def require(known: dict[str, Any], setting: ExportSetting) -> None:
    """RefusedError for a target, a draft or a temperature that the system does not have."""
    if setting.encoder_decoder:
        raise RefusedError(
            f"{setting.target} is an encoder-decoder, and {known['name']} {known['version']} has "
            "no speculation for one; export a decoder"
        )
    if setting.gamma and setting.draft.partition(":")[0] in OURS:
        raise RefusedError(
            f"draft {setting.draft} exists in foretoken only; give the folder of a model, lookup "
            "or none"
        )
    published = _published(setting)
    if published not in (None, *known.get("published", ())):
        raise RefusedError(
            f"draft {setting.draft} is of kind {published}, and {known['name']}'s options for such "
            f"drafts are not written here ({known['flags']}); give the folder of a model"
        )
    revision = setting.revision or setting.draft_revision
    if "convert" in known and revision is not None:
        raise RefusedError(
            f"revision {revision} of a model on the hub: {known['name']} reads converted files; "
            "give the folder of that revision"
        )
    if known.get("greedy") and setting.temperature and setting.gamma:
        raise RefusedError(
            f"temperature is {setting.temperature:g}: above 0 {known['name']}'s speculative "
            "sampling does not keep the target's law; give --temperature 0, or --draft none"
        )


def _published(setting: ExportSetting) -> str | None:
    """Return the kind of a draft that reads the target's states; None for a model."""
    from foretoken.loading.published import known_kind  # late: torch takes seconds to import

    if setting.kind != "model" or setting.draft == "mtp":
        return "mtp" if setting.kind == "model" else None
    return known_kind(setting.draft, setting.draft_revision)


def steps(known: dict[str, Any], setting: ExportSetting) -> list[str]:
    """Return shell commands, or lines of Python for OpenVINO GenAI."""
    at = f"do_sample=True, temperature={setting.temperature:g}, top_k=0"
    conversions, setting = _converted(known, setting)
    quote = json.dumps if known.get("python") else shlex.quote
    values = {
        "target": quote(setting.target),
        "draft": quote(setting.draft),
        "revision": _flag(known, "revision", setting.revision),
        "draft_revision": _flag(known, "draft_revision", setting.draft_revision),
        "gamma": setting.gamma,
        "verified": setting.gamma + 1,  # the last token counts among those that are verified
        "temperature": f"{setting.temperature:g}",
        "sampling": at if setting.temperature else "do_sample=False",
        "config": shlex.quote(json.dumps(vllm_config(setting))),
    }
    return [*conversions, *(line.format(**values) for line in known["steps"][setting.kind])]


def _flag(known: dict[str, Any], name: str, value: str | None) -> str:
    """Return an option of a system's command, where it has one and there is something to tell."""
    return "" if value is None or name not in known else f" {known[name]} {shlex.quote(value)}"


def _converted(known: dict[str, Any], setting: ExportSetting) -> tuple[list[str], ExportSetting]:
    """Return the commands that convert models for a system, comments in Python, and the setting
    with their results. Files that are converted already stay as they are."""
    roles = ("target", "draft") if setting.kind == "model" else ("target",)
    files = {role: _gguf(getattr(setting, role)) for role in roles}
    results = {"target": setting.target, "draft": setting.draft}
    results |= {role: str(file) for role, file in files.items() if file is not None}
    if "convert" not in known:
        return [], replace(setting, **results)
    commands: list[str] = []
    for role in roles:
        model = results[role]
        if Path(model).match(known["ready"]) or (Path(model) / known["ready"]).exists():
            continue
        if files[role] is not None:
            raise RefusedError(
                f"{model} is a GGUF file, which the converter for {known['name']} does not read; "
                "give the folder that it was made from"
            )
        if role == "draft" and _lacks_tokenizer(setting):
            model = "draft-with-tokenizer"
            both = f"{shlex.quote(setting.draft)}/* {shlex.quote(setting.target)}/*tokenizer*"
            commands.append(f"mkdir -p {model} && cp {both} {model}")
        results[role] = role + known["ending"]
        commands.append(known["convert"].format(model=shlex.quote(model), file=results[role]))
    comment = "# " if known.get("python") else ""
    return [comment + each for each in commands], replace(setting, **results)


def _gguf(model: str) -> Path | None:
    """The GGUF file that a model is in, which may be another machine's; None for another model."""
    if hub.is_folder(model) or hub.IN_HUB.fullmatch(model):
        return hub.gguf(model)
    return Path(model) if model.endswith(".gguf") else None


def _lacks_tokenizer(setting: ExportSetting) -> bool:
    """Return True if the target's folder has a tokenizer and the draft's has none: converters want
    one in each."""
    target, draft = Path(setting.target), Path(setting.draft)
    return (
        draft.is_dir() and not [*draft.glob("*tokenizer*")] and bool([*target.glob("*tokenizer*")])
    )


def vllm_config(setting: ExportSetting) -> dict[str, Any]:
    """Return vLLM's --speculative-config for a draft of its own or look-up."""
    if setting.kind == "lookup":
        return {
            "method": "ngram",
            "num_speculative_tokens": setting.gamma,
            "prompt_lookup_max": VLLM_NGRAM,
            "prompt_lookup_min": 1,
        }
    config: dict[str, Any] = {
        "method": _published(setting) or "draft_model",
        "model": setting.draft,
        "num_speculative_tokens": setting.gamma,
    }
    if setting.draft == "mtp":
        del config["model"]  # the target's own layer
    if setting.draft_revision is not None:
        config["revision"] = setting.draft_revision
    if setting.temperature:
        config["draft_sample_method"] = "probabilistic"
    return config


def _left_out(setting: ExportSetting) -> list[dict[str, str]]:
    if not setting.measured:
        return []
    text = f"it was measured with {setting.measured}, which the above does not ask for"
    return [{"text": text, "source": "the measurement"}]


def facts(known: list[dict[str, str]], setting: ExportSetting) -> list[dict[str, str]]:
    """Return the facts about drafts of this kind, or of all, each with its source."""
    concern = [fact for fact in known if fact.get("kind") in (None, setting.kind)]
    return [{"text": fact["text"], "source": fact["source"]} for fact in concern]


def _show(document: dict[str, Any], setting: ExportSetting) -> None:
    """Print the facts on standard error: not into a script that the steps are written to."""
    console = page(sys.stderr)
    mode = f"draft {setting.draft}, gamma {setting.gamma}" if setting.gamma else "plain decoding"
    head = f"{document['system']} {document['version']}"
    told = f"{head}, for {setting.target} with {mode}; its options: {document['flags']}"
    prose(console, told, head)
    for title, found in (
        ("Its verification and the target's distribution:", document["law"]),
        ("Differences, and options it lacks:", document["lacks"]),
    ):
        if found:
            console.print()
            prose(console, title, title)
        for fact in found:
            prose(console, f"- {fact['text']} [{fact['source']}]")
