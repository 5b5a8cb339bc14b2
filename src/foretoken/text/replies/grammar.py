"""Grammars of replies, in llguidance's Lark dialect. They require tool calls, or require calls to
be complete once they have begun, and allow reasoning before calls."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from foretoken.errors import InputError
from foretoken.text.replies.calls import FunctionSignature, build_text_until
from foretoken.text.replies.formats import ReplyFormat

ANY_TEXT = r"/(.|\n)*/"
ThinkingMode = Literal["no", "may", "begun"]  # reasoning: none, allowed, or begun in the prompt


@dataclass(frozen=True, slots=True)
class ReplyRequirements:
    """The functions that a request offers, and how a reply may call them."""

    functions: tuple[FunctionSignature, ...] = ()
    required: bool = False  # whether functions must be called
    parallel: bool = True  # whether several calls may be made


class GrammarWriter:
    """Writes the grammar of a reply in a format. `specials`: ids of special tokens by name, which
    the grammar refers to as tokens; `text`: grammar symbol of the text outside reasoning and calls;
    None: any text."""

    def __init__(
        self,
        format: ReplyFormat,
        requirements: ReplyRequirements,
        specials: Mapping[str, int],
        text: str | None = None,
    ) -> None:
        self.format, self.requirements, self.text = format, requirements, text
        self._ids = specials
        names = sorted(map(re.escape, specials), key=len, reverse=True)
        self._special = re.compile(f"({'|'.join(names)})") if names else None
        self._rules: list[str] = []

    def write(self, thinking: ThinkingMode) -> str:
        """Return the grammar. `thinking`: whether the reply has no reasoning, may begin with
        reasoning, or continues reasoning that the prompt has begun."""
        body = self._write_body()
        thoughts = self._write_thoughts(thinking)
        return "\n".join([f"start: {thoughts} {body}", *self._rules])

    def write_literal(self, text: str) -> str:
        """Return a string as grammar symbols: string literals, and tokens for special tokens."""
        parts = self._special.split(text) if self._special else [text]
        known = self._ids
        return " ".join(f"<[{known[p]}]>" if p in known else json.dumps(p) for p in parts if p)

    def _write_thoughts(self, thinking: ThinkingMode) -> str:
        """Return the symbols for reasoning before the body; "" if the reply has none or the body
        allows any text."""
        free = self.text is None and not self.requirements.required and not self.format.text_mark
        if thinking == "no" or (free and thinking == "may"):  # any text, reasoning included
            return ""
        opening, closing = map(self.write_literal, self.format.think)
        lead = self.write_literal(self.format.resume_mark) or r"/\n{0,2}/"
        self._rules.append(f"thoughts: {build_text_until(closing)} {lead}")
        return "thoughts" if thinking == "begun" else f"({opening} thoughts)*"

    def _write_body(self) -> str:
        if not self.requirements.functions:
            return self._write_text(self.text or ANY_TEXT)
        format = self.format
        if not (
            self.requirements.required or self.text or format.text_mark or format.starts_unmarked
        ):
            return self._write_marked_calls()
        calls = self._write_calls()
        if self.requirements.required:
            return calls
        if self.text is not None:
            return f"({calls} | {self._write_text(self.text)})"
        if format.text_mark:
            return f"({calls} | {self._write_text(ANY_TEXT)})"
        self._rules.append(rf'PLAIN: {ANY_TEXT} & ~/\s*(\{{\s*"name"|\[\w+\()(.|\n)*/')
        return f"({calls} | PLAIN)"

    def _write_text(self, text: str) -> str:
        return f"{self.write_literal(self.format.text_mark)} {text}"

    def _write_marked_calls(self) -> str:
        """Return the grammar symbols of text that may contain calls. A call must be complete if it
        has an opening mark."""
        first = self.format.before or self.format.open
        mark = next((name for name in self._ids if first.startswith(name)), first.rstrip())
        if mark in self._ids:
            opening = f"{ANY_TEXT} {self.write_literal(mark)}"
        else:
            self._rules += [f"mark[lazy]: TEXT {self.write_literal(mark)}", f"TEXT: {ANY_TEXT}"]
            opening = "mark"
        if self.format.before:
            rest = f"{self.write_literal(first.removeprefix(mark))} {self._write_regions()}"
        else:
            rest = self._write_region(first.removeprefix(mark))
        self._rules.append(f"marked: {opening} {rest}")
        self._rules.append(f"tail: {ANY_TEXT}")
        return "marked* tail" if self.requirements.parallel else "(marked | tail)"

    def _write_calls(self) -> str:
        return f"{self.write_literal(self.format.before)} {self._write_regions()}"

    def _write_regions(self) -> str:
        format = self.format
        self._rules.append(f"region: {self._write_region(format.open)}")
        several = format.region_separator is not None and self.requirements.parallel
        more = f"({self.write_literal(format.region_separator or '')} region)*" if several else ""
        return f"region {more} {self.write_literal(format.after)}"

    def _write_region(self, opening: str) -> str:
        """Return the symbols of a region that starts with `opening`."""
        format = self.format
        if not any(rule.startswith("call:") for rule in self._rules):
            names = [f"call_{i}" for i in range(len(self.requirements.functions))]
            for name, function in zip(names, self.requirements.functions, strict=True):
                self._rules.append(f"{name}: {self._write_call(function)}")
            self._rules.append(f"call: {' | '.join(names)}")
        several = format.call_separator is not None and self.requirements.parallel
        more = f"({self.write_literal(format.call_separator or '')} call)*" if several else ""
        begun, last = format.region_brackets
        behind = f"{more} {self.write_literal(last)} {self.write_literal(format.close)}"
        if format.starts_unmarked and begun:  # join bracket and name: "[" alone may begin a text
            firsts = [
                json.dumps(begun)[:-1] + self._write_call(each)[1:]
                for each in self.requirements.functions
            ]
            return f"({' | '.join(firsts)}) {behind}"
        return f"{self.write_literal(opening + begun)} call {behind}"

    def _write_call(self, function: FunctionSignature) -> str:
        try:
            return self.format.form.build_rule(function, self.write_literal)
        except (ValueError, TypeError) as error:
            problem = f"the function {function.name!r} cannot be called in the form of this model"
            raise InputError(f"{problem}: {error}").with_option("tools") from None
