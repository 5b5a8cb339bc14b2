"""Options that several commands share: single options, and dataclasses of options, which
`cli.command` unpacks. Each dataclass is a panel of `--help`. Options of sampling and of loading are
derived from the declarations of `SamplingParams` and `LoadOptions`."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, fields, make_dataclass, replace
from pathlib import Path
from secrets import token_hex
from types import SimpleNamespace
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, TypeVar, get_args

from typer import Argument, Option

from foretoken.cli.command import format_flag
from foretoken.errors import InputError, RefusedError, format_value
from foretoken.loading import adapters, hub, named_models
from foretoken.loading.options import LOAD_OPTIONS as LOADING
from foretoken.loading.options import LoadOptions
from foretoken.sampling.checks import (
    FROM_ONE,
    Check,
    Choice,
    Count,
    Number,
    as_biases,
    as_decay,
    as_flag,
    as_id,
    as_ids,
    as_logit_bias,
    as_sequences,
    as_strings,
)
from foretoken.sampling.options import DeclaredOption, Panel
from foretoken.sampling.params import SAMPLING_OPTIONS, SamplingParams
from foretoken.sampling.speculation import SPECULATION_OPTIONS as SPECULATION
from foretoken.storage.files import name_path_in_errors, parse_json, read_text

# Functions import torch late: the import takes seconds, and mistakes of the user are reported first
if TYPE_CHECKING:
    from foretoken.loading.target import TargetInfo
    from foretoken.speculator import Speculator

NumberType = TypeVar("NumberType", int, float)

# Declared options on the command line


def parse_json_option(name: str, value: str) -> Any:
    """Parse an option's value as JSON. Raises InputError for invalid JSON and for NaN."""
    try:
        parsed = json.loads(value)
        json.dumps(parsed, allow_nan=False)
    except (ValueError, RecursionError) as error:
        raise InputError(
            f"{name} is {format_value(value)}, which is not valid JSON: {error}"
        ) from None
    return parsed


def _parse_list(name: str, value: str) -> Any:
    try:
        return parse_json(f"[{value}]")
    except ValueError:
        raise InputError(
            f"{name} is {format_value(value)}; give numbers separated by commas"
        ) from None


def parse_numbers(name: str, text: str, kind: type[NumberType]) -> tuple[NumberType, ...]:
    """Parse the value of option `name` as numbers separated by commas. Raises InputError for
    anything else."""
    try:
        return tuple(map(kind, text.split(",")))
    except ValueError:
        raise InputError(f"{name} is {text!r:.60}; give numbers separated by commas") from None


# For the check of a declared option: the option's type on the command line, and the function that
# parses the option's string
OPTION_TYPES: dict[Any, Any] = {
    Number: float,
    Count: int,
    Choice: str,
    as_id: int,
    as_flag: bool,
    as_strings: list[str],
}
OPTION_PARSERS: dict[Check, Callable[[str, str], Any]] = {
    as_ids: _parse_list,
    as_sequences: parse_json_option,
    as_biases: parse_json_option,
    as_logit_bias: parse_json_option,
    as_decay: _parse_list,
}


def _make_annotation(name: str, declared: DeclaredOption) -> Any:
    """Return the annotation of a declared option's field: its type on the command line, with a
    Typer option."""
    check = declared.check
    kind = OPTION_TYPES.get(check, OPTION_TYPES.get(type(check), str))
    help = f"{declared.help} Give ids separated by commas." if check is as_ids else declared.help
    metavar = "<str>" if kind == list[str] else None  # "<list[str]>" is too wide
    option = Option(
        declared.flag or format_flag(name),
        help=help,
        rich_help_panel=declared.panel,
        metavar=metavar,
    )
    return Annotated[kind if kind is bool else kind | None, option]


def get_changed_options(options: TargetFileOptions) -> dict[str, Any]:
    """Return the keyword arguments of `foretoken.load` whose values differ from the defaults."""
    defaults = LoadOptions()
    return {n: each for n, each in options.arguments.items() if each != getattr(defaults, n)}


def format_flags(keywords: Mapping[str, Any]) -> list[str]:
    """Return keyword arguments of `foretoken.load` as the words of a command line: flags, and a
    value after each flag that takes a value."""
    words: list[str] = []
    for name, value in keywords.items():
        words.append(LOADING[name].flag or format_flag(name))
        words += [] if value is True or LOADING[name].flag else [str(value)]
    return words


