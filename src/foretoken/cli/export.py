"""`foretoken export vllm`: print the vLLM command that serves the same target with the same draft
and gamma."""

from __future__ import annotations

import json
import shlex
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from foretoken.cli import option
from foretoken.cli.command import command
from foretoken.cli.render import open_console, print_paragraph
from foretoken.cli.speculative_config import read_plan
from foretoken.errors import InputError, RefusedError
from foretoken.loading import hub, named_models
from foretoken.loading.options import ROUNDED_DTYPES
from foretoken.loading.published_drafts import get_cached_kind
from foretoken.sampling.params import SamplingParams

FORETOKEN_ONLY_DRAFTS = ("self", "copy", "uniform")  # named drafts that vLLM lacks
# Options of a benchmark that the vLLM command contains or does not need; other options are reported
EXPORTED_OPTIONS = (
    "target",
    "draft",
    "revision",
    "draft_revision",
    "draft_dtype",
    "device",
    "runtime",
)
VLLM_METHODS = ("draft_model", "eagle3", "mtp", "dflash", "dspark")  # kinds of draft in vLLM
MAX_MATCH_TOKENS = 8  # vLLM's look-up needs a limit; foretoken's look-up has no limit
VLLM_DIFFERENCES_TEXT = (
    "vLLM chooses the dtype itself (--dtype float32 is foretoken's default), uses one gamma for "
    "all steps, refuses min_p, and has no lenience with a reported bias; with a seed, its output "
    "with draft tokens differs from its output without draft tokens."
)

app = typer.Typer(no_args_is_help=True, help="Print vLLM's command for the same pair.")


@dataclass(frozen=True, slots=True)
class ExportSetting:
    """The setting to export: target, draft ("none": plain decoding), gamma, and the temperature of
    requests."""

    target: str
    draft: str
    gamma: int
    temperature: float = 0.0
    revision: str | None = None
    draft_revision: str | None = None


