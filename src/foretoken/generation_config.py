"""Reads a model's generation config: start and stop ids, controls that are followed, entries that
are refused because they change the distribution, and suggested sampling options."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import transformers

from foretoken.errors import InputError, RefusedError, to_one_line
from foretoken.sampling.params import SAMPLING_OPTIONS, SamplingParams

if TYPE_CHECKING:
    from transformers import GenerationConfig, PreTrainedModel

log = logging.getLogger(__name__)

# Entries of a generation config that are not supported, with the values at which they do not change
# the distribution and are accepted
UNFOLLOWED_ENTRIES: dict[str, tuple[Any, ...]] = {
    "num_beams": (None, 1),
    "num_beam_groups": (None, 1),
    "penalty_alpha": (None, 0.0),
    "top_h": (None,),
    "forced_decoder_ids": (None, []),
    "force_words_ids": (None,),
    "constraints": (None,),
    "token_healing": (None, False),
    "guidance_scale": (None, 1.0),
    "watermarking_config": (None,),
    "dola_layers": (None,),
}
# Entries that set options of a request, with the values at which they change nothing. min_length
# counts prompt tokens too, so it is converted to min_new_tokens for each prompt
FOLLOWED_ENTRIES: dict[str, tuple[Any, ...]] = {
    **{name: (None, *each.off) for name, each in SAMPLING_OPTIONS.items() if each.off},
    "min_length": (None, 0),
}

# Entries that force an id. Lists of several ids are refused: transformers makes all of them equally
# probable
FORCED_ID_ENTRIES = ("forced_bos_token_id", "forced_eos_token_id")

# Entries that are options of `generate`, and the values at which they change nothing
NEUTRAL_SAMPLING = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0}


@dataclass(frozen=True, slots=True)
class EndTokens:
    """Ids that stop a sequence, and ids that it must begin or end with."""

    eos: frozenset[int] = frozenset()
    decoder_start: int | None = None
    forced_bos: int | None = None
    forced_eos: int | None = None


@dataclass(frozen=True, slots=True)
class GenerationSettings:
    """The settings of a model's generation config that are used or refused here."""

    ends: EndTokens
    objection: str | None  # why the config is refused; None if it is not
    controls: dict[str, Any]  # entries that are followed unless the caller sets these options
    suggested: dict[str, Any]  # sampling options of `generate`; {}: greedy

    def to_dict(self) -> dict[str, Any]:
        """Return the settings as a dict for JSON."""
        return asdict(self) | {"ends": asdict(self.ends) | {"eos": sorted(self.ends.eos)}}

    @classmethod
    def from_dict(cls, document: dict[str, Any]) -> GenerationSettings:
        """Return the settings from a dict that `to_dict` returned."""
        ends = EndTokens(**document["ends"] | {"eos": frozenset(document["ends"]["eos"])})
        return cls(ends, document["objection"], document["controls"], document["suggested"])


def check_file(folder: Path) -> None:
    """Raise InputError if the folder's generation config cannot be loaded: transformers would
    ignore the whole config, including the stop ids."""
    file = folder / "generation_config.json"
    if file.exists():
        try:
            transformers.GenerationConfig.from_pretrained(folder)
        except Exception as error:  # the library raises many kinds
            raise InputError(f"{file} cannot be read: {to_one_line(error)}") from None


def read_settings(network: PreTrainedModel) -> GenerationSettings:
    """Return the settings of a transformers model's generation config, or of its model config if it
    has no generation config. Raises InputError for invalid ids, RefusedError for an encoder-decoder
    that does not have exactly one start id."""
    own = getattr(network, "generation_config", None)
    config = own or transformers.GenerationConfig.from_model_config(network.config)
    start = None
    if network.config.is_encoder_decoder:
        start = _id(config, "decoder_start_token_id")
        start = _id(config, "bos_token_id") if start is None else start
        if start is None:
            raise RefusedError("the model has no decoder_start_token_id; set it in the config")
    ends = EndTokens(
        eos=frozenset(list_ids(config, "eos_token_id")),
        decoder_start=start,
        **{name.removesuffix("_token_id"): _only_id(config, name) for name in FORCED_ID_ENTRIES},
    )
    return GenerationSettings(
        ends, _objection(config), _controls(config), _suggested(own) if own else {}
    )


def resolve_params(
    params: SamplingParams, controls: dict[str, Any], ends: EndTokens, prompt_length: int
) -> SamplingParams:
    """Return a caller's params. Options that the caller has not set are taken from `controls` and
    `ends`, the attributes of the model's `GenerationSettings`. `prompt_length` is the number of
    tokens of the decoder's prompt."""
    settings = {name: value for name, value in controls.items() if name != "min_length"}
    settings |= {"forced_bos_token_id": ends.forced_bos, "forced_eos_token_id": ends.forced_eos}
    min_new_tokens = max(
        controls.get("min_length", 0) - prompt_length, settings.get("min_new_tokens", 0)
    )
    if min_new_tokens:  # as in transformers, a config's minimum above the maximum is no error
        settings["min_new_tokens"] = min(min_new_tokens, params.max_new_tokens)
    open_ = {n: v for n, v in settings.items() if v is not None and getattr(params, n) is None}
    return replace(params, **open_) if open_ else params


