"""Copy from context (section 3.6): what most often followed when the text last read like this.

A suffix automaton of every row's text says where its end, of any length, occurred before
(SAM-Decoding, arXiv 2411.10666), and counts say how far what followed can be trusted
(SuffixDecoding, arXiv 2411.04975). Draft tokens are certain (no q): a function of the text, and of
earlier ones, alone. Knows no model and no tokenizer.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice

from foretoken.drafters.base import Draft, Drafter, Draw, pack
from foretoken.models.row_slots import list_remaining_rows
from foretoken.request import Request
from foretoken.text.automaton import ROOT, Automaton, Earlier

SHORT = 2  # tokens of a match behind which far fewer draft tokens are kept than behind longer ones
SURE = 0.1  # estimated chance that all draft tokens up to one are kept, at least
LEAST = 4  # tokens that must agree before a text's own past is preferred to a drafter
WAYS = 128  # tokens that followed somewhere, of which one is chosen: those that came first
NEAR = 32  # last tokens of a text that are looked for in earlier ones


class LookupDrafter(Drafter):
    """A drafter that copies from the text: tokens that most often followed its longest repeated
    end.

    Where several followed as often, the latest; as many as are likely to be accepted. Prompt,
    output and, for an encoder-decoder, the source are searched; in an engine with prefix_cache also
    earlier outputs of the same salt, for greedy and coupled requests. The draft tokens are certain:
    a function of the text (paper, section 3.6; SAM-Decoding, arXiv 2411.10666; SuffixDecoding,
    arXiv 2411.04975).

    Examples:
        >>> import foretoken
        >>> spec = foretoken.load("novels", draft=foretoken.LookupDrafter())
        >>> (out,) = spec.generate("one two three one two three one", max_new_tokens=4, gamma=3)
        >>> out.stats.drafted > 0
        True
    """

    # Where nothing repeats, behind a short match, and behind a longer one
    priors = ((6.0, 0.0), (6.0, 0.3), (6.0, 0.6))

    def __init__(self) -> None:
        self.texts: list[_Text] = []
        self._earlier: Earlier | None = None
        self._salt = ""  # of the rows that join next

    def remember(self, on: bool) -> None:
        self._earlier = Earlier() if on else None

    def salted(self, salt: str) -> None:
        self._salt = salt

    def start(
        self, rows: list[int], prompts: list[list[int]], sources: list[list[int]] | None
    ) -> None:
        for b, prompt in enumerate(prompts):
            self.texts.append(_Text(prompt, sources[b] if sources else [], self._salt))

    def propose(self, gamma: list[int], draw: Draw) -> Draft:
        for text, params in zip(self.texts, draw.params, strict=True):
            text.shares = draw.coupled or (params.greedy and not draw.lenient)
        pairs = zip(self.texts, gamma, strict=True)
        return pack([text.propose(g, self._others(text) if g else []) for text, g in pairs])

    def grades(self) -> list[int]:
        """Return how long the match is behind which each sequence's next draft tokens are copied.

        Returns:
            0 for none, 1 for `SHORT` tokens at most, 2 for more.
        """
        matched = [text.matched(self._others(text)) for text in self.texts]
        return [(n > 0) + (n > SHORT) for n in matched]

    def _others(self, text: _Text) -> list[Automaton]:
        """The earlier outputs that a row may copy from."""
        if self._earlier is None or not text.shares:
            return []
        return self._earlier.of(text.salt)

    def commit(self, tokens: list[list[int]]) -> None:
        for text, kept in zip(self.texts, tokens, strict=True):
            text.read(kept)

    def rewind(self, counts: list[int]) -> None:
        for text, count in zip(self.texts, counts, strict=True):
            text.unread(count)

    def leave(self, rows: list[int]) -> None:
        if self._earlier is not None:
            for b in rows:
                self._earlier.add(self.texts[b].salt, self.texts[b].output)
        self.texts = [self.texts[b] for b in list_remaining_rows(len(self.texts), rows)]


class Repeats:
    """A row's look-up as its predicted output, in front of a drafter: where at least `LEAST` tokens
    have occurred before in its source, prompt or text."""

    prior = (4.0, 0.7)  # as `Costs.prior`

    def __init__(self, request: Request) -> None:
        self._text = _Text(request.prompt, request.source or [], request.salt)
        self._read: list[int] = []

    def predict_next(self, new_tokens: list[int], max_tokens: int) -> list[int]:
        common = len(self._read) if new_tokens[: len(self._read)] == self._read else 0
        self._text.unread(len(self._read) - common)
        self._text.read(new_tokens[common:])
        self._read = list(new_tokens)
        return self._text.propose(max_tokens, least=LEAST)


class _Text:
    """One row's tokens, with those of its source before a barrier."""

    def __init__(self, prompt: list[int], source: list[int], salt: str) -> None:
        self.salt, self.seen = salt, Automaton()
        self.shares = False  # whether it may copy from other texts: known from its first step on
        self._found: list[tuple[Automaton, int, int]] | None = None  # `_places`, until it goes on
        if source:
            self.read(source)
            self.seen.bar()
        self.read(prompt)
        self.begun = len(self.seen)

    @property
    def output(self) -> list[int]:
        return self.seen.ids[self.begun :].tolist()

    def read(self, tokens: list[int]) -> None:
        self._found = None
        for token in tokens:
            self.seen.append(token)

    def unread(self, count: int) -> None:
        self._found = None
        for _ in range(count):
            self.seen.pop()

    def propose(self, most: int, others: Sequence[Automaton] = (), least: int = 1) -> list[int]:
        """At most so many tokens, from behind a match of `least` tokens or more in this text or in
        one of `others`, whichever is likely to have more of them kept; this one where they are
        alike."""
        if not most:
            return []
        places = self._found or self._places(others)
        continuations = [follow(*place, most) for place in places if place[2] >= least]
        nothing: tuple[list[int], float] = ([], 0.0)
        return max(continuations, key=lambda each: each[1], default=nothing)[0]

    def matched(self, others: Sequence[Automaton]) -> int:
        """Count the last tokens that have occurred before, in this text or in one of `others`."""
        self._found = self._places(others)
        return max(length for _, _, length in self._found)

    def _places(self, others: Sequence[Automaton]) -> list[tuple[Automaton, int, int]]:
        """In this text and in others, the state of its longest end that occurred there before, and
        that end's length."""
        places = [(self.seen, self.seen.match, self.seen.length[self.seen.match])]
        last = self.seen.ids[-NEAR:].tolist() if others else []
        return places + [(other, *other.find(last)) for other in others]


def follow(automaton: Automaton, state: int, matched: int, most: int) -> tuple[list[int], float]:
    """Return the tokens that follow the last `matched` ones in `automaton`, in this state, at most
    `most`, and how many of them are likely to be accepted.

    The chance of a token is estimated by how often it was seen next: `count / (all + 1/n)` after n
    tokens in common, guesses included, so that a longer match is trusted further. At the end of
    the text it goes on behind its longest match: a period is repeated.
    """
    draft_tokens: list[int] = []
    chance, likely = 1.0, 0.0
    while state != ROOT and len(draft_tokens) < most:
        if automaton.length[state] == len(automaton):
            state = automaton.match
        ways = islice(automaton.following(state), WAYS)
        rated = [(automaton.count[to], automaton.recent[to], x, to) for x, to in ways]
        if not rated:
            break
        count, _, token, to = max(rated)
        chance *= count / (automaton.continued(state) + 1 / (matched + len(draft_tokens)))
        if chance < SURE:
            break
        draft_tokens.append(token)
        likely += chance
        state = to
    return draft_tokens, likely