def make_option_group(declarations: Mapping[str, DeclaredOption], defaults: object) -> Any:
    """Make a dataclass with a field for each declared option. The default of a field is the
    attribute of `defaults` with the same name."""
    members: list[tuple[str, Any, Any]] = []
    for each, declared in declarations.items():
        default = getattr(defaults, each)
        default = bool(default) if declared.check is as_flag else default
        default = None if default == () else default
        members.append((each, _make_annotation(each, declared), field(default=default)))
    return make_dataclass("Group", members, frozen=True)


# Sampling


def _select_options(*, one_text: bool) -> dict[str, DeclaredOption]:
    """Return the sampling options of a single output (`one_text` True) or of a whole request
    (`one_text` False), in the order of the help's panels."""
    names = [
        n for n, each in SAMPLING_OPTIONS.items() if each.one_text is one_text and n != "structured"
    ]
    return {
        n: SAMPLING_OPTIONS[n]
        for panel in get_args(Panel)
        for n in names
        if SAMPLING_OPTIONS[n].panel == panel
    }


PerSequenceGroup: Any = make_option_group(_select_options(one_text=True), SamplingParams())
PerRequestGroup: Any = make_option_group(_select_options(one_text=False), SamplingParams())


@dataclass(frozen=True)
class StructuredOutputOptions:
    """Options for `SamplingParams.structured`, a constraint on the output. At most one may be
    given."""

    panel: ClassVar[str] = "Structured output"
    json_schema: Annotated[Path | None, "Make the output match the JSON schema in this file."] = (
        None
    )
    regex: Annotated[str | None, "Make the output match this regular expression."] = None
    grammar: Annotated[Path | None, "Make the output match the Lark grammar in this file."] = None
    choice: Annotated[list[str] | None, "Allow only this output; repeat it to allow others."] = None

    def build_structured(self) -> dict[str, Any] | None:
        """Return the value for `SamplingParams.structured`, or None if no option is given. Raises
        RefusedError if several are given, InputError for an invalid file."""
        values = {
            field.name: getattr(self, field.name) for field in fields(StructuredOutputOptions)
        }
        names = [name for name, value in values.items() if value not in (None, [])]
        if len(names) > 1:
            flags = " and ".join(map(format_flag, names))
            raise RefusedError(f"an output cannot follow {flags} at once; give one of them")
        if self.json_schema is not None:
            schema = read_text(self.json_schema, "a JSON schema")
            return {"json_schema": parse_json_option(str(self.json_schema), schema)}
        if self.grammar is not None:
            return {"lark": read_text(self.grammar, "a Lark grammar")}
        return {names[0]: values[names[0]]} if names else None


@dataclass(frozen=True)
class SequenceOptions(StructuredOutputOptions, PerSequenceGroup):
    """Sampling options of a command that generates one output per prompt."""

    @property
    def chosen_values(self) -> dict[str, Any]:
        """The options that the user set, as JSON values keyed by field of `SamplingParams`. Raises
        InputError for an invalid value."""
        values: dict[str, Any] = {**vars(self), "structured": self.build_structured()}
        defaults = {field.name: field.default for field in fields(self)}
        options: dict[str, Any] = {}
        for name, declared in SAMPLING_OPTIONS.items():  # the first error in this order is raised
            value = values.get(name)
            if value is None or value is False or value == [] or value == defaults.get(name):
                continue
            reader = OPTION_PARSERS.get(declared.check)
            options[name] = reader(name, value) if reader else value
            declared.check(name, options[name])
        return options


DEFAULT_ANSWER_TOKENS = 1024  # default maximum of new tokens in a chat's reply
_MODEL_DEFAULT_HELP = "Default: from the model's generation config"
_ANSWER_HELP = {
    "temperature": f"Sampling temperature; 0 is greedy. {_MODEL_DEFAULT_HELP}, else 0.",
    "top_k": f"{SAMPLING_OPTIONS['top_k'].help} {_MODEL_DEFAULT_HELP}.",
    "top_p": f"{SAMPLING_OPTIONS['top_p'].help} {_MODEL_DEFAULT_HELP}.",
    "min_p": f"{SAMPLING_OPTIONS['min_p'].help} {_MODEL_DEFAULT_HELP}.",
    "max_new_tokens": f"Maximum of new tokens per reply. Default: {DEFAULT_ANSWER_TOKENS:,}.",
}
_ChatGroup: Any = make_option_group(
    {name: replace(SAMPLING_OPTIONS[name], help=help) for name, help in _ANSWER_HELP.items()},
    SimpleNamespace(**dict.fromkeys(_ANSWER_HELP)),
)


