"""Suffix automaton of a token sequence: an index of its substrings, with the number of times that
each occurs and the tokens that followed it (Blumer et al. 1985; for drafting: SAM-Decoding, arXiv
2411.10666). `EarlierOutputs` holds the automata of earlier outputs in bounded memory.

A state stands for all substrings that end at the same positions. Its link leads to the state of the
longest suffix of these substrings that ends at more positions. From the state of the whole
sequence, links thus lead through ever shorter suffixes to the root (the empty substring).
"""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

ROOT_STATE = 0
MAX_COUNTED_SUFFIXES = 32  # states updated per token; only repetitive sequences have more


class SuffixAutomaton:
    """A suffix automaton of a sequence that grows and shrinks at its end. `append` and `pop` take
    amortised constant time.

    Memory: some 170 bytes a token for prose, 450 for adversarial sequences. State numbers are valid
    until the next change. `count` and `recent` are updated for only the `MAX_COUNTED_SUFFIXES`
    longest suffixes at each position, so that the sequence `a a a a ..` takes linear time too.
    """

    def __init__(self) -> None:
        self.ids = array("i")
        self.last = ROOT_STATE  # state of the whole sequence
        self.length = array("i", [0])  # per state: length of its longest substring
        self.link = array("i", [-1])
        self.count = array("i", [0])  # per state: occurrences of its substrings
        self.recent = array("i", [0])  # per state: position at which its substrings last ended
        # per state: token -> state; None: a prefix's state, whose only transition is the next token
        self._transitions: list[dict[int, int] | None] = [None]
        self._prefix_states = array("i", [ROOT_STATE])  # state of each prefix, by length
        self._split_from = array("i")  # the state that each split-off state came from
        self._previous_recent = array("i")  # `recent` before each change, for `pop`

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def match(self) -> int:
        """Return the state of the longest suffix that occurred before; ROOT_STATE if none did."""
        return max(ROOT_STATE, self.link[self.last])

    def count_continuations(self, state: int) -> int:
        """Return how many occurrences of the state's substrings are followed by a token."""
        return self.count[state] - (self.recent[state] == len(self.ids))

    def iter_continuations(self, state: int) -> Iterator[tuple[int, int]]:
        """Iterate over the tokens that followed the state's substrings, as (token, state of these
        substrings with the token appended). Barriers are left out."""
        transitions = self._transitions[state]
        if transitions is not None:
            return ((token, to) for token, to in transitions.items() if token >= 0)
        n = self.length[state]
        within = n < len(self.ids) and self.ids[n] >= 0
        return iter([(self.ids[n], self._prefix_states[n + 1])] if within else [])

    def find(self, tokens: Sequence[int]) -> tuple[int, int]:
        """Return the longest suffix of `tokens` in the sequence, as its state and length."""
        state, n = ROOT_STATE, 0
        for token in tokens:
            if token < 0:  # a barrier, from another automaton
                state, n = ROOT_STATE, 0
                continue
            to = self._get_next_state(state, token)
            while to is None and state != ROOT_STATE:
                state = self.link[state]
                n, to = self.length[state], self._get_next_state(state, token)
            state, n = (ROOT_STATE, 0) if to is None else (to, n + 1)
        return state, n

    def append_barrier(self) -> None:
        """Append a unique token below 0, so that no repeated substring crosses it."""
        self.append(-1 - len(self.ids))

    def append(self, token: int) -> None:
        """Append a token to the sequence, and add the new substrings."""
        before, end = self.last, len(self.ids) + 1
        self.ids.append(token)
        self.last = state = self._add_state(end, ROOT_STATE, 1, end, None)
        self._prefix_states.append(state)
        link, after = self.link, self._transitions
        p, to = link[before], None  # `before` needs no transition: None implies the next token
        while p >= 0 and (to := self._get_next_state(p, token)) is None:
            if (transitions := after[p]) is None:
                n = self.length[p]
                transitions = after[p] = {self.ids[n]: self._prefix_states[n + 1]}
            transitions[token] = state
            p = link[p]
        if to is not None:
            link[state] = (
                to if self.length[to] == self.length[p] + 1 else self._split_state(p, token, to)
            )
        self._count_suffixes(end)

    def pop(self) -> int:
        """Remove the last token and return it. Raises IndexError if there is none."""
        state, newest = self.last, len(self.length) - 1
        for p in reversed(self._list_repeated_suffixes()):
            self.recent[p] = self._previous_recent.pop()
            self.count[p] -= 1
        token = self.ids.pop()
        self._prefix_states.pop()
        self.last = self._prefix_states[-1]
        self._transitions[self.last] = None
        p = self.link[self.last]
        while p >= 0 and self._get_next_state(p, token) == state:
            del self._get_transitions(p)[token]
            p = self.link[p]
        if newest != state:
            original = self._split_from.pop()
            while p >= 0 and self._get_next_state(p, token) == newest:
                self._get_transitions(p)[token] = original
                p = self.link[p]
            self.link[original] = self.link[newest]
            self._drop_state()
        self._drop_state()
        return token

    def _get_next_state(self, state: int, token: int) -> int | None:
        transitions = self._transitions[state]
        if transitions is not None:
            return transitions.get(token)
        n = self.length[state]
        return self._prefix_states[n + 1] if n < len(self.ids) and self.ids[n] == token else None

    def _get_transitions(self, state: int) -> dict[int, int]:
        transitions = self._transitions[state]
        assert transitions is not None
        return transitions

    def _split_state(self, parent: int, token: int, original: int) -> int:
        """Split a state off from `original`, for those of its substrings to which `token` leads
        from `parent`: only these substrings occur at the current position too."""
        n = self.length[original]
        transitions = self._transitions[original]
        transitions = (
            {self.ids[n]: self._prefix_states[n + 1]} if transitions is None else dict(transitions)
        )
        values = self.link[original], self.count[original], self.recent[original]
        copy = self._add_state(self.length[parent] + 1, *values, transitions)
        self._split_from.append(original)
        self.link[original] = copy
        while parent >= 0 and self._get_next_state(parent, token) == original:
            self._get_transitions(parent)[token] = copy
            parent = self.link[parent]
        return copy

    def _count_suffixes(self, end: int) -> None:
        """Count one more occurrence of the repeated suffixes, at the position `end`."""
        count, recent, before = self.count, self.recent, self._previous_recent
        for p in self._list_repeated_suffixes():
            before.append(recent[p])
            recent[p] = end
            count[p] += 1

    def _list_repeated_suffixes(self) -> list[int]:
        """Return the states of the longest suffixes that also occur elsewhere, at most
        `MAX_COUNTED_SUFFIXES`, the longest first."""
        link, ends = self.link, list[int]()
        p = link[self.last]
        while p > ROOT_STATE and len(ends) < MAX_COUNTED_SUFFIXES:
            ends.append(p)
            p = link[p]
        return ends

    def _add_state(
        self, length: int, link: int, count: int, recent: int, transitions: dict[int, int] | None
    ) -> int:
        self.length.append(length)
        self.link.append(link)
        self.count.append(count)
        self.recent.append(recent)
        self._transitions.append(transitions)
        return len(self.length) - 1

    def _drop_state(self) -> None:
        for column in (self.length, self.link, self.count, self.recent, self._transitions):
            column.pop()


