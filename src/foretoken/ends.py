"""How a text begins and ends by a model's own settings, which of its settings are refused, and with
which it would sample."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from foretoken.errors import InputError, RefusedError, one_line

if TYPE_CHECKING:
    from transformers import GenerationConfig, PreTrainedModel

# Entries of a generation_config that change the law, and the values at which they do not.
CHANGES_LAW: dict[str, tuple[Any, ...]] = {
    "num_beams": (None, 1),
    "num_beam_groups": (None, 1),
    "penalty_alpha": (None, 0.0),
    "repetition_penalty": (None, 1.0),
    "encoder_repetition_penalty": (None, 1.0),
    "no_repeat_ngram_size": (None, 0),
    "encoder_no_repeat_ngram_size": (None, 0),
    "bad_words_ids": (None, []),
    "min_length": (None, 0),
    "min_new_tokens": (None, 0),
    "typical_p": (None, 1.0),
    "epsilon_cutoff": (None, 0.0),
    "eta_cutoff": (None, 0.0),
    "top_h": (None,),
    "suppress_tokens": (None, []),
    "begin_suppress_tokens": (None, []),
    "forced_decoder_ids": (None, []),
    "sequence_bias": (None, {}),
    "guidance_scale": (None, 1.0),
    "exponential_decay_length_penalty": (None,),
    "watermarking_config": (None,),
    "stop_strings": (None, []),
    "dola_layers": (None,),
}


@dataclass(frozen=True, slots=True)
class Ends:
    """Ids that end a text, and ids that a text must begin or end with."""

    eos: frozenset[int] = frozenset()
    decoder_start: int | None = None
    forced_bos: int | None = None
    forced_eos: int | None = None


def check_file(folder: Path) -> None:
    """InputError for a generation config that cannot be read: transformers would pass over it, and
    over the ends in it."""
    from transformers import GenerationConfig  # late: a kept conversion has no need of it

    file = folder / "generation_config.json"
    if file.exists():
        try:
            GenerationConfig.from_pretrained(folder)
        except Exception as error:  # the library raises many kinds
            raise InputError(f"{file} cannot be read: {one_line(error)}") from None


def read_ends(network: PreTrainedModel, *, refuse: bool) -> Ends:
    """What the generation config says; with `refuse`, RefusedError for what changes the law.

    Raises InputError for ids that are none.
    """
    settings = _settings(network)
    objection = _objection(settings)
    if refuse and objection:
        raise RefusedError(objection)
    start = None
    if network.config.is_encoder_decoder:
        start = _one(settings, "decoder_start_token_id")
        start = _one(settings, "bos_token_id") if start is None else start
        if start is None:
            raise RefusedError("the model names no decoder_start_token_id; set it in its config")
    return Ends(
        eos=frozenset(_ids(settings, "eos_token_id")),
        decoder_start=start,
        forced_bos=_one(settings, "forced_bos_token_id"),
        forced_eos=_one(settings, "forced_eos_token_id"),
    )


# Entries that are options of `generate`, and the values at which they change nothing.
SUGGESTED = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0}


def suggested(network: PreTrainedModel) -> dict[str, Any]:
    """How the generation config would sample, by the names of `generate`'s options: nothing where
    it is greedy."""
    settings = getattr(network, "generation_config", None)
    samples = getattr(settings, "do_sample", None)
    if settings is None or samples is False:
        return {}
    named = {name: getattr(settings, name, None) for name in SUGGESTED}
    changed = {n: v for n, v in named.items() if v is not None and v != SUGGESTED[n]}
    return {"temperature": 1.0} | changed if samples else changed


def require_ids(ends: Ends, V: int) -> None:
    """Raise InputError where texts must hold an id that the model does not have: 0..V-1. Ids at
    which a text ends may lie outside; no text comes to them."""
    for name in ("decoder_start", "forced_bos", "forced_eos"):
        token = getattr(ends, name)
        if token is not None and not 0 <= token < V:
            raise InputError(
                f"the model's generation config sets {name}_token_id={token}; ids must be in "
                f"0..{V - 1}: set it there"
            )


@dataclass(frozen=True, slots=True)
class Settings:
    """What a model's generation config says of its texts."""

    ends: Ends
    objection: str | None  # what of it changes the law, and is not followed
    suggested: dict[str, Any]  # how it would sample, by the names of `generate`'s options

    def to_dict(self) -> dict[str, Any]:
        """As JSON can hold it."""
        return asdict(self) | {"ends": asdict(self.ends) | {"eos": sorted(self.ends.eos)}}

    @classmethod
    def of(cls, known: dict[str, Any]) -> Settings:
        """What `to_dict` made."""
        ends = known["ends"]
        own = Ends(**ends | {"eos": frozenset(ends["eos"])})
        return cls(own, known["objection"], known["suggested"])


def read_settings(network: PreTrainedModel) -> Settings:
    """Raises as `read_ends` does where it does not refuse."""
    ends = read_ends(network, refuse=False)
    return Settings(ends, _objection(_settings(network)), suggested(network))


def _settings(network: PreTrainedModel) -> GenerationConfig:
    from transformers import GenerationConfig  # late: as above

    own = getattr(network, "generation_config", None)
    return own or GenerationConfig.from_model_config(network.config)


def _objection(settings: GenerationConfig) -> str | None:
    for entry, harmless in CHANGES_LAW.items():
        value = getattr(settings, entry, None)
        if value not in harmless:
            return (
                f"the model's generation config sets {entry}={value!r:.60}, which is not "
                "followed here; generation_config='ignore' (--ignore-generation-config) "
                "generates without it, and beam_search takes its own num_beams"
            )
    return None


def _ids(settings: GenerationConfig, entry: str) -> list[int]:
    value = getattr(settings, entry, None)
    ids = [] if value is None else value if isinstance(value, list) else [value]
    if not all(type(i) is int for i in ids):  # True is none
        raise InputError(
            f"the model's generation config sets {entry}={value!r:.60}; give an id or a list of ids"
        )
    return ids


def _one(settings: GenerationConfig, entry: str) -> int | None:
    """Of several ids transformers would make other things: all at once, or one for each row."""
    ids = _ids(settings, entry)
    if len(ids) > 1:
        raise RefusedError(
            f"the model's generation config sets {entry}={ids!r:.60}; set one id there"
        )
    return ids[0] if ids else None
