"""Preparation of chat replies in the engine's process: detect the format of replies, put tools into
prompts, and build the grammar for calls."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any, cast

from foretoken.controls.grammar import build_symbol
from foretoken.errors import InputError, format_value, name_option_in_errors
from foretoken.sampling.checks import Structured, as_structured
from foretoken.sampling.params import Controls
from foretoken.server.process.messages import GenerateRequest, ReplyFacts
from foretoken.text.decoding import decode
from foretoken.text.replies import formats
from foretoken.text.replies.calls import FunctionSignature
from foretoken.text.replies.grammar import GrammarWriter, ThinkingMode
from foretoken.text.replies.reader import (
    build_format_regions,
    build_template_regions,
    find_open_region,
)

log = logging.getLogger(__name__)
TAIL_TOKENS = 256  # number of last prompt tokens to decode, to detect that reasoning is open
TOOLS_PROMPT = """You can call functions. To call one, write <tool_call>
{"name": <its name>, "arguments": <an object>}
</tool_call>, and nothing else. The functions:
"""


class ReplyPreparer:
    """Determines the format of one model's replies, and prepares requests for this format."""

    def __init__(self, tokenizer: Any, template: str | None, parser: str) -> None:
        """`template`: the server's chat template; None: the tokenizer's own. `parser`: name of a
        reply format, or "auto" to detect it from the template."""
        own_template = getattr(tokenizer, "chat_template", None)
        templates = (
            cast(Mapping[str, Any], own_template).values()
            if isinstance(own_template, Mapping)
            else [own_template or ""]
        )
        own_templates = "\n".join(map(str, templates))
        self.template = template or own_templates
        self._tokenizer = tokenizer
        by_template = formats.find_format(self.template) if parser == "auto" else None
        chosen = formats.get_format(parser) if parser in formats.REPLY_FORMAT_NAMES else by_template
        self.format = chosen or formats.HERMES_FORMAT
        response = _get_response_template(tokenizer) if parser == "auto" else None
        self.facts = ReplyFacts(
            self.format.name,
            is_known=chosen is not None,
            thinks=self.format.think[0] in self.template,
            template=response,
        )
        self.special_tokens = _find_special_tokens(tokenizer, self.format.literals)

    @property
    def description(self) -> str:
        """Return one line for the log that states how replies are parsed."""
        if self.facts.template is not None:
            return "tool calls and reasoning are parsed by the tokenizer's response template"
        if self.facts.is_known:
            return f"tool calls and reasoning are parsed in the format {self.format.name}"
        unknown = "the chat template uses no known format of tool calls"
        offered = "" if self.offers_tools else " and does not list tools"
        return f"{unknown}{offered}; {self.format.name} is used, --tool-parser changes it"

    @property
    def offers_tools(self) -> bool:
        """Return whether the chat template lists the tools in the prompt: it renders `tools`."""
        return "tools" in self.template

    def build_messages(self, request: GenerateRequest) -> Any:
        """Return the prompt of a request. Tools that the template does not list are added to the
        system message."""
        if (
            request.reply_requirements is None
            or not request.reply_requirements.functions
            or self.offers_tools
        ):
            return request.prompt
        offered = [
            json.dumps(_describe_function(each)) for each in request.reply_requirements.functions
        ]
        turns = [_write_calls(turn) for turn in cast(list[dict[str, Any]], request.prompt)]
        system = turns.pop(0).get("content") if turns[0]["role"] == "system" else None
        parts = [part for part in (system, TOOLS_PROMPT + "\n".join(offered)) if part]
        return [{"role": "system", "content": "\n\n".join(parts)}, *turns]

    def get_template_variables(self, request: GenerateRequest) -> dict[str, Any] | None:
        """Return the variables for a request's chat template. Raises InputError for a reasoning
        effort that the template would ignore."""
        variables = request.chat_template_kwargs or {}
        effort = variables.get("reasoning_effort")
        if effort == "none" and "enable_thinking" in self.template:
            return {"enable_thinking": False, **variables}
        if effort is None or "reasoning_effort" in self.template:
            return request.chat_template_kwargs
        if effort == "none" and not self.facts.thinks:
            return variables
        problem = f"reasoning_effort is {format_value(effort)}, but the model's template ignores it"
        raise InputError(f"{problem}; leave it out").with_option("reasoning_effort")

    def decode_tail(self, ids: Sequence[int]) -> str:
        return decode(self._tokenizer, list(ids[-TAIL_TOKENS:]), keep_special_tokens=True)

    def build_controls(self, request: GenerateRequest, tail: str) -> Controls:
        """Return the sampling options that a parsed reply requires: the grammar for calls, the
        reasoning budget, and whether special tokens remain in the text. They override the request's
        options. `tail`: the decoded end of the prompt. Raises InputError if a function's schema is
        not supported."""
        assert request.reply_requirements is not None
        changes: Controls = {}
        if self.special_tokens or self.facts.template:
            changes["skip_special_tokens"] = False
        thinking = self._get_thinking(tail)
        if request.thinking_budget is not None:
            changes["thinking_budget"] = self._build_thinking_budget(
                request.thinking_budget, thinking
            )
        structured = request.controls.get("structured")
        text_structured = as_structured("structured", structured) if structured else None
        # A response template specifies only how to parse calls, so no grammar can be made from it
        enforce_calls = (
            self.facts.is_known
            or self.facts.template is None
            or request.reply_requirements.required
        )
        calls = bool(request.reply_requirements.functions) and enforce_calls
        if calls or (text_structured and thinking != "no"):
            with name_option_in_errors("tools" if calls else "structured"):
                changes["structured"] = self._build_grammar(request, text_structured, thinking)  # pyright: ignore
        return changes

    def _build_grammar(
        self, request: GenerateRequest, structured: Structured | None, thinking: ThinkingMode
    ) -> Structured:
        assert request.reply_requirements is not None
        text = None if structured is None else build_symbol(structured)
        writer = GrammarWriter(self.format, request.reply_requirements, self.special_tokens, text)
        return Structured("lark", writer.write(thinking))

    def _get_thinking(self, tail: str) -> ThinkingMode:
        if not self.facts.thinks:
            return "no"
        regions = build_format_regions(self.format, calls=False, thoughts=True)
        if find_open_region(regions, tail):
            return "begun"
        return "no" if tail.rstrip().endswith(self.format.think[1]) else "may"

    def _build_thinking_budget(
        self, tokens: int, thinking: ThinkingMode
    ) -> tuple[int, list[int], list[int]]:
        if not self.facts.thinks:
            problem = f"thinking_token_budget is {tokens}, but the chat template has no reasoning"
            raise InputError(f"{problem}; leave it out").with_option("thinking_token_budget")
        opening, closing = (
            self._tokenizer.encode(mark, add_special_tokens=False) for mark in self.format.think
        )
        return tokens, [] if thinking == "begun" else opening, closing


