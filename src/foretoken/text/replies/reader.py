"""Incremental parser of one reply: returns its text, reasoning and tool calls as events."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, cast

import regex

from foretoken.errors import InputError, to_one_line
from foretoken.text.replies.calls import (
    CallStream,
    FunctionCall,
    FunctionSignatures,
    NamedForm,
    TaggedForm,
    dump_json,
)
from foretoken.text.replies.formats import ReplyFormat
from foretoken.text.replies.regions import Region, RegionPiece, RegionSplitter, compile_literals

PARSE_ERRORS = (ValueError, LookupError, TypeError, AttributeError, RecursionError)
MAX_END_ATTEMPTS = 64  # attempts to find the end of the last complete call


@dataclass(frozen=True, slots=True)
class ReplyEvent:
    """A new part of a reply: text, reasoning, or part of a call. Only the first event of a call has
    the call's name."""

    text: str = ""
    thought: str = ""
    call: int | None = None  # index of the call in the reply
    name: str = ""
    arguments: str = ""


class ReplyReader:
    """Parses a reply. Malformed calls become text, with their marks; truncated calls are
    dropped."""

    def __init__(
        self,
        regions: list[Region],
        functions: FunctionSignatures,
        within: Region | None,
        *,
        has_text: bool = True,
    ) -> None:
        """`has_text`: False if the reply consists of reasoning, calls and their marks alone."""
        self._splitter, self._functions = RegionSplitter(regions, within), functions
        self._has_text = has_text
        self._raw = self._body = ""  # of the current calls, with and without marks
        self._stream: CallStream | None = None
        self._streamed, self._after = False, ""
        self._trim = within is not None  # drop the blank lines between reasoning and text
        self.calls = 0

    @property
    def thinks(self) -> bool:
        """Return whether the output so far ends within reasoning."""
        region = self._splitter.region
        return region is not None and region.kind == "thought"

    def feed(self, text: str, *, last: bool = False, cut: str | None = None) -> list[ReplyEvent]:
        """Append characters and return the new events. `last`: whether the reply is over. `cut`:
        the stop string that ended the reply, "" if a limit ended it, None if it is complete."""
        events: list[ReplyEvent] = []
        for piece in self._splitter.feed(text, last=last, cut=cut):
            events += self._parse_piece(piece)
        return events if self._has_text else [each for each in events if not each.text]

    def _parse_piece(self, piece: RegionPiece) -> Iterator[ReplyEvent]:
        region = piece.region
        if region is None:
            text = piece.text.lstrip("\n") if self._trim else piece.text
            self._trim = self._trim and not text
            if text:
                yield ReplyEvent(text=text)
        elif region.kind == "thought":
            if piece.text:
                yield ReplyEvent(thought=piece.text)
            self._trim = piece.closed
        elif region.kind == "calls":
            yield from self._parse_calls(region, piece)

    def _parse_calls(self, region: Region, piece: RegionPiece) -> Iterator[ReplyEvent]:
        if not self._raw:
            self._stream, self._after = region.parser.start_stream(), region.parser.after
        self._raw += piece.raw
        self._body += piece.text
        if self._stream is not None and piece.text:
            yield from self._stream_call(self._stream, piece.text)
        if not piece.closed:
            return
        if self._streamed:
            self.calls += 1
            if (rest := self._get_trailing_text()) and not piece.cut:
                yield ReplyEvent(text=rest)
        else:
            yield from self._parse_closed_calls(region, piece)
        self._raw = self._body = ""
        self._streamed, self._trim = False, True

    def _get_trailing_text(self) -> str:
        """Return the characters after a call's arguments that are not part of the call."""
        assert self._stream is not None
        rest = self._stream.rest.strip()
        return "" if rest in ("", self._after) else rest.removeprefix(self._after)

    def _stream_call(self, stream: CallStream, text: str) -> Iterator[ReplyEvent]:
        arguments = stream.feed(text)
        if stream.name is not None and (arguments or not self._streamed):
            name = "" if self._streamed else stream.name
            self._streamed = True
            yield ReplyEvent(call=self.calls, name=name, arguments=arguments)

    def _parse_closed_calls(self, region: Region, piece: RegionPiece) -> Iterator[ReplyEvent]:
        parse = region.parser.parse_complete if piece.cut else region.parser.parse
        try:
            calls = parse(self._body, self._functions, piece.captures)
        except PARSE_ERRORS:
            if not piece.cut:
                yield ReplyEvent(text=self._raw)
            return
        for call in calls:
            yield ReplyEvent(call=self.calls, name=call.name, arguments=call.arguments)
            self.calls += 1


