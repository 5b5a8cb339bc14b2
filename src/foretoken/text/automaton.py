"""Every run of tokens in a text, how often it occurs and what followed it: a suffix automaton
(Blumer et al. 1985; for drafting: SAM-Decoding, arXiv 2411.10666); and automata of earlier texts,
apart by whose they are, in bounded memory.

A state stands for all runs that end at the same places of the text. The state of the whole text
links to that of its longest end which occurs elsewhere too, this to the longest end which occurs at
yet more places, and so on to the root, the empty run. Knows no models and no tokenizer.
"""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

ROOT = 0
DEEP = 32  # states that a token counts for; the ends of few texts but repetitions have more


class Automaton:
    """Grows by a token in amortised constant time, and shrinks again.

    Some 170 bytes a token of prose, 450 of texts made to be hard. The states' numbers are good
    until the next change. `count` and `recent` are of the `DEEP` longest ends at every place only,
    so that `a a a a ..` takes linear time too.
    """

    def __init__(self) -> None:
        self.ids = array("i")
        self.last = ROOT  # the state of the whole text
        self.length = array("i", [0])  # of a state's longest run
        self.link = array("i", [-1])
        self.count = array("i", [0])  # how often its runs occur
        self.recent = array("i", [0])  # where they ended last
        # None: the state of a beginning, behind which only one token has come
        self._next: list[dict[int, int] | None] = [None]
        self._at = array("i", [ROOT])  # the state of every beginning
        self._split = array("i")  # what each state that was made beside a beginning's was split off
        self._before = array("i")  # what `recent` was, of all that every token changed

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def match(self) -> int:
        """The state of the longest end of the text that occurred before; ROOT: none did."""
        return max(ROOT, self.link[self.last])

    def continued(self, state: int) -> int:
        """Return how often something followed its runs."""
        return self.count[state] - (self.recent[state] == len(self.ids))

    def following(self, state: int) -> Iterator[tuple[int, int]]:
        """Tokens that followed its runs, and the states of the runs with them. Barriers are
        left out."""
        after = self._next[state]
        if after is not None:
            return ((token, to) for token, to in after.items() if token >= 0)
        n = self.length[state]
        within = n < len(self.ids) and self.ids[n] >= 0
        return iter([(self.ids[n], self._at[n + 1])] if within else [])

    def find(self, tokens: Sequence[int]) -> tuple[int, int]:
        """The state of the longest end of `tokens` that occurs in the text, and its length."""
        state, n = ROOT, 0
        for token in tokens:
            if token < 0:  # a barrier of another text
                state, n = ROOT, 0
                continue
            to = self._to(state, token)
            while to is None and state != ROOT:
                state = self.link[state]
                n, to = self.length[state], self._to(state, token)
            state, n = (ROOT, 0) if to is None else (to, n + 1)
        return state, n

    def bar(self) -> None:
        """A barrier, which no run crosses that occurs twice: a token below 0 of its own."""
        self.append(-1 - len(self.ids))

    def append(self, token: int) -> None:
        """The text goes on."""
        before, end = self.last, len(self.ids) + 1
        self.ids.append(token)
        self.last = state = self._add(end, ROOT, 1, end, None)
        self._at.append(state)
        link, after = self.link, self._next
        p, to = link[before], None  # from `before` itself the way to `state` is the text's own
        while p >= 0 and (to := self._to(p, token)) is None:
            if (ways := after[p]) is None:
                n = self.length[p]
                ways = after[p] = {self.ids[n]: self._at[n + 1]}
            ways[token] = state
            p = link[p]
        if to is not None:
            link[state] = to if self.length[to] == self.length[p] + 1 else self._part(p, token, to)
        self._counted(end)

    def pop(self) -> int:
        """Take the last token back; returns it. IndexError where there is none."""
        state, newest = self.last, len(self.length) - 1
        for p in reversed(self._ends()):
            self.recent[p] = self._before.pop()
            self.count[p] -= 1
        token = self.ids.pop()
        self._at.pop()
        self.last = self._at[-1]
        self._next[self.last] = None
        p = self.link[self.last]
        while p >= 0 and self._to(p, token) == state:
            del self._ways(p)[token]
            p = self.link[p]
        if newest != state:
            original = self._split.pop()
            while p >= 0 and self._to(p, token) == newest:
                self._ways(p)[token] = original
                p = self.link[p]
            self.link[original] = self.link[newest]
            self._drop()
        self._drop()
        return token

    def _to(self, state: int, token: int) -> int | None:
        ways = self._next[state]
        if ways is not None:
            return ways.get(token)
        n = self.length[state]
        return self._at[n + 1] if n < len(self.ids) and self.ids[n] == token else None

    def _ways(self, state: int) -> dict[int, int]:
        ways = self._next[state]
        assert ways is not None
        return ways

    def _part(self, p: int, token: int, original: int) -> int:
        """Part from `original` a state of its runs that `p` leads to: they occur here too."""
        n = self.length[original]
        ways = self._next[original]
        ways = {self.ids[n]: self._at[n + 1]} if ways is None else dict(ways)
        values = self.link[original], self.count[original], self.recent[original]
        part = self._add(self.length[p] + 1, *values, ways)
        self._split.append(original)
        self.link[original] = part
        while p >= 0 and self._to(p, token) == original:
            self._ways(p)[token] = part
            p = self.link[p]
        return part

    def _counted(self, end: int) -> None:
        """The ends of the text occur once more."""
        count, recent, before = self.count, self.recent, self._before
        for p in self._ends():
            before.append(recent[p])
            recent[p] = end
            count[p] += 1

    def _ends(self) -> list[int]:
        """The states of the longest ends of the text that occur elsewhere too, which it counts
        for; the longest first."""
        link, ends = self.link, list[int]()
        p = link[self.last]
        while p > ROOT and len(ends) < DEEP:
            ends.append(p)
            p = link[p]
        return ends

    def _add(
        self, length: int, link: int, count: int, recent: int, ways: dict[int, int] | None
    ) -> int:
        self.length.append(length)
        self.link.append(link)
        self.count.append(count)
        self.recent.append(recent)
        self._next.append(ways)
        return len(self.length) - 1

    def _drop(self) -> None:
        for column in (self.length, self.link, self.count, self.recent, self._next):
            column.pop()


VOLUME = 2**14  # tokens that are forgotten together
MOST = 2**16  # tokens of all together, some 12 MB


@dataclass(slots=True)
class _Volume:
    salt: str
    texts: Automaton = field(default_factory=Automaton)


class Earlier:
    """Texts by salt: nothing of one salt is shown to another. Beyond `MOST` tokens in all, those
    that came first are forgotten, a volume at a time; of one text at most its last `VOLUME`."""

    def __init__(self) -> None:
        self._volumes: deque[_Volume] = deque()  # the oldest first

    def add(self, salt: str, tokens: Sequence[int]) -> None:
        """Another text of this salt."""
        tokens = tokens[-VOLUME:]
        volume = next((v for v in reversed(self._volumes) if v.salt == salt), None)
        if volume is None or len(volume.texts) + len(tokens) > VOLUME:
            volume = _Volume(salt)
            self._volumes.append(volume)
        for token in tokens:
            volume.texts.append(token)
        volume.texts.bar()
        while sum(len(v.texts) for v in self._volumes) > MOST:
            self._volumes.popleft()

    def of(self, salt: str) -> list[Automaton]:
        """All texts of this salt, the latest first, with barriers between them."""
        return [volume.texts for volume in reversed(self._volumes) if volume.salt == salt]
