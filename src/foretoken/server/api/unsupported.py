"""Fields that an endpoint does not have: those whose values ask for nothing pass, all others are
refused with the reason, the name that the field has here, or the nearest one."""

from __future__ import annotations

from collections.abc import Set
from difflib import get_close_matches
from typing import Any

from foretoken.errors import format_value

TEXT_ONLY = "this server makes text only"
TEMPLATE_REMEDY = "give chat_template_kwargs, as the model's template names it"
STATELESS = "nothing is stored; send the whole conversation"
# Unsupported fields: values other than null that ask for nothing, and the reason
UNSUPPORTED: dict[str, tuple[tuple[Any, ...], str]] = {
    "audio": ((), TEXT_ONLY),
    "image": ((), TEXT_ONLY),
    "modalities": ((["text"],), TEXT_ONLY),
    "function_call": (("none",), "give tools, and read the text that the template makes"),
    "functions": (([],), "give tools instead"),
    "max_tool_calls": ((), "no tools are called here"),
    "moderation": ((), "there is no moderation here"),
    "prediction": ((), "predicted outputs are for completions and chats"),
    "verbosity": (("medium",), TEMPLATE_REMEDY),
    "service_tier": (("auto", "default"), "there is one tier; give priority"),
    "store": ((False,), "nothing is stored"),
    "conversation": ((), STATELESS),
    "previous_response_id": ((), STATELESS),
    "prompt": ((), "no prompts are stored; send messages"),
    "context_management": ((), "nothing is left out of a conversation here"),
    "web_search_options": ((), "nothing in a request reaches another host"),
    "access_programs": ((), "there are no programs here"),
    "background_options": ((), "answers are written while the client waits"),
    "best_of": ((1,), "give n, and choose among the texts by their logprobs"),
    "suffix": (("",), "texts are continued, not filled in"),
    "prompt_cache_options": ((), "give cache_salt to keep a prefix apart"),
    "prompt_cache_retention": (("in_memory",), "prefixes are kept in memory alone"),
    "chat_template": ((), "a template is a program; give the server --chat-template"),
    "stream_obfuscation": ((False,), "events are as long as they are"),
}
# Fields of another endpoint or server, and their names here: the first that an endpoint has
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
# Fields that say who asks or where: one engine serves all, so there is nothing to do for them
IGNORED_FIELDS = frozenset(("user", "safety_identifier", "prompt_cache_key"))


def explain_refusal(name: str, value: Any, fields: Set[str]) -> str | None:
    """Return why a request whose fields are others is refused; None where this one asks for
    nothing."""
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
    """Return why an unknown field is refused, with the one that may be meant."""
    here = [each for each in FIELD_ALIASES.get(name, ()) if each in fields]
    near = here or get_close_matches(name, sorted(fields), 1, 0.8)
    remedy = f"did you mean {near[0]}?" if near else f"known are {', '.join(sorted(fields))}"
    return f"unknown field {format_value(name)}; {remedy}"
