"""Copy from context (section 3.6): what followed when the text last read like this.

Prompt, output and, for an encoder-decoder, the source are searched for the longest end of the
text that occurred before, the most recent one where there are several. Guesses are certain (no q):
a function of the text alone. Knows no model and no tokenizer.
"""

from __future__ import annotations

from collections.abc import Iterator

from foretoken.drafters.base import Draft, Draw, pack
from foretoken.errors import InputError
from foretoken.models.rows import staying
from foretoken.request import Request

LEAST = 4  # tokens that must agree before a text's own past is preferred to a drafter
BARRIER = -1  # between source and text; never an id, so no match crosses it


class LookupDrafter:
    """Guesses the tokens that followed the longest earlier match of at most `longest` tokens."""

    def __init__(self, longest: int = 8) -> None:
        if longest < 1:
            raise InputError(f"longest is {longest}; give the most tokens to match, 1 or more")
        self.longest = longest
        self.texts: list[_Text] = []

    def start(
        self, rows: list[int], prompts: list[list[int]], sources: list[list[int]] | None
    ) -> None:
        for b, prompt in enumerate(prompts):
            text = _Text(self.longest)
            if sources is not None:
                text.read([*sources[b], BARRIER])
            text.read(prompt)
            self.texts.append(text)

    def propose(self, gamma: list[int], draw: Draw) -> Draft:
        return pack([text.copy(g) for text, g in zip(self.texts, gamma, strict=True)])

    def commit(self, tokens: list[list[int]]) -> None:
        for text, kept in zip(self.texts, tokens, strict=True):
            text.read(kept)

    def rewind(self, counts: list[int]) -> None:
        for text, count in zip(self.texts, counts, strict=True):
            text.unread(count)

    def leave(self, rows: list[int]) -> None:
        self.texts = [self.texts[b] for b in staying(len(self.texts), rows)]


class Repeats:
    """A row's look-up as its foresight, in front of a drafter: where at least `LEAST` tokens have
    occurred before in its source, prompt or text."""

    prior = (4.0, 0.7)  # as `Costs.prior`

    def __init__(self, request: Request) -> None:
        self._text = _Text(2 * LEAST)
        if request.source is not None:
            self._text.read([*request.source, BARRIER])
        self._text.read(list(request.prompt))
        self._read: list[int] = []

    def after(self, text: list[int], most: int) -> list[int]:
        common = len(self._read) if text[: len(self._read)] == self._read else 0
        self._text.unread(len(self._read) - common)
        self._text.read(text[common:])
        self._read = list(text)
        return self._text.copy(most, LEAST)


class _Text:
    """One row's tokens, and where each run of up to `longest` of them last went on."""

    def __init__(self, longest: int) -> None:
        self.longest = longest
        self.ids: list[int] = []
        self.follows: dict[int, int] = {}  # hash of a run -> place of the token after it
        self.before: list[list[int | None]] = []  # at every token, what `follows` held until then

    def read(self, tokens: list[int]) -> None:
        """Append. A run is indexed when its successor arrives: the end never matches itself."""
        for token in tokens:
            keys, place = self._ended(token), len(self.ids)
            self.before.append([self.follows.get(key) for key in keys])
            self.follows.update(dict.fromkeys(keys, place))
            self.ids.append(token)

    def unread(self, count: int) -> None:
        """Take the last `count` tokens back."""
        for _ in range(count):
            keys = self._ended(self.ids.pop())
            for key, place in zip(keys, self.before.pop(), strict=True):
                if place is None:
                    self.follows.pop(key, None)
                else:
                    self.follows[key] = place

    def _ended(self, token: int) -> list[int]:
        """Keys of the runs that this token follows: those at the end of what was read."""
        return [] if token == BARRIER else list(self._keys(min(self.longest, len(self.ids))))

    def copy(self, count: int, least: int = 1) -> list[int]:
        """At most `count` tokens from where a match of `least` tokens or more goes on; past the
        text's end, these again."""
        place = self._match(least) if count else None
        if place is None:
            return []
        copied = self.ids[place : place + count]
        if BARRIER in copied:
            return copied[: copied.index(BARRIER)]
        return [copied[i % len(copied)] for i in range(count)]

    def _match(self, least: int) -> int | None:
        """The place after the longest earlier match of the text's end, of `least` tokens or
        more."""
        match = None
        end = len(self.ids)
        for n, key in enumerate(self._keys(min(self.longest, end)), 1):
            place = self.follows.get(key)
            if place is None or self.ids[place - n : place] != self.ids[end - n :]:
                break  # nor can anything longer occur
            match = place if n >= least else None
        return match

    def _keys(self, longest: int) -> Iterator[int]:
        """Hashes of the last 1, 2, .. `longest` tokens; tuples would take twice the memory."""
        end = len(self.ids)
        for n in range(1, longest + 1):
            yield hash(tuple(self.ids[end - n :]))
