"""`--speculative-config`: draft, gamma and rule in vLLM's JSON and words."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

from foretoken.cli.option import as_json
from foretoken.errors import InputError, shown, whole
from foretoken.loading.published import known_kind
from foretoken.sampling.params import meant

if TYPE_CHECKING:
    from foretoken.measurement.plan import Plan

Speculative = Annotated[
    str | None,
    'Draft, gamma and rule as vLLM takes them: {"method": "draft_model", "model": "...", '
    '"num_speculative_tokens": 4}; or a file of foretoken bench --out, for its fastest, '
    "loaded as it was measured.",
]
OVER_STATES = ("eagle3", "dflash", "dspark")  # of which the folder says the kind
# None: the model that is named
DRAFTS = {"draft_model": None, "ngram": "lookup", "mtp": "mtp", **dict.fromkeys(OVER_STATES)}
RULES = {"standard": "speculative", "block": "block"}
KEYS = ("method", "model", "num_speculative_tokens", "rejection_sample_method")


class SpeculativeSettings(NamedTuple):
    """Settings of speculation: the draft, its tokens where not automatic, and the rule."""

    draft: str | None = None
    gamma: int | None = None
    rule: str = "block"


def plan_of(text: str | None) -> Plan | None:
    """Return the benchmark's plan in the file that the option names; None for vLLM's JSON."""
    if not text or text.lstrip().startswith(("{", "[")):
        return None
    return read_plan(Path(text))


def read_plan(file: Path) -> Plan:
    """Read the plan in a file of `foretoken bench --out`."""
    from foretoken.measurement import plan  # late: `--help` does without pydantic

    return plan.read_plan(file)


def speculative(text: str | None, *flags: Any) -> SpeculativeSettings:
    """Read the option's JSON, or a benchmark's plan, which stands in place of `flags`. InputError
    for both, and for values that vLLM knows and foretoken does not."""
    given = SpeculativeSettings(*flags)
    if text is None:
        return given
    if given != SpeculativeSettings():
        raise InputError("--speculative-config sets --draft, --gamma and --rule; give it or these")
    if plan := plan_of(text):
        return SpeculativeSettings(plan.draft, plan.generate.gamma, plan.generate.rule)
    config = as_json("--speculative-config", text)
    if not isinstance(config, dict):
        raise InputError(f"--speculative-config is {shown(text)}; give a JSON object")
    for name in config:
        if name not in KEYS:
            near = meant(name, KEYS)
            remedy = f"did you mean {near}?" if near else f"known here are {', '.join(KEYS)}"
            raise InputError(f"--speculative-config holds {shown(name)}; {remedy}")
    model, gamma = config.get("model"), config.get("num_speculative_tokens")
    method = _choice(config, "method", DRAFTS, "draft_model" if model else None)
    draft = DRAFTS[method] or model
    if not isinstance(draft, str) or (DRAFTS[method] and model not in (None, method)):
        raise _bad("model", model, "name the draft model, and none for ngram and mtp")
    if method in OVER_STATES:
        kind = known_kind(draft, None)
        if kind not in (None, method):
            raise _bad("method", method, f"{draft} is a draft of kind {kind}")
    if gamma is not None and (not whole(gamma) or gamma < 1):
        remedy = "give a whole number from 1, or leave it out: it is then chosen before every step"
        raise _bad("num_speculative_tokens", gamma, remedy)
    rule = _choice(config, "rejection_sample_method", RULES, "block")
    return SpeculativeSettings(draft, gamma, RULES[rule])


def _choice(config: dict[str, Any], key: str, choices: dict[str, Any], default: str | None) -> str:
    value = config.get(key, default)
    if not isinstance(value, str) or value not in choices:
        raise _bad(key, value, f"give one of {', '.join(choices)}")
    return value


def _bad(key: str, value: object, remedy: str) -> InputError:
    return InputError(f"--speculative-config's {key} is {shown(value)}; {remedy}")
