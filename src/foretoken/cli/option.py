"""Options that several commands share, each declared once: single ones, and groups for loading,
which `cli.command` takes apart. Also `--speculative-config`, vLLM's JSON for draft and gamma."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple, get_args

from typer import Option

from foretoken.cli.sampling_options import as_json, group, typer_option
from foretoken.errors import InputError, shown
from foretoken.loading import hub
from foretoken.loading.options import OPTIONS, LoadOptions
from foretoken.sampling import params

if TYPE_CHECKING:
    from foretoken.speculator import Speculator


def _loading(name: str) -> Any:
    """Return the annotation of an option of `foretoken.load`."""
    return typer_option(name, OPTIONS[name], OPTIONS[name].help)


Target = Annotated[
    str | None, Option(help="Target model: a folder or hub id. Default: the pair that ships.")
]
Draft = Annotated[
    str | None,
    Option(
        help="Draft: a folder or hub id, self, self:int8, lookup, heads:FILE, "
        "ngram:FILE, copy, uniform or none. Default: with --target, self or lookup, as measured "
        "costs say; else the one that ships."
    ),
]


def target(positional: str | None, named: str | None) -> str | None:
    """Return the target, given by position or by --target. InputError for two."""
    if positional is not None and named is not None and positional != named:
        raise InputError(f"the target is {positional!r} and --target {named!r}; give one of them")
    return positional if named is None else named


PROMPTS = 'One prompt per line, or .jsonl: {"prompt": text or ids, "id": any}.'
Prompts = Annotated[Path, Option(help=f"File of prompts. {PROMPTS}")]
Limit = Annotated[int | None, Option(help="Use only the first prompts of the file. Default: all.")]
Gamma = Annotated[int, Option(help="Draft tokens per step while measuring.")]
Guesses = Annotated[
    int | None,
    Option(help="Draft tokens per step; 0 decodes plainly. Default: chosen before every step."),
]
Rule = Annotated[
    str,
    Option(
        help="Acceptance method: block, speculative, or coupled (a seed gives one text, whatever "
        "the draft); match and rejection are for comparison."
    ),
]
Lenience = Annotated[
    float,
    Option(help="Below 1, accept draft tokens more easily and change the distribution; 1: exact."),
]
Temperature = Annotated[float, Option(help=params.OPTIONS["temperature"].help)]
TopK = Annotated[int, Option(help=params.OPTIONS["top_k"].help)]
TopP = Annotated[float, Option(help=params.OPTIONS["top_p"].help)]
MinP = Annotated[float, Option(help=params.OPTIONS["min_p"].help)]
MaxNewTokens = Annotated[int, Option(help="New tokens per prompt, at most.")]
Seed = Annotated[int, Option(help="Seed of the random numbers.")]
TextSeed = Annotated[
    int, Option(help="Seed of the text. The same seed, pair and gamma give the same text.")
]
DraftRevision = Annotated[str | None, get_args(_loading("draft_revision"))[1]]
Json = Annotated[bool, Option("--json", help="Print one JSON document.")]
Examples = Annotated[
    Path,
    Option(
        help="Text to train on: .txt or .txt.gz or a folder of them for a decoder, one source per "
        'line for an encoder-decoder; or pairs, .tsv or .jsonl of {"source": ..., "target": ...}.'
    ),
]


def _group(name: str) -> Any:
    """Make a dataclass of the options of `foretoken.load` in a group."""
    declarations = {n: each for n, each in OPTIONS.items() if each.group == name}
    declarations.pop("generation_config", None)  # a flag of its own
    return group(name, declarations, LoadOptions())


@dataclass(frozen=True)
class Origin(_group("origin")):
    """Options of reading a model: its version, and whether its own code may run."""


@dataclass(frozen=True)
class TargetReading(_group("reading"), Origin):
    """Options for reading a target, wherever it runs."""

    ignore_generation_config: Annotated[
        bool,
        Option(
            "--ignore-generation-config",
            help=OPTIONS["generation_config"].help,
            rich_help_panel="Loading",
        ),
    ] = False

    @property
    def arguments(self) -> dict[str, Any]:
        """Return these as keyword arguments of `foretoken.load`."""
        keywords = asdict(self)
        ignored = keywords.pop("ignore_generation_config")
        return keywords | {"generation_config": "ignore" if ignored else None}


@dataclass(frozen=True)
class Placing(_group("placing")):
    """Options of where a model runs, and in which precision."""


@dataclass(frozen=True)
class Loading(_group("target"), TargetReading, Placing):
    """All options of a target that generates."""

    def load(self, target: str | None, draft: str | None) -> Speculator:
        """Call `foretoken.load` with these options."""
        from foretoken.loading.load import load  # late: torch takes seconds to import

        return load(target, draft, **self.arguments)


@dataclass(frozen=True)
class PairLoading(_group("pair"), Loading):
    """The same for a target with a draft."""

    def require(self, target: str | None) -> None:
        """Raise InputError or RefusedError for invalid options and for a target in neither a folder
        nor the hub: before torch is imported, which takes seconds."""
        LoadOptions(**self.arguments)
        if target is not None:
            hub.way(hub.path(target), self.revision)


def require_folder(out: Path, flag: str = "--out") -> None:
    """Raise InputError for a file in a missing folder, before work that may take hours."""
    if not out.parent.is_dir():
        raise InputError(f"there is no folder {out.parent}; make it or give another {flag}")


def require_file(out: Path, flag: str = "--out") -> None:
    """Raise InputError for a file in a missing folder, and for a folder in its place."""
    require_folder(out, flag)
    if out.is_dir():
        raise InputError(f"{out} is a folder; give another {flag}, for a file")


Speculative = Annotated[
    str | None,
    Option(
        help='Set draft and gamma as vLLM does: {"method": "draft_model", "model": "...", '
        '"num_speculative_tokens": 4}.'
    ),
]
METHODS = {"draft_model": None, "ngram": "lookup"}
RULES = {"standard": "speculative", "block": "block"}
KEYS = ("method", "model", "num_speculative_tokens", "rejection_sample_method")


class Chosen(NamedTuple):
    """The draft, gamma (None: automatic) and the acceptance method."""

    draft: str | None
    gamma: int | None = None
    rule: str = "block"


def speculative(text: str | None, draft: str | None) -> Chosen:
    """Read --speculative-config and --draft. InputError for both, and for values of vLLM's that
    foretoken lacks."""
    if text is None:
        return Chosen(draft)
    if draft is not None:
        raise InputError("--draft and --speculative-config are both given; give one")
    config = as_json("speculative_config", text)
    if not isinstance(config, dict):
        raise InputError(f"--speculative-config is {shown(text)}; give a JSON object")
    for name in config:
        if name not in KEYS:
            near = get_close_matches(name, KEYS, 1, 0.6)
            remedy = f"did you mean {near[0]}?" if near else f"known here are {', '.join(KEYS)}"
            raise InputError(f"--speculative-config holds {shown(name)}; {remedy}")
    return Chosen(_draft(config), _gamma(config), _rule(config))


def _draft(config: dict[str, Any]) -> str:
    model = config.get("model")
    method = config.get("method", "draft_model" if model else None)
    if method not in METHODS:
        raise InputError(
            f"--speculative-config's method is {shown(method)}; give one of {', '.join(METHODS)}"
        )
    name = METHODS[method] or model
    if not isinstance(name, str) or (METHODS[method] and model not in (None, "ngram")):
        raise InputError(f"--speculative-config's model is {shown(model)}; name the draft model")
    return name


def _gamma(config: dict[str, Any]) -> int | None:
    gamma = config.get("num_speculative_tokens")
    if gamma is not None and (not isinstance(gamma, int) or isinstance(gamma, bool) or gamma < 1):
        raise InputError(
            f"--speculative-config's num_speculative_tokens is {shown(gamma)}; give a whole number "
            "from 1, or leave it out: it is then chosen before every step"
        )
    return gamma


def _rule(config: dict[str, Any]) -> str:
    method = config.get("rejection_sample_method", "block")
    if method not in RULES:
        raise InputError(
            f"--speculative-config's rejection_sample_method is {shown(method)}; give one of "
            f"{', '.join(RULES)}: others change the text's distribution"
        )
    return RULES[method]
