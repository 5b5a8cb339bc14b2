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
from foretoken.text.automaton import ROOT_STATE, EarlierOutputs, SuffixAutomaton

SHORT_MATCH_TOKENS = (
    2  # tokens of a match behind which far fewer draft tokens are kept than behind longer ones
)
MIN_ACCEPTED_CHANCE = 0.1  # estimated chance that all draft tokens up to one are kept, at least
MIN_REPEATED_TOKENS = 4  # tokens that must agree before a text's own past is preferred to a drafter
MAX_CONTINUATIONS = (
    128  # tokens that followed somewhere, of which one is chosen: those that came first
)
MAX_SEARCHED_TOKENS = 32  # last tokens of a text that are looked for in earlier ones


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
        self.seqs: list[_LookupSequence] = []
        self._earlier: EarlierOutputs | None = None
        self._salt = ""  # of the rows that join next

    def set_prefix_caching(self, enabled: bool) -> None:
        self._earlier = EarlierOutputs() if enabled else None

    def set_salt(self, salt: str) -> None:
        self._salt = salt

    def start(
        self, rows: list[int], prompts: list[list[int]], sources: list[list[int]] | None
    ) -> None:
        for b, prompt in enumerate(prompts):
            self.seqs.append(_LookupSequence(prompt, sources[b] if sources else [], self._salt))

    def propose(self, gamma: list[int], draw: Draw) -> Draft:
        for seq, params in zip(self.seqs, draw.params, strict=True):
            seq.copies_earlier = draw.coupled or (params.greedy and not draw.lenient)
        pairs = zip(self.seqs, gamma, strict=True)
        return pack(
            [seq.propose(g, self._get_earlier_outputs(seq) if g else []) for seq, g in pairs]
        )

    def predict_grades(self) -> list[int]:
        """Return how long the match is behind which each sequence's next draft tokens are copied.

        Returns:
            0 for none, 1 for `SHORT_MATCH_TOKENS` tokens at most, 2 for more.
        """
        matched = [seq.count_matched_tokens(self._get_earlier_outputs(seq)) for seq in self.seqs]
        return [(n > 0) + (n > SHORT_MATCH_TOKENS) for n in matched]

    def _get_earlier_outputs(self, seq: _LookupSequence) -> list[SuffixAutomaton]:
        """The earlier outputs that a row may copy from."""
        if self._earlier is None or not seq.copies_earlier:
            return []
        return self._earlier.list_automata(seq.salt)

    def commit(self, tokens: list[list[int]]) -> None:
        for seq, new_tokens in zip(self.seqs, tokens, strict=True):
            seq.append(new_tokens)

    def rewind(self, counts: list[int]) -> None:
        for seq, count in zip(self.seqs, counts, strict=True):
            seq.pop(count)

    def leave(self, rows: list[int]) -> None:
        if self._earlier is not None:
            for b in rows:
                self._earlier.add(self.seqs[b].salt, self.seqs[b].output)
        self.seqs = [self.seqs[b] for b in list_remaining_rows(len(self.seqs), rows)]


class RepeatPrediction:
    """A row's look-up as its predicted output, in front of a drafter: where at least
    `MIN_REPEATED_TOKENS` tokens have occurred before in its source, prompt or text."""

    prior = (4.0, 0.7)  # as `Costs.prior`

    def __init__(self, request: Request) -> None:
        self._seq = _LookupSequence(request.prompt, request.source or [], request.salt)
        self._tokens: list[int] = []

    def predict_next(self, new_tokens: list[int], max_tokens: int) -> list[int]:
        common = len(self._tokens) if new_tokens[: len(self._tokens)] == self._tokens else 0
        self._seq.pop(len(self._tokens) - common)
        self._seq.append(new_tokens[common:])
        self._tokens = list(new_tokens)
        return self._seq.propose(max_tokens, min_match=MIN_REPEATED_TOKENS)


class _LookupSequence:
    """One row's tokens, with those of its source before a barrier."""

    def __init__(self, prompt: list[int], source: list[int], salt: str) -> None:
        self.salt, self.automaton = salt, SuffixAutomaton()
        self.copies_earlier = (
            False  # whether it may copy from other texts: known from its first step on
        )
        self._matches: list[tuple[SuffixAutomaton, int, int]] | None = (
            None  # `_places`, until it goes on
        )
        if source:
            self.append(source)
            self.automaton.append_barrier()
        self.append(prompt)
        self.prompt_length = len(self.automaton)

    @property
    def output(self) -> list[int]:
        return self.automaton.ids[self.prompt_length :].tolist()

    def append(self, tokens: list[int]) -> None:
        self._matches = None
        for token in tokens:
            self.automaton.append(token)

    def pop(self, count: int) -> None:
        self._matches = None
        for _ in range(count):
            self.automaton.pop()

    def propose(
        self, max_tokens: int, others: Sequence[SuffixAutomaton] = (), min_match: int = 1
    ) -> list[int]:
        """At most so many tokens, from behind a match of `min_match` tokens or more in this text
        or in one of `others`, whichever is likely to have more of them kept; this one where they
        are alike."""
        if not max_tokens:
            return []
        matches = self._matches or self._find_matches(others)
        continuations = [
            continue_match(*place, max_tokens) for place in matches if place[2] >= min_match
        ]
        nothing: tuple[list[int], float] = ([], 0.0)
        return max(continuations, key=lambda each: each[1], default=nothing)[0]

    def count_matched_tokens(self, others: Sequence[SuffixAutomaton]) -> int:
        """Count the last tokens that have occurred before, in this text or in one of `others`."""
        self._matches = self._find_matches(others)
        return max(length for _, _, length in self._matches)

    def _find_matches(
        self, others: Sequence[SuffixAutomaton]
    ) -> list[tuple[SuffixAutomaton, int, int]]:
        """In this text and in others, the state of its longest end that occurred there before, and
        that end's length."""
        matches = [
            (self.automaton, self.automaton.match, self.automaton.length[self.automaton.match])
        ]
        last = self.automaton.ids[-MAX_SEARCHED_TOKENS:].tolist() if others else []
        return matches + [(other, *other.find(last)) for other in others]


def continue_match(
    automaton: SuffixAutomaton, state: int, num_matched: int, max_tokens: int
) -> tuple[list[int], float]:
    """Return the tokens that follow the last `matched` ones in `automaton`, in this state, at most
    `max_tokens`, and how many of them are likely to be accepted.

    The chance of a token is estimated by how often it was seen next: `count / (all + 1/n)` after n
    tokens in common, guesses included, so that a longer match is trusted further. At the end of
    the text it goes on behind its longest match: a period is repeated.
    """
    draft_tokens: list[int] = []
    chance, expected = 1.0, 0.0
    while state != ROOT_STATE and len(draft_tokens) < max_tokens:
        if automaton.length[state] == len(automaton):
            state = automaton.match
        continuations = islice(automaton.iter_continuations(state), MAX_CONTINUATIONS)
        rated = [(automaton.count[to], automaton.recent[to], x, to) for x, to in continuations]
        if not rated:
            break
        count, _, token, to = max(rated)
        chance *= count / (
            automaton.count_continuations(state) + 1 / (num_matched + len(draft_tokens))
        )
        if chance < MIN_ACCEPTED_CHANCE:
            break
        draft_tokens.append(token)
        expected += chance
        state = to
    return draft_tokens, expected
