"""Commands and options that were removed, and what to use now."""

from __future__ import annotations

IN_CHECKOUT = "run {} in a checkout of the repository"
TRAINED = ("lm", "seq2seq", "heads", "ngram", "samples")
# Commands and options that were removed, by the group or command that had them; and what to use now
GONE = {
    "trace": "run foretoken generate --show-tokens",
    "measure": "run foretoken bench",
    "models": "run foretoken cache list",
    "complete": "run foretoken chat --raw",
    "plan": "run foretoken bench",
    "bench serve": "run a load generator for OpenAI's API; docs/serving.md names two",
    **dict.fromkeys(
        ("export sglang", "export llama.cpp", "export openvino-genai"),
        "see that system's documentation; foretoken export vllm is left",
    ),
    **{
        name: IN_CHECKOUT.format(f"python -m reproduction {name}")
        for name in ("report", "simulate", "theory", *(f"train {each}" for each in TRAINED))
    },
    "doctor --cache": "run foretoken cache list",
    "doctor --clear-cache": "run foretoken cache clear",
    "doctor --speed": "run foretoken bench, with the --dtype in question",
    "doctor --families": IN_CHECKOUT.format("make families"),
    "doctor --rows": "leave it out; runtimes have a fixed order",
    "doctor --held-out": IN_CHECKOUT.format("python benchmarks/rounding.py"),
    "bench --svg": "give --json, which has all that it drew",
    "bench --vs": IN_CHECKOUT.format("python benchmarks/race.py"),
    "certify --thorough": "leave it out; there is one certificate",
    "--kv-dtype": "leave it out; on the native decoder int8 and int4 keep the cache in float16",
    "--exact-shapes": "leave it out; foretoken doctor MODEL says what is exact to the bit",
}


def removed(name: str, command: str | None = None) -> str | None:
    """Return the line about a command or an option of `command` that was removed; None for any
    other name."""
    for full in (f"{command} {name}", name):
        if full in GONE:
            start = "" if full.startswith("-") else "foretoken "
            return f"{start}{full} is gone: {GONE[full]}"
    return None