def place_forced_ids(params: SamplingParams, prompt_length: int, last: int) -> dict[int, int]:
    """Return a dict from output positions to forced ids. Positions within the prompt of
    `prompt_length` tokens are negative; `last` is the last output position."""
    first = 1 - prompt_length  # the decoder's second token
    forced = {first: params.forced_bos_token_id, last: params.forced_eos_token_id}
    return {position: token for position, token in forced.items() if token is not None}


def require_ids(ends: EndTokens, V: int) -> None:
    """Raise InputError if a start id or a forced id is outside 0..V-1. Stop ids may be outside
    this range; they then never occur."""
    for name in ("decoder_start", "forced_bos", "forced_eos"):
        token = getattr(ends, name)
        if token is not None and not 0 <= token < V:
            raise InputError(
                f"the model's generation config sets {name}_token_id={token}, but ids must be "
                f"in 0..{V - 1}; correct the generation config"
            )


def warn_about_suggested(suggested: dict[str, Any], params: Sequence[SamplingParams]) -> bool:
    """Return whether one of these params differs from the options that a generation config
    suggests. If so, log a warning."""
    if all(getattr(each, n) == v for n, v in suggested.items() for each in params):
        return False
    values = ", ".join(f"{name}={value}" for name, value in suggested.items())
    flags = " ".join(f"--{n.replace('_', '-')} {v}" for n, v in suggested.items())
    log.warning(
        "the model's generation config suggests %s, which is used only if you set it: %s",
        values,
        flags,
    )
    return True


def _suggested(config: GenerationConfig) -> dict[str, Any]:
    samples = getattr(config, "do_sample", None)
    if samples is False:
        return {}
    values = {name: getattr(config, name, None) for name in NEUTRAL_SAMPLING}
    changed = {n: v for n, v in values.items() if v is not None and v != NEUTRAL_SAMPLING[n]}
    return {"temperature": 1.0} | changed if samples else changed


def _controls(config: GenerationConfig) -> dict[str, Any]:
    """Return the controls that the config sets, as values for JSON."""
    values = {entry: getattr(config, entry, None) for entry in FOLLOWED_ENTRIES}
    if values["min_new_tokens"] is not None:  # transformers then ignores min_length
        values["min_length"] = None
    controls = {n: v for n, v in values.items() if v not in FOLLOWED_ENTRIES[n]}
    if isinstance(bias := controls.get("sequence_bias"), dict):
        controls["sequence_bias"] = [[list(ids), number] for ids, number in bias.items()]
    return controls


def find_unfollowed(config: GenerationConfig) -> str | None:
    """Return the name of an unsupported entry that changes the distribution; None if the config has
    no such entry."""
    for entry, harmless in UNFOLLOWED_ENTRIES.items():
        if getattr(config, entry, None) not in harmless:
            return entry
    if getattr(config, "cache_implementation", None) == "quantized":
        return "cache_implementation"
    return next((entry for entry in FORCED_ID_ENTRIES if len(list_ids(config, entry)) > 1), None)


def _objection(config: GenerationConfig) -> str | None:
    if entry := find_unfollowed(config):
        return (
            f"the model's generation config sets {entry}={getattr(config, entry)!r:.60}, which is "
            "not supported; generation_config='ignore' (--ignore-generation-config) skips such "
            "entries"
        )
    for entry, harmless in FOLLOWED_ENTRIES.items():
        if (value := getattr(config, entry, None)) not in harmless:
            name = "min_new_tokens" if entry == "min_length" else entry
            try:
                SamplingParams(**{"max_new_tokens": 2**31, name: value})
            except InputError as error:
                return f"the model's generation config: {error}; correct the generation config"
    return None


def list_ids(config: GenerationConfig, entry: str) -> list[int]:
    """Return the ids of an entry, whose value may be an id or a list of ids; [] if the entry is not
    set. Raises InputError for any other value."""
    value = getattr(config, entry, None)
    ids = [] if value is None else value if isinstance(value, list) else [value]
    if not all(type(i) is int for i in ids):  # True is not an id
        raise InputError(
            f"the model's generation config sets {entry}={value!r:.60}; give an id or a list of ids"
        )
    return ids


def _only_id(config: GenerationConfig, entry: str) -> int | None:
    """Return the id of an entry; None if the entry has no id or several ids."""
    ids = list_ids(config, entry)
    return ids[0] if len(ids) == 1 else None


def _id(config: GenerationConfig, entry: str) -> int | None:
    """Return the id of an entry; None if the entry has no id. Raises RefusedError for several ids:
    transformers would use a different one of these ids for each sequence."""
    ids = list_ids(config, entry)
    if len(ids) > 1:
        raise RefusedError(
            f"the model's generation config sets {entry}={ids!r:.60}; set a single id"
        )
    return ids[0] if ids else None