MAX_VOLUME_TOKENS = 2**14  # tokens that are evicted together
MAX_EARLIER_TOKENS = 2**16  # tokens of all volumes, some 12 MB


@dataclass(slots=True)
class _Volume:
    salt: str
    automaton: SuffixAutomaton = field(default_factory=SuffixAutomaton)


class EarlierOutputs:
    """Stores earlier outputs by salt, so that outputs of one salt are not visible under another
    salt. If all outputs together exceed `MAX_EARLIER_TOKENS` tokens, the oldest volume (outputs in
    one automaton) is evicted. Only the last `MAX_VOLUME_TOKENS` tokens of an output are stored."""

    def __init__(self) -> None:
        self._volumes: deque[_Volume] = deque()  # the oldest first

    def add(self, salt: str, tokens: Sequence[int]) -> None:
        """Add an output under this salt."""
        tokens = tokens[-MAX_VOLUME_TOKENS:]
        volume = next((v for v in reversed(self._volumes) if v.salt == salt), None)
        if volume is None or len(volume.automaton) + len(tokens) > MAX_VOLUME_TOKENS:
            volume = _Volume(salt)
            self._volumes.append(volume)
        for token in tokens:
            volume.automaton.append(token)
        volume.automaton.append_barrier()
        while sum(len(v.automaton) for v in self._volumes) > MAX_EARLIER_TOKENS:
            self._volumes.popleft()

    def list_automata(self, salt: str) -> list[SuffixAutomaton]:
        """Return the automata of this salt, the latest first; barriers separate the outputs."""
        return [volume.automaton for volume in reversed(self._volumes) if volume.salt == salt]