@dataclass(frozen=True)
class ChatSamplingOptions(_ChatGroup, SequenceOptions):
    """Sampling options of a chat; their defaults come from the model's generation config."""


@dataclass(frozen=True)
class SamplingOptions(PerRequestGroup, SequenceOptions):
    """All sampling options."""


# Loading


def _make_loading_group(name: str) -> Any:
    declarations = {n: each for n, each in LOADING.items() if each.group == name}
    declarations.pop("generation_config", None)  # its flag is --ignore-generation-config
    return make_option_group(declarations, LoadOptions())


@dataclass(frozen=True)
class OriginOptions(_make_loading_group("origin")):
    """Options for the origin of a model: its revision, and whether the model's code may run."""

    panel: ClassVar[str] = "Loading"


@dataclass(frozen=True)
class TargetFileOptions(_make_loading_group("reading"), OriginOptions):
    """Options for loading a target's files, which do not depend on the backend."""

    ignore_generation_config: Annotated[bool, LOADING["generation_config"].help] = False

    @property
    def arguments(self) -> dict[str, Any]:
        """Return the options as keyword arguments of `foretoken.load`."""
        keywords = asdict(self)
        ignored = keywords.pop("ignore_generation_config")
        return keywords | {"generation_config": "ignore" if ignored else None}


@dataclass(frozen=True)
class PlacementOptions(_make_loading_group("placing")):
    """Options for the device, backend and precision of a model."""


@dataclass(frozen=True)
class TargetLoadOptions(_make_loading_group("target"), TargetFileOptions, PlacementOptions):
    """All options for loading a target that generates, without a draft."""

    def load(
        self,
        target: str | None,
        draft: str | None,
        check: Callable[[TargetInfo], object] = lambda target: None,
    ) -> Speculator:
        """Return the pair that `foretoken.load` loads with these options. Before weights are loaded
        or converted, `check` is called with the target's config and tokenizer, and may raise."""
        from foretoken.loading.load import load_checked

        return load_checked(check, target, draft, **self.arguments)


@dataclass(frozen=True)
class PairLoadOptions(_make_loading_group("pair"), TargetLoadOptions):
    """All options for loading a target with a draft."""

    def require(self, target: str | None) -> None:
        """Raise InputError or RefusedError if an option is invalid or the target is neither a
        folder nor a hub id. Does not import torch, which takes seconds."""
        LoadOptions(**self.arguments)
        if (adapter := self.arguments["adapter"]) is not None:
            adapters.find_adapter(adapter)
        if target is not None:
            hub.require_model(target, self.revision)


# Single options

Target = Annotated[
    str | None,
    "Target model: a folder, hub id, GGUF file, or a name in foretoken cache list. "
    "Default: smollm2 if it is installed, else novels.",
]
DRAFT_HELP = (
    "Draft: a folder, hub id or GGUF file, self, self:int8, self:LAYERS, lookup, mtp, copy, "
    "uniform, none, or MODULE:ARGUMENT (your own drafter); A+B, such as lookup+self:int4+DIR, uses "
    "in each step the draft that is the fastest in this sequence. Default: for novels and smollm2 "
    "the draft that ships with them, else lookup, or self if serve or bench measured that it is "
    "faster."
)
Draft = Annotated[str | None, DRAFT_HELP]


def merge_target(positional: str | None, named: str | None) -> str | None:
    """Return the target, which may be given as an argument (`positional`) or with --target
    (`named`); None if neither is given. Raises InputError if the two differ."""
    if positional is not None and named is not None and positional != named:
        raise InputError(
            f"the argument TARGET is {positional!r}, but --target is {named!r}; give one of them"
        )
    return positional if named is None else named


def resolve_target(target: str | None) -> str:
    """Return `target`, or the default target if `target` is None. The name of a default other than
    novels is printed."""
    if target is not None:
        return target
    if (default := named_models.get_default_target()) != named_models.NOVELS:
        print(f"target: {default}, by default (see foretoken cache list)", file=sys.stderr)
    return default


TargetArgument = Annotated[
    str | None, Argument(metavar="TARGET", help="Target model, as with --target.")
]
PromptArguments = Annotated[
    list[str] | None,
    Argument(
        metavar="[TARGET] PROMPT",
        help="Complete this prompt. With two words the first is the target, as with --target; "
        "one word that names a model is the target. Default: prompt from standard input.",
    ),
]