class FormatCallParser:
    """Parses the calls of a `ReplyFormat`."""

    def __init__(self, format: ReplyFormat) -> None:
        self.format = format

    def parse(
        self, body: str, functions: FunctionSignatures, captures: dict[str, str]
    ) -> list[FunctionCall]:
        return self.format.form.parse(body, functions)

    def parse_complete(
        self, body: str, functions: FunctionSignatures, captures: dict[str, str]
    ) -> list[FunctionCall]:
        """Return the complete calls of a truncated body. Raises ValueError if there are none."""
        if isinstance(self.format.form, TaggedForm) and not self.format.form.after:
            raise ValueError("only the mark after a call shows that no argument follows")
        inside, ends = (self.format.call_separator or "").strip(), [len(body)]
        while (
            inside and len(ends) < MAX_END_ATTEMPTS and (end := body.rfind(inside, 0, ends[-1])) > 0
        ):
            ends.append(end)
        for end in ends:
            for closing in ("", self.format.region_brackets[1]):
                with suppress(*PARSE_ERRORS):
                    return self.parse(body[:end] + closing, functions, captures)
        raise ValueError("no call is complete")

    def start_stream(self) -> CallStream | None:
        alone = self.format.call_separator is None
        return self.format.form.start_stream() if alone else None

    @property
    def after(self) -> str:
        """Return the characters that follow the arguments of a complete call."""
        form = self.format.form
        return form.after.strip() if isinstance(form, NamedForm) else "}"


def _import_chat_parsing():  # not annotated, so that the modules' types are inferred
    """Import transformers' reply parsers late: the HTTP process runs without transformers."""
    from transformers.utils.chat_parsing import content_parsers, response_templates

    return content_parsers, response_templates


class TemplateCallParser:
    """Parses the calls of a tokenizer's own response template with transformers' parsers."""

    after = ""

    def __init__(self, field: Any) -> None:
        self.field = field

    def parse(
        self, body: str, functions: FunctionSignatures, captures: dict[str, str]
    ) -> list[FunctionCall]:
        value = _import_chat_parsing()[0].process_field(body, self.field, captures)
        calls = [
            _parse_field_call(each) for each in (value if isinstance(value, list) else [value])
        ]
        if not calls:
            raise ValueError("there is no call")
        return calls

    def parse_complete(
        self, body: str, functions: FunctionSignatures, captures: dict[str, str]
    ) -> list[FunctionCall]:
        return self.parse(body, functions, captures)

    def start_stream(self) -> CallStream | None:
        return None


def _parse_field_call(value: Any) -> FunctionCall:
    function = value.get("function", value)
    name, arguments = function["name"], function["arguments"]
    if isinstance(arguments, str):
        arguments = json.loads(arguments)
    if not isinstance(name, str) or not isinstance(arguments, dict):
        raise ValueError("it is not a call with a name and arguments")
    return FunctionCall(name, dump_json(cast(dict[str, Any], arguments)))


def build_format_regions(format: ReplyFormat, *, calls: bool, thoughts: bool) -> list[Region]:
    """Return the regions that a reply in this format may have. calls: whether it may have calls.
    thoughts: whether it may have reasoning."""
    regions: list[Region] = []
    if thoughts:
        opening, closing = format.think
        regions.append(Region("thought", compile_literals(opening), compile_literals(closing)))
    if calls:
        opens = regex.compile(format.open_pattern or regex.escape(format.open), regex.DOTALL)
        closing = format.close_pattern or regex.escape(format.close)
        closes = regex.compile(closing, regex.DOTALL) if closing else None
        parser = FormatCallParser(format)
        regions.append(Region("calls", opens, closes, parser, format.form.can_close))
    drops = (
        *format.dropped_marks,
        *(mark for mark in (format.before, format.after) if mark and calls),
    )
    if drops:
        regions.append(Region("dropped", compile_literals(*drops), None))
    return regions


def build_template_regions(template: dict[str, Any], *, calls: bool) -> list[Region]:
    """Return the regions of a tokenizer's own response template. Raises InputError if `template` is
    invalid."""
    try:
        loaded = _import_chat_parsing()[1].load_response_template(template)
    except (ImportError, ValueError) as error:
        problem = f"the tokenizer's response_template is not usable: {to_one_line(error)}"
        raise InputError(f"{problem}; give a --tool-parser") from None
    regions: list[Region] = []
    for name, field in loaded.fields.items():
        if field.open_re is None:
            if field.close_re is not None:  # the mark that ends the text
                regions.append(Region("dropped", field.close_re, None))
        elif name in ("reasoning_content", "thinking", "reasoning"):
            regions.append(Region("thought", field.open_re, field.close_re))
        elif name == "tool_calls" and calls:
            regions.append(
                Region("calls", field.open_re, field.close_re, parser=TemplateCallParser(field))
            )
    return regions


def find_open_region(regions: list[Region], prompt: str) -> Region | None:
    """Return the region of reasoning that the chat template opens at the end of a prompt; None if
    it opens none. Marks within messages open no region."""
    for region in regions:
        if region.kind == "thought" and region.close is not None:
            openings = list(region.open.finditer(prompt))
            if openings and not prompt[openings[-1].end() :].strip():
                return region
    return None
