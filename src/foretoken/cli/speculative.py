"""`--speculative-config`: vLLM's JSON for what drafts, in the same words."""

from __future__ import annotations

from difflib import get_close_matches
from typing import Annotated, Any, NamedTuple

from typer import Option

from foretoken.cli.sampling_options import as_json
from foretoken.errors import InputError, shown

Speculative = Annotated[
    str | None,
    Option(
        help='As vLLM takes it: {"method": "draft_model", "model": "...", '
        '"num_speculative_tokens": 4}.'
    ),
]
METHODS = {"draft_model": None, "ngram": "lookup"}
RULES = {"standard": "speculative", "block": "block"}
KEYS = ("method", "model", "num_speculative_tokens", "rejection_sample_method")


class Chosen(NamedTuple):
    """What drafts, how many draft tokens where not automatic, and the rule."""

    draft: str | None
    gamma: int | None = None
    rule: str = "block"


def speculative(text: str | None, draft: str | None) -> Chosen:
    """The two options' meaning. InputError where they contradict each other, or for what vLLM knows
    and we do not."""
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
