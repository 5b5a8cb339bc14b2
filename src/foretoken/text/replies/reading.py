"""The reader of one reply: what a client is told of it, piece by piece."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, cast

import regex

from foretoken.errors import InputError, to_one_line
from foretoken.text.replies.calls import (
    Call,
    NamedForm,
    Progress,
    Signatures,
    TaggedForm,
    dumped,
)
from foretoken.text.replies.formats import ReplyFormat
from foretoken.text.replies.regions import Cut, Region, Regions, literal

UNREADABLE = (ValueError, LookupError, TypeError, AttributeError, RecursionError)
ATTEMPTS = 64  # to find the end of the last complete call


@dataclass(frozen=True, slots=True)
class Told:
    """News of a reply: text, thoughts, or a call's name, once, and arguments."""

    text: str = ""
    thought: str = ""
    call: int | None = None  # its number
    name: str = ""
    arguments: str = ""


class ReplyReader:
    """Reads one reply. A broken call is text, with its marks; a call that is cut off is not."""

    def __init__(
        self,
        regions: list[Region],
        functions: Signatures,
        within: Region | None,
        *,
        has_text: bool = True,
    ) -> None:
        """`has_text`: False if the reply consists of thoughts, calls and their marks alone."""
        self._regions, self._functions = Regions(regions, within), functions
        self._has_text = has_text
        self._raw = self._body = ""  # of the calls that are being written
        self._progress: Progress | None = None
        self._streamed, self._after = False, ""
        self._trim = within is not None  # lines between thoughts and text are empty
        self.calls = 0

    @property
    def thinks(self) -> bool:
        """True where the next text is thought, as far as is known."""
        region = self._regions.region
        return region is not None and region.kind == "thought"

    def feed(self, text: str, *, last: bool = False, cut: str | None = None) -> list[Told]:
        """Return what is new; with `last` the reply is over, `cut` by this stop string, or by a
        limit (an empty string)."""
        told: list[Told] = []
        for piece in self._regions.feed(text, last=last, cut=cut):
            told += self._told(piece)
        return told if self._has_text else [each for each in told if not each.text]

    def _told(self, piece: Cut) -> Iterator[Told]:
        region = piece.region
        if region is None:
            text = piece.text.lstrip("\n") if self._trim else piece.text
            self._trim = self._trim and not text
            if text:
                yield Told(text=text)
        elif region.kind == "thought":
            if piece.text:
                yield Told(thought=piece.text)
            self._trim = piece.closed
        elif region.kind == "calls":
            yield from self._calls(region, piece)

    def _calls(self, region: Region, piece: Cut) -> Iterator[Told]:
        if not self._raw:
            self._progress, self._after = region.key.progress(), region.key.after
        self._raw += piece.raw
        self._body += piece.text
        if self._progress is not None and piece.text:
            yield from self._streaming(self._progress, piece.text)
        if not piece.closed:
            return
        if self._streamed:
            self.calls += 1
            if (rest := self._behind()) and not piece.cut:
                yield Told(text=rest)
        else:
            yield from self._read(region, piece)
        self._raw = self._body = ""
        self._streamed, self._trim = False, True

    def _behind(self) -> str:
        """The text behind a call's arguments that is no part of it."""
        assert self._progress is not None
        rest = self._progress.rest.strip()
        return "" if rest in ("", self._after) else rest.removeprefix(self._after)

    def _streaming(self, progress: Progress, text: str) -> Iterator[Told]:
        arguments = progress.feed(text)
        if progress.name is not None and (arguments or not self._streamed):
            name = "" if self._streamed else progress.name
            self._streamed = True
            yield Told(call=self.calls, name=name, arguments=arguments)

    def _read(self, region: Region, piece: Cut) -> Iterator[Told]:
        read = region.key.read_whole if piece.cut else region.key.read
        try:
            calls = read(self._body, self._functions, piece.captures)
        except UNREADABLE:
            if not piece.cut:
                yield Told(text=self._raw)
            return
        for call in calls:
            yield Told(call=self.calls, name=call.name, arguments=call.arguments)
            self.calls += 1


