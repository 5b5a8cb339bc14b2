"""The grammar of a reply: calls that must be made, or that must be whole once they are begun, and
thoughts before. In llguidance's form of Lark."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from foretoken.errors import InputError
from foretoken.text.replies.calls import Signature, text_until
from foretoken.text.replies.formats import ReplyFormat

ANYTHING = r"/(.|\n)*/"
Thinking = Literal["no", "may", "begun"]  # in a reply; "begun": in the prompt


@dataclass(frozen=True, slots=True)
class Wish:
    """The reply that a request asks for."""

    functions: tuple[Signature, ...] = ()
    required: bool = False  # whether functions must be called
    parallel: bool = True  # whether several calls may be made


class GrammarWriter:
    """Writes the grammar of a reply in a format. `specials`: ids of special tokens by text, which a
    grammar names as tokens; `text`: the symbol of what is neither thought nor called."""

    def __init__(
        self, format: ReplyFormat, wish: Wish, specials: Mapping[str, int], text: str | None = None
    ) -> None:
        self.format, self.wish, self.text = format, wish, text
        self._ids = specials
        names = sorted(map(re.escape, specials), key=len, reverse=True)
        self._special = re.compile(f"({'|'.join(names)})") if names else None
        self._rules: list[str] = []

    def written(self, thinking: Thinking) -> str:
        """Return the grammar; `thinking`: whether a reply may begin with thoughts, or in them."""
        body = self._body()
        thoughts = self._thoughts(thinking)
        return "\n".join([f"start: {thoughts} {body}", *self._rules])

    def literal(self, text: str) -> str:
        """A text as symbols: strings, and tokens."""
        parts = self._special.split(text) if self._special else [text]
        known = self._ids
        return " ".join(f"<[{known[p]}]>" if p in known else json.dumps(p) for p in parts if p)

    def _thoughts(self, thinking: Thinking) -> str:
        """Thoughts before a body that would not allow them."""
        free = self.text is None and not self.wish.required and not self.format.wraps
        if thinking == "no" or (free and thinking == "may"):  # text that may hold thoughts
            return ""
        opening, closing = map(self.literal, self.format.think)
        lead = self.literal(self.format.resumes) or r"/\n{0,2}/"
        self._rules.append(f"thoughts: {text_until(closing)} {lead}")
        return "thoughts" if thinking == "begun" else f"({opening} thoughts)*"

    def _body(self) -> str:
        if not self.wish.functions:
            return self._wrapped(self.text or ANYTHING)
        format = self.format
        if not (self.wish.required or self.text or format.wraps or format.bare):
            return self._triggered()
        calls = self._calls()
        if self.wish.required:
            return calls
        if self.text is not None:
            return f"({calls} | {self._wrapped(self.text)})"
        if format.wraps:
            return f"({calls} | {self._wrapped(ANYTHING)})"
        self._rules.append(rf'PLAIN: {ANYTHING} & ~/\s*(\{{\s*"name"|\[\w+\()(.|\n)*/')
        return f"({calls} | PLAIN)"

    def _wrapped(self, text: str) -> str:
        """Text for the reader, behind the mark of such."""
        return f"{self.literal(self.format.wraps)} {text}"

    def _triggered(self) -> str:
        """Text, and calls that are whole once their mark is there."""
        first = self.format.before or self.format.open
        mark = next((name for name in self._ids if first.startswith(name)), first.rstrip())
        if mark in self._ids:
            opening = f"{ANYTHING} {self.literal(mark)}"
        else:
            self._rules += [f"mark[lazy]: TEXT {self.literal(mark)}", f"TEXT: {ANYTHING}"]
            opening = "mark"
        if self.format.before:
            rest = f"{self.literal(first.removeprefix(mark))} {self._regions()}"
        else:
            rest = self._region(first.removeprefix(mark))
        self._rules.append(f"marked: {opening} {rest}")
        self._rules.append(f"tail: {ANYTHING}")
        return "marked* tail" if self.wish.parallel else "(marked | tail)"

    def _calls(self) -> str:
        """All calls of a reply."""
        return f"{self.literal(self.format.before)} {self._regions()}"

    def _regions(self) -> str:
        format = self.format
        self._rules.append(f"region: {self._region(format.open)}")
        several = format.between is not None and self.wish.parallel
        more = f"({self.literal(format.between or '')} region)*" if several else ""
        return f"region {more} {self.literal(format.after)}"

    def _region(self, opening: str) -> str:
        """A region behind so much of its opening."""
        format = self.format
        if not any(rule.startswith("call:") for rule in self._rules):
            names = [f"call_{i}" for i in range(len(self.wish.functions))]
            for name, function in zip(names, self.wish.functions, strict=True):
                self._rules.append(f"{name}: {self._call(function)}")
            self._rules.append(f"call: {' | '.join(names)}")
        several = format.inside is not None and self.wish.parallel
        more = f"({self.literal(format.inside or '')} call)*" if several else ""
        begun, last = format.around
        behind = f"{more} {self.literal(last)} {self.literal(format.close)}"
        if format.bare and begun:  # one string with the name behind: alone it could be a text's
            firsts = [json.dumps(begun)[:-1] + self._call(each)[1:] for each in self.wish.functions]
            return f"({' | '.join(firsts)}) {behind}"
        return f"{self.literal(opening + begun)} call {behind}"

    def _call(self, function: Signature) -> str:
        try:
            return self.format.form.rule(function, self.literal)
        except (ValueError, TypeError) as error:
            problem = f"the function {function.name!r} cannot be called in the form of this model"
            raise InputError(f"{problem}: {error}").about("tools") from None
