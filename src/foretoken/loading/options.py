"""Options of `foretoken.load`, each declared once: the checks, the command line (`cli.option`), the
signature of `load` and its Args are derived from the declarations.

Imports no torch, so that a mistake on the command line is reported without delay.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, TypedDict

from foretoken.errors import InputError
from foretoken.sampling.checks import Choice, as_flag, as_given
from foretoken.sampling.options import check_options, get_options, option

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

ROUNDED_DTYPES = ("int8", "int4")  # rounded weights make another model; on the CPU only
DTYPE_NAMES = ("float32", "float64", "bfloat16", "float16", *ROUNDED_DTYPES, "auto")
KV_DTYPE_NAMES = ("auto", "float32", "float16")
RUNTIME_NAMES = ("auto", "transformers", "native", "graphs", "compiled")
TAP_KINDS = ("inputs", "outputs")


def list_smaller_dtypes(dtype: str) -> tuple[str, ...]:
    """Return the rounded dtypes (int8, int4) that take fewer bytes than `dtype`."""
    return ROUNDED_DTYPES[ROUNDED_DTYPES.index(dtype) + 1 if dtype in ROUNDED_DTYPES else 0 :]


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadOptions:
    """Options of `foretoken.load` in addition to target and draft, checked on creation.

    An option's `group` determines which commands take the option: "origin": all that load a model;
    "reading": all that load a target; "placing": all that run a model; "target": all that generate;
    "pair": all with a draft.
    """

    dtype: str = option(
        "float32",
        Choice(DTYPE_NAMES),
        "Precision: float32, bfloat16, float16, float64 or auto; int8 and int4 round the weights, "
        "which makes another model.",
        "Loading",
        group="placing",
    )
    kv_dtype: str = option(
        "auto",
        Choice(KV_DTYPE_NAMES),
        "Precision of the target's keys and values: float32, float16 (faster at long contexts; the "
        "output has the distribution of the model with such a cache), or auto (native: float16 for "
        "int8 and int4, else float32; torch: the model's dtype).",
        "Loading",
        group="placing",
    )
    device: str = option("cpu", as_given, "Device: cpu, cuda, ...", "Loading", group="placing")
    runtime: str = option(
        "auto",
        Choice(RUNTIME_NAMES),
        "Backend: native, graphs, transformers, compiled (graphs with layers compiled by torch: "
        "faster on a GPU, after seconds of compilation), or auto (the first exact backend: on a "
        "CPU native, then transformers; on a GPU graphs, compiled for servers, files of prompts "
        "and benchmarks, then transformers).",
        "Loading",
        group="placing",
    )
    revision: str | None = option(
        None, as_given, "Commit, tag or branch of the target on the hub.", "Loading", group="origin"
    )
    trust_remote_code: bool = option(
        False,
        as_flag,
        "Run Python code that comes with a model.",
        "Loading",
        group="origin",
    )
    tokenizer: str | Path | PreTrainedTokenizerBase | None = option(
        None,
        as_given,
        "Take the target's tokenizer from this folder or hub id.",
        "Loading",
        group="reading",
    )
    generation_config: str | None = option(
        None,
        Choice(("ignore",), "None or 'ignore'"),
        "Ignore entries of the generation config that would otherwise be refused.",
        "Loading",
        flag="--ignore-generation-config",
        group="reading",
    )
    adapter: str | Path | None = option(
        None,
        as_given,
        "LoRA adapter of peft, merged into the target: a folder or hub id.",
        "Loading",
        group="target",
    )
    draft_dtype: str | None = option(
        None,
        Choice(DTYPE_NAMES),
        "Precision of the draft. Default: the target's, or int8 or int4 if that is faster.",
        "Loading",
        group="pair",
    )
    draft_taps: str | None = option(
        None,
        Choice(TAP_KINDS),
        "Meaning of the layer ids of an EAGLE-3 draft: inputs or outputs of the layers. Default: "
        "as the draft's config specifies, else the meaning with the higher measured alpha.",
        "Loading",
        group="pair",
    )
    draft_revision: str | None = option(
        None, as_given, "Commit, tag or branch of the draft on the hub.", "Loading", group="pair"
    )
    same_tokenizer: bool = option(
        False,
        as_flag,
        "Trust that equal ids are equal tokens in target and draft, if their tokenizers cannot be "
        "compared.",
        None,
    )

    def __post_init__(self) -> None:
        check_options(self)

    def refuse(self, *names: str, because: str) -> None:
        """Raise InputError if one of the options `names` is set. `because` is the reason in its
        message: "NAME is VALUE, but BECAUSE; leave it out"."""
        for name in names:
            if (value := getattr(self, name)) not in (None, False):
                raise InputError(f"{name} is {value!r:.60}, but {because}; leave it out")


class LoadKeywords(TypedDict, total=False):
    """Fields of `LoadOptions`, as keywords of `foretoken.load`."""

    dtype: str
    kv_dtype: str
    device: str
    runtime: str
    revision: str | None
    trust_remote_code: bool
    tokenizer: str | Path | PreTrainedTokenizerBase | None
    generation_config: str | None
    adapter: str | Path | None
    draft_dtype: str | None
    draft_taps: str | None
    draft_revision: str | None
    same_tokenizer: bool


LOAD_OPTIONS = get_options(LoadOptions)


def require_known(names: Iterable[str], caller: str) -> None:
    """Raise InputError for a keyword of `caller` that is not an option of `load`."""
    for name in names:
        if name not in LOAD_OPTIONS:
            near = get_close_matches(name, LOAD_OPTIONS, 1, 0.5)
            remedy = f"did you mean {near[0]}?" if near else "give it to generate, or leave it out"
            raise InputError(f"{name} is not an option of {caller}; {remedy}")
