"""Split a reply into regions: reasoning, calls and text for the user. The reply may arrive in
pieces of any size. No character is lost."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import regex

RegionKind = Literal["thought", "calls", "dropped"]


@dataclass(frozen=True, slots=True)
class Region:
    """A kind of region that a reply may have, with patterns of the marks that open and close it. If
    `close` is None, the region lasts until the reply's end; a region of the kind "dropped" consists
    of its mark only."""

    kind: RegionKind
    open: regex.Pattern[str]
    close: regex.Pattern[str] | None
    parser: Any = None  # used by the caller
    can_close: Callable[[str], bool] | None = None  # whether a mark after this text closes it


def compile_literals(*texts: str) -> regex.Pattern[str]:
    """Return a pattern for any of these strings, none of which may be a prefix of another."""
    return regex.compile("|".join(map(regex.escape, texts)))


class RegionPiece(NamedTuple):
    """New characters of a region. The `raw` strings of all pieces concatenate to the reply."""

    region: Region | None  # None: text for the user
    raw: str
    text: str  # without marks
    captures: dict[str, str]  # named groups of the region's opening mark
    closed: bool = False  # whether the region ends with this piece
    cut: bool = False  # whether the reply was cut before the region's closing mark


class RegionSplitter:
    """Splits one reply, which may begin inside a region (`within`)."""

    def __init__(self, regions: Sequence[Region], within: Region | None = None) -> None:
        self._regions, self.region = regions, within
        self._buffer, self._begun = "", False
        self._body = ""  # the region so far, if it has `can_close`
        self._captures: dict[str, str] = {}

    def feed(
        self, text: str, *, last: bool = False, cut: str | None = None
    ) -> Iterator[RegionPiece]:
        """Append characters and yield the pieces that are final. `last`: whether the reply is over,
        so that all the rest is final. `cut`: the stop string that ended the reply, or "" if a limit
        ended it; the beginning of a mark at the reply's end is then dropped."""
        self._buffer += text
        while True:
            mark, settled = self._find_mark(self._list_marks("thought", "calls", "dropped"), last)
            if mark is None:
                if last and cut is not None:
                    settled = self._find_begun_mark(cut)
                yield from self._take_piece(settled)
                if last and self.region is not None:
                    marks = {"closed": True, "cut": cut is not None}
                    yield RegionPiece(self.region, "", "", self._captures, **marks)
                    self.region = None
                return
            region, start, end, captures = mark
            yield from self._take_piece(start)
            raw, self._buffer = self._buffer[: end - start], self._buffer[end - start :]
            self._begun = True
            if region is None:
                yield RegionPiece(self.region, raw, "", self._captures, closed=True)
                self.region = None
            elif region.kind == "dropped":
                yield RegionPiece(region, raw, "", captures, closed=True)
            else:
                self.region, self._captures, self._body = region, captures, ""
                yield RegionPiece(region, raw, "", captures)

    def _take_piece(self, size: int) -> Iterator[RegionPiece]:
        text, self._buffer = self._buffer[:size], self._buffer[size:]
        if text:
            self._begun = True
            if self.region is not None and self.region.can_close is not None:
                self._body += text
            yield RegionPiece(self.region, text, text, self._captures)

    def _find_begun_mark(self, stop: str) -> int:
        """Return the length of the buffer without an incomplete mark of calls at its end; the stop
        string may complete the mark. Letters and blanks alone do not count as a mark, nor do
        characters within a string."""
        size = len(self._buffer)
        watched = self._list_marks("calls", "dropped")
        if not watched or all(each.kind != "calls" for each in self._regions):
            return size
        self._buffer += stop
        mark, settled = self._find_mark(watched, last=False)
        self._buffer = self._buffer[:size]
        begins = min(settled, size if mark is None else mark[1])
        can_close = None if self.region is None else self.region.can_close
        if can_close is not None and not can_close(self._body + self._buffer[:begins]):
            return size
        return begins if regex.search(r"[^\w\s]", self._buffer[begins:]) else size

    def _list_marks(self, *kinds: RegionKind) -> list[tuple[Region | None, Any]]:
        """Return the marks of these kinds of regions that may come next, as (region, pattern); the
        region is None for the closing mark of the current region."""
        inside = self.region
        if inside is None:
            return [(each, each.open) for each in self._regions if each.kind in kinds]
        return [(None, inside.close)] if inside.close is not None and inside.kind in kinds else []

    def _find_mark(self, watched: list[tuple[Region | None, Any]], last: bool) -> tuple[Any, int]:
        """Return the first of these marks, or None, and the number of characters that are final,
        because no incomplete mark begins in them. A mark is (region, start, end, captures); the
        region is None for a closing mark."""
        best, settled = None, len(self._buffer)
        for region, pattern in watched:
            if self._begun and pattern.pattern.startswith(r"\A"):
                continue
            match = self._search(region, pattern, last)
            if match is None:
                continue
            edge = match.end() == len(self._buffer)
            if not last and (match.partial or (edge and _can_grow(pattern, match))):
                settled = min(settled, match.start())
                continue
            found = (match.start(), -match.end(), region, match.groupdict())
            best = found if best is None or found[:2] < best[:2] else best
        if best is None or best[0] >= settled and settled < len(self._buffer):
            return None, settled
        start, end, region, captures = best[0], -best[1], best[2], best[3]
        named = {key: value for key, value in captures.items() if value is not None}
        return (region, start, end, named), settled

    def _search(self, region: Region | None, pattern: Any, last: bool) -> Any:
        """Return the first match; for a closing mark, the first one that `can_close` allows."""
        match = pattern.search(self._buffer, partial=not last)
        can_close = self.region.can_close if region is None and self.region is not None else None
        while match is not None and not match.partial and can_close is not None:
            if can_close(self._body + self._buffer[: match.start()]):
                break
            match = pattern.search(
                self._buffer, max(match.start() + 1, match.end()), partial=not last
            )
        return match


def _can_grow(pattern: regex.Pattern[str], match: Any) -> bool:
    """Return whether more characters may change a match at the end of the buffer. They cannot
    change the match of a literal."""
    return regex.escape(match[0]) != pattern.pattern
