"""Request fields that an endpoint does not support. A value that requests nothing, such as null, is
ignored; for any other value the error states the reason or suggests a supported field."""

from __future__ import annotations

from collections.abc import Set
from difflib import get_close_matches
from typing import Any

from foretoken.errors import format_value

TEXT_ONLY = "this server generates text only"
TEMPLATE_REMEDY = "set the chat template's variable in chat_template_kwargs"
STATELESS = "nothing is stored; send the whole conversation"
# Unsupported field -> the values, in addition to null, that request nothing and so are ignored, and
# the reason for refusing all others
UNSUPPORTED: dict[str, tuple[tuple[Any, ...], str]] = {
    "audio": ((), TEXT_ONLY),
    "image": ((), TEXT_ONLY),
    "modalities": ((["text"],), TEXT_ONLY),
    "function_call": (("none",), "give tools and tool_choice instead"),
    "functions": (([],), "give tools instead"),
    "max_tool_calls": ((), "this server calls no tools"),
    "moderation": ((), "this server does not moderate"),
    "prediction": ((), "only chat completions and completions support predicted outputs"),
    "verbosity": (("medium",), TEMPLATE_REMEDY),
    "service_tier": (("auto", "default"), "there is only one tier; give priority instead"),
    "store": ((False,), "nothing is stored"),
    "conversation": ((), STATELESS),
    "previous_response_id": ((), STATELESS),
    "prompt": ((), "no prompts are stored; send messages"),
    "context_management": ((), "conversations are never shortened"),
    "web_search_options": ((), "this server does not search the web"),
    "access_programs": ((), "this server has no access programs"),
    "background_options": ((), "requests do not run in the background"),
    "best_of": ((1,), "give n, and choose an output by its logprobs"),
    "suffix": (("",), "prompts are continued, not filled in"),
    "prompt_cache_options": ((), "give cache_salt to separate cached prefixes"),
    "prompt_cache_retention": (("in_memory",), "prefixes are cached in memory only"),
    "chat_template": ((), "templates are programs; start the server with --chat-template"),
    "stream_obfuscation": ((False,), "events are not padded"),
}
# Field of another endpoint or server -> corresponding fields of this server; an error suggests the
# first corresponding field that the endpoint has
FIELD_ALIASES = {
    "max_tokens": ("max_output_tokens",),
    "max_completion_tokens": ("max_tokens", "max_output_tokens"),
    "max_output_tokens": ("max_completion_tokens", "max_tokens"),
    "response_format": ("text", "structured_outputs"),
    "text": ("response_format", "structured_outputs"),
    "guided_json": ("structured_outputs",),
    "guided_regex": ("structured_outputs",),
    "guided_choice": ("structured_outputs",),
    "guided_grammar": ("structured_outputs",),
}
# Fields that identify the client or user; they are ignored, as one engine serves all clients
IGNORED_FIELDS = frozenset(("user", "safety_identifier", "prompt_cache_key"))


def explain_refusal(name: str, value: Any, fields: Set[str]) -> str | None:
    """Return why the field `name` of a request is refused; None if its value requests nothing.
    `fields`: the fields that the endpoint supports."""
    if name in IGNORED_FIELDS or (value is None and name in UNSUPPORTED | FIELD_ALIASES):
        return None
    neutral, reason = UNSUPPORTED.get(name, ((), ""))
    if any(value == each and type(value) is type(each) for each in neutral):
        return None
    return (
        f"{name} is not supported: {reason}"
        if reason
        else explain_unknown(name, fields | IGNORED_FIELDS)
    )


def explain_unknown(name: str, fields: Set[str]) -> str:
    """Return the error message for an unknown field. It suggests the supported field with the most
    similar name, or lists all supported `fields`."""
    here = [each for each in FIELD_ALIASES.get(name, ()) if each in fields]
    near = here or get_close_matches(name, sorted(fields), 1, 0.8)
    remedy = (
        f"did you mean {near[0]}?" if near else f"supported fields are {', '.join(sorted(fields))}"
    )
    return f"unknown field {format_value(name)}; {remedy}"