def split_arguments(words: list[str] | None, named: str | None) -> tuple[str | None, str | None]:
    """Return the target and the prompt of a command. `words`: the arguments [TARGET] PROMPT;
    `named`: the value of --target.

    A single word is the prompt, unless it names a model on this machine. The prompt is None if it
    comes from a file or standard input. Raises InputError for more than two words or two different
    targets.
    """
    words = words or []
    if len(words) > 2:
        raise InputError(
            f"{len(words)} arguments are given, at most 2 are allowed; put the prompt in quotes"
        )
    alone = len(words) == 1 and named is None and hub.is_model(words[0])
    place = words[0] if alone or len(words) == 2 else None
    return merge_target(place, named), words[-1] if words and not alone else None


PROMPTS_HELP = 'One prompt per line, or .jsonl: {"prompt": text or ids, "id": any}.'
Prompts = Annotated[Path, f"File of prompts. {PROMPTS_HELP}"]
Gamma = Annotated[int | None, SPECULATION["gamma"].help]
Rule = Annotated[str, SPECULATION["rule"].help]
Lenience = Annotated[float, SPECULATION["lenience"].help]
Temperature = Annotated[float, SAMPLING_OPTIONS["temperature"].help]
TopK = Annotated[int, SAMPLING_OPTIONS["top_k"].help]
TopP = Annotated[float, SAMPLING_OPTIONS["top_p"].help]
Seed = Annotated[int, "Seed of the random numbers."]
TextSeed = Annotated[
    int, "Seed of the random numbers. The same seed, pair and gamma give the same output."
]
DraftRevision = Annotated[
    str | None, get_args(_make_annotation("draft_revision", LOADING["draft_revision"]))[1]
]
Json = Annotated[bool, Option("--json", help="Print the result as one JSON document.")]
TrainingData = Annotated[
    Path,
    "Training data. For a decoder: .txt, .txt.gz or a folder of these; for an encoder-decoder: one "
    'source per line; for both: pairs, .tsv or .jsonl of {"source": ..., "target": ...}.',
]


def require_folder(out: Path, flag: str = "--out") -> None:
    """Raise InputError if the folder of the file `out` does not exist. Called before work that may
    take hours. `flag`: the option that set `out`, for the message."""
    if not out.parent.is_dir():
        raise InputError(f"there is no folder {out.parent}; create it, or give another {flag}")


def require_file(out: Path, flag: str = "--out") -> None:
    """Raise an error if the file `out` cannot be written: InputError if `out` is a folder or lies
    in a missing folder, OSError if the folder is not writable."""
    require_folder(out, flag)
    if out.is_dir():
        raise InputError(f"{out} is a folder; give a file as {flag}")
    if not out.exists() or out.is_file():
        temporary = out.with_name(f".{token_hex(8)}.part")  # as `write_atomically` names it
        with name_path_in_errors(out):
            temporary.touch(exist_ok=False)
            temporary.unlink()


# Replicas, and extras


@dataclass(frozen=True)
class ClusterOptions:
    """Options for the number of engines and the Ray cluster that the engines run on."""

    panel: ClassVar[str] = "Replicas"
    replicas: Annotated[int | None, "Run this many engines, each in its own process on Ray."] = None
    threads: Annotated[
        int | None, "Threads per replica. Default: an equal share of the processors."
    ] = None
    ray: Annotated[
        str | None, "Ray cluster: host:port, auto (on this machine), or local (start a cluster)."
    ] = None

    @property
    def used(self) -> bool:
        return self.ray is not None or self.replicas is not None

    @property
    def address(self) -> str:
        return self.ray or "local"

    def require(self) -> None:
        """Raise InputError for --threads without replicas, for an empty address and for numbers
        below 1."""
        for name in ("replicas", "threads"):
            if (count := getattr(self, name)) is not None:
                FROM_ONE(format_flag(name), count)
        if self.threads is not None and not self.used:
            raise InputError("--threads needs --replicas; add --replicas, or set OMP_NUM_THREADS")
        if self.ray == "":
            raise InputError("--ray is empty; give host:port, auto or local")


@contextmanager
def require_extra(extra: str) -> Iterator[None]:
    """Context manager around imports that need the extra `extra`: if a package is not installed,
    raise InputError with the pip command."""
    try:
        yield
    except ModuleNotFoundError as error:
        if error.name is None or error.name.startswith("foretoken"):
            raise
        raise InputError(
            f"this needs {error.name}, which is missing; pip install 'foretoken[{extra}]'"
        ) from None