class FormReading:
    """Reads the calls of a format that is known here."""

    def __init__(self, format: ReplyFormat) -> None:
        self.format = format

    def read(self, body: str, functions: Signatures, captures: dict[str, str]) -> list[Call]:
        return self.format.form.read(body, functions)

    def read_whole(self, body: str, functions: Signatures, captures: dict[str, str]) -> list[Call]:
        """Return the complete calls of a body that is cut off. ValueError if there are none."""
        if isinstance(self.format.form, TaggedForm) and not self.format.form.after:
            raise ValueError("only the mark behind a call says that there is no other argument")
        inside, ends = (self.format.inside or "").strip(), [len(body)]
        while inside and len(ends) < ATTEMPTS and (end := body.rfind(inside, 0, ends[-1])) > 0:
            ends.append(end)
        for end in ends:
            for closing in ("", self.format.around[1]):
                with suppress(*UNREADABLE):
                    return self.read(body[:end] + closing, functions, captures)
        raise ValueError("no call is whole")

    def progress(self) -> Progress | None:
        alone = self.format.inside is None
        return self.format.form.progress() if alone else None

    @property
    def after(self) -> str:
        """The text behind the arguments of a call that is written whole."""
        form = self.format.form
        return form.after.strip() if isinstance(form, NamedForm) else "}"


def _chat_parsing():  # not annotated: the types are the modules'
    """Import transformers' parsers of replies, late as the HTTP process does without them."""
    from transformers.utils.chat_parsing import content_parsers, response_templates

    return content_parsers, response_templates


class FieldReading:
    """Reads the calls of a tokenizer's own response template, by transformers' parsers."""

    after = ""

    def __init__(self, field: Any) -> None:
        self.field = field

    def read(self, body: str, functions: Signatures, captures: dict[str, str]) -> list[Call]:
        value = _chat_parsing()[0].process_field(body, self.field, captures)
        calls = [_field_call(each) for each in (value if isinstance(value, list) else [value])]
        if not calls:
            raise ValueError("there is no call")
        return calls

    def read_whole(self, body: str, functions: Signatures, captures: dict[str, str]) -> list[Call]:
        return self.read(body, functions, captures)

    def progress(self) -> Progress | None:
        return None


def _field_call(value: Any) -> Call:
    function = value.get("function", value)
    name, arguments = function["name"], function["arguments"]
    if isinstance(arguments, str):
        arguments = json.loads(arguments)
    if not isinstance(name, str) or not isinstance(arguments, dict):
        raise ValueError("it is no call by name with arguments")
    return Call(name, dumped(cast(dict[str, Any], arguments)))


def format_regions(format: ReplyFormat, *, calls: bool, thoughts: bool) -> list[Region]:
    """The regions of a format, of those that a reply may have."""
    regions: list[Region] = []
    if thoughts:
        opening, closing = format.think
        regions.append(Region("thought", literal(opening), literal(closing)))
    if calls:
        opens = regex.compile(format.opens or regex.escape(format.open), regex.DOTALL)
        closing = format.closes or regex.escape(format.close)
        closes = regex.compile(closing, regex.DOTALL) if closing else None
        reading = FormReading(format)
        regions.append(Region("calls", opens, closes, reading, format.form.ends))
    drops = (*format.drops, *(mark for mark in (format.before, format.after) if mark and calls))
    if drops:
        regions.append(Region("dropped", literal(*drops), None))
    return regions


def template_regions(template: dict[str, Any], *, calls: bool) -> list[Region]:
    """The regions of a tokenizer's own response template. InputError where it cannot be read."""
    try:
        loaded = _chat_parsing()[1].load_response_template(template)
    except (ImportError, ValueError) as error:
        problem = f"the tokenizer's response_template cannot be read: {to_one_line(error)}"
        raise InputError(f"{problem}; name a --tool-parser") from None
    regions: list[Region] = []
    for name, field in loaded.fields.items():
        if field.open_re is None:
            if field.close_re is not None:  # what ends the text
                regions.append(Region("dropped", field.close_re, None))
        elif name in ("reasoning_content", "thinking", "reasoning"):
            regions.append(Region("thought", field.open_re, field.close_re))
        elif name == "tool_calls" and calls:
            regions.append(Region("calls", field.open_re, field.close_re, key=FieldReading(field)))
    return regions


def within(regions: list[Region], prompt: str) -> Region | None:
    """The region in whose midst a prompt ends: thoughts that the template has begun. Marks within
    messages begin none."""
    for region in regions:
        if region.kind == "thought" and region.close is not None:
            openings = list(region.open.finditer(prompt))
            if openings and not prompt[openings[-1].end() :].strip():
                return region
    return None