@app.command()
@command
def vllm(
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
    """Print vLLM's command for the same target, draft and gamma, and how vLLM differs."""
    if file and ((target, draft, gamma) != (None, None, None) or temperature):
        raise InputError(
            "give either a file of foretoken bench or --target, --draft, --gamma and --temperature"
        )
    setting = (
        _settings_from_file(file)
        if file
        else _settings_from_options(target, draft, gamma, temperature)
    )
    config = make_speculative_config(setting)
    words = ["vllm", "serve", _find_gguf_or_name(setting.target)]
    words += ["--revision", setting.revision] if setting.revision else []
    words += ["--speculative-config", json.dumps(config)] if config else []
    line = shlex.join(words)
    if as_json:
        document = {"command": line, "speculative_config": config, "setting": asdict(setting)}
        print(json.dumps(document, allow_nan=False))
        return
    print(line)
    # Not on standard output, which may be saved as a script
    print_paragraph(open_console(sys.stderr), VLLM_DIFFERENCES_TEXT)


def _settings_from_file(file: Path) -> ExportSetting:
    plan = read_plan(file)
    target = plan.load["target"]
    if adapter := plan.load.get("adapter"):
        raise RefusedError(
            f"{file} measured {target} with the adapter {adapter}, which vLLM's command would "
            "leave out; merge the adapter into the model, and measure the merged model"
        )
    options = {n: each for n, each in plan.load.items() if n not in EXPORTED_OPTIONS}
    if options.get("dtype") not in ROUNDED_DTYPES:
        options.pop("dtype", None)
    if options:
        left_out = shlex.join(option.format_flags(options))
        print(
            f"vLLM's command leaves out these options of the benchmark: {left_out}",
            file=sys.stderr,
        )
    if _is_encoder_decoder(Path(target)):
        raise _make_encoder_decoder_error(target)
    revisions = plan.load.get("revision"), plan.load.get("draft_revision")
    if pair := named_models.find_pair(target):  # vLLM does not know foretoken's names
        target = str(pair.target)
    draft = _strip_lookup(plan.draft)
    return ExportSetting(target, draft, plan.gamma, plan.generate.temperature, *revisions)


def _settings_from_options(
    target: str | None, draft: str | None, gamma: int | None, temperature: float
) -> ExportSetting:
    SamplingParams(temperature)  # raises InputError
    for name, value in (("target", target), ("draft", draft)):
        if value == "":
            raise InputError(f"{name} is empty; give a folder or hub id, or leave out --{name}")
    target = option.resolve_target(target)
    if pair := named_models.find_pair(target):
        target, draft = str(pair.target), draft or (str(pair.draft) if pair.draft else None)
    draft = _strip_lookup(draft) if draft else None
    if draft is None:
        raise InputError("this target needs --draft; give a folder, a hub id, lookup or none")
    if gamma is None and draft != "none":
        raise InputError(
            "vLLM has no automatic gamma; give --gamma, for example the fastest in foretoken bench"
        )
    if gamma if draft == "none" else gamma is not None and gamma < 1:
        raise InputError(
            f"gamma is {gamma} with --draft {draft}; give --gamma 1 or more with a draft, and no "
            "--gamma with --draft none"
        )
    if _is_encoder_decoder(Path(target)):
        raise _make_encoder_decoder_error(target)
    return ExportSetting(target, draft, gamma or 0, temperature)


def _strip_lookup(draft: str) -> str:
    """Return the folder or name of a draft. For lookup+DRAFT, return the folder or name of DRAFT,
    because vLLM cannot combine look-up with a draft."""
    main_draft = named_models.strip_lookup(draft)
    if len(named_models.split_drafts(main_draft)) > 1:
        raise InputError(
            f"vLLM runs a single draft, not a choice among drafts; give one of {main_draft!r:.100}"
        )
    if main_draft != draft:
        print("vLLM cannot combine look-up with a draft; look-up is left out", file=sys.stderr)
    return str(named_models.find_draft_folder(main_draft) or main_draft)


def _is_encoder_decoder(folder: Path) -> bool:
    """Return whether a folder has the config of an encoder-decoder; False for a hub id."""
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        return bool(config.get("is_encoder_decoder"))
    except (OSError, ValueError, AttributeError):
        return False


def _make_encoder_decoder_error(target: str) -> RefusedError:
    return RefusedError(
        f"{target} is an encoder-decoder, which vLLM no longer serves; export a decoder"
    )


def _find_gguf_or_name(model: str) -> str:
    """Return the path of the GGUF file that `model` names, or `model` if there is no such file."""
    found = hub.find_gguf(model) if hub.is_folder(model) or hub.HUB_GGUF.fullmatch(model) else None
    return str(found or model)


def make_speculative_config(setting: ExportSetting) -> dict[str, Any] | None:
    """Return the value of vLLM's --speculative-config for a setting; None for plain decoding.

    Raises:
        RefusedError: vLLM does not support the setting's draft.
    """
    draft, count = setting.draft, {"num_speculative_tokens": setting.gamma}
    if draft == "none" or not setting.gamma:
        return None
    by_colon = ":" in draft and not (hub.is_folder(draft) or hub.HUB_GGUF.fullmatch(draft))
    if draft in FORETOKEN_ONLY_DRAFTS or by_colon:  # self:KIND or MODULE:ARGUMENT
        raise RefusedError(
            f"draft {draft} exists in foretoken only; give the folder of a model, lookup or none"
        )
    if draft == "lookup":
        match = {"prompt_lookup_max": MAX_MATCH_TOKENS, "prompt_lookup_min": 1}
        return {"method": "ngram", **count, **match}
    if draft == "mtp":  # a layer of the target
        config = {"method": "mtp", **count}
    else:
        method = get_cached_kind(draft, setting.draft_revision) or "draft_model"
        if method not in VLLM_METHODS:
            raise RefusedError(
                f"draft {draft} is of kind {method}, which vLLM does not have; give the folder of "
                "a model, lookup or none"
            )
        config = {"method": method, "model": _find_gguf_or_name(draft), **count}
    if setting.draft_revision is not None:
        config["revision"] = setting.draft_revision
    if setting.temperature:  # vLLM's default is greedy drafting
        config["draft_sample_method"] = "probabilistic"
    return config