def _get_response_template(tokenizer: Any) -> dict[str, Any] | None:
    """Return the tokenizer's own response template; None if there is no valid template."""
    template = getattr(tokenizer, "response_template", None)
    if not isinstance(template, dict):
        return None
    try:
        build_template_regions(cast(dict[str, Any], template), calls=True)
    except InputError as error:
        log.warning("%s", error)
        return None
    return cast(dict[str, Any], template)


def _write_calls(turn: dict[str, Any]) -> dict[str, Any]:
    """Return a message with its tool calls written into its text, for a template that does not
    support calls."""
    calls: Any = turn.get("tool_calls")
    if not calls:
        return turn
    try:
        functions = [call["function"] for call in calls]
        bodies = [
            f'"name": {json.dumps(f["name"])}, "arguments": {f["arguments"]}' for f in functions
        ]
    except (TypeError, LookupError):  # invalid calls, which the template refuses
        return turn
    written = [f"<tool_call>\n{{{body}}}\n</tool_call>" for body in bodies]
    text = "\n".join(part for part in (turn.get("content"), *written) if part)
    return {**turn, "content": text}


def _find_special_tokens(tokenizer: Any, text: str) -> dict[str, int]:
    """Return the special tokens whose text occurs in `text`, with their ids."""
    added = getattr(tokenizer, "added_tokens_decoder", {}).items()
    return {token.content: id for id, token in added if token.special and token.content in text}


def _describe_function(function: FunctionSignature) -> dict[str, Any]:
    return {name: value for name, value in asdict(function).items() if value is not None}
