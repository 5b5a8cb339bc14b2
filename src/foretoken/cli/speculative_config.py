"""The option `--speculative-config`, which sets draft, gamma and rule by vLLM's JSON or by the file
of a benchmark."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

from foretoken.cli.option import parse_json_option
from foretoken.errors import InputError, format_value, is_whole_number
from foretoken.loading.published_drafts import get_cached_kind
from foretoken.sampling.params import suggest_name

if TYPE_CHECKING:
    from foretoken.measurement.plan import Plan

SpeculativeConfig = Annotated[
    str | None,
    'Draft, gamma and rule in vLLM\'s JSON: {"method": "draft_model", "model": "...", '
    '"num_speculative_tokens": 4}; or a file of foretoken bench --out, to use its fastest draft '
    "and gamma with the options of the benchmark.",
]
HIDDEN_STATE_METHODS = ("eagle3", "dflash", "dspark")  # the draft's folder specifies the kind
# vLLM's method -> draft; None: the draft is the config's "model"
METHOD_DRAFTS = {
    "draft_model": None,
    "ngram": "lookup",
    "mtp": "mtp",
    **dict.fromkeys(HIDDEN_STATE_METHODS),
}
VLLM_RULES = {"standard": "speculative", "block": "block"}
CONFIG_KEYS = ("method", "model", "num_speculative_tokens", "rejection_sample_method")


class SpeculativeSettings(NamedTuple):
    """The settings of --speculative-config; a gamma of None is automatic."""

    draft: str | None = None
    gamma: int | None = None
    rule: str = "block"


def load_plan(text: str | None) -> Plan | None:
    """Return the plan in the benchmark file that the option names; None if the option is not given
    or has vLLM's JSON. `text`: the option's value. Raises InputError for an invalid file."""
    if not text or text.lstrip().startswith(("{", "[")):
        return None
    return read_plan(Path(text))


def read_plan(file: Path) -> Plan:
    """Return the plan in a file of `foretoken bench --out`. Raises InputError for other files."""
    from foretoken.measurement import plan  # late: `--help` does not need pydantic

    return plan.read_plan(file)


def parse_speculative_config(text: str | None, *flags: Any) -> SpeculativeSettings:
    """Return the settings of --speculative-config.

    Args:
        text: The option's value: JSON, or a benchmark's file; None: not given.
        flags: The values of --draft, --gamma and --rule, which are returned if `text` is None.

    Raises:
        InputError: The option and one of these flags are both given, or a value of the option is
            not supported.
    """
    given = SpeculativeSettings(*flags)
    if text is None:
        return given
    if given != SpeculativeSettings():
        raise InputError(
            "--speculative-config sets --draft, --gamma and --rule too; give either "
            "--speculative-config or those options"
        )
    if plan := load_plan(text):
        return SpeculativeSettings(plan.draft, plan.generate.gamma, plan.generate.rule)
    config = parse_json_option("--speculative-config", text)
    if not isinstance(config, dict):
        raise InputError(f"--speculative-config is {format_value(text)}; give a JSON object")
    for name in config:
        if name not in CONFIG_KEYS:
            near = suggest_name(name, CONFIG_KEYS)
            remedy = f"did you mean {near}?" if near else f"give any of {', '.join(CONFIG_KEYS)}"
            raise InputError(f"--speculative-config has unknown {format_value(name)}; {remedy}")
    model, gamma = config.get("model"), config.get("num_speculative_tokens")
    method = _require_choice(config, "method", METHOD_DRAFTS, "draft_model" if model else None)
    draft = METHOD_DRAFTS[method] or model
    if not isinstance(draft, str) or (METHOD_DRAFTS[method] and model not in (None, method)):
        raise _make_error("model", model, "give the draft model, or no model for ngram and mtp")
    if method in HIDDEN_STATE_METHODS:
        kind = get_cached_kind(draft, None)
        if kind not in (None, method):
            raise _make_error("method", method, f"{draft} is a draft of kind {kind}")
    if gamma is not None and (not is_whole_number(gamma) or gamma < 1):
        remedy = "give a whole number from 1, or leave it out for automatic gamma"
        raise _make_error("num_speculative_tokens", gamma, remedy)
    rule = _require_choice(config, "rejection_sample_method", VLLM_RULES, "block")
    return SpeculativeSettings(draft, gamma, VLLM_RULES[rule])


def _require_choice(
    config: dict[str, Any], key: str, choices: dict[str, Any], default: str | None
) -> str:
    value = config.get(key, default)
    if not isinstance(value, str) or value not in choices:
        raise _make_error(key, value, f"give one of {', '.join(choices)}")
    return value


def _make_error(key: str, value: object, remedy: str) -> InputError:
    return InputError(f"--speculative-config's {key} is {format_value(value)}; {remedy}")
