"""A drafter that copies from the context (paper, section 3.6): it proposes the tokens that most
often followed earlier occurrences of the sequence's last tokens.

A suffix automaton of each sequence finds earlier occurrences of its suffixes of any length
(SAM-Decoding, arXiv 2411.10666). The probability that a token is accepted is estimated from how
often the token followed (SuffixDecoding, arXiv 2411.04975). Draft tokens are certain (no q): they
depend only on the sequence and on earlier outputs.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice

from foretoken.drafters.base import Draft, Drafter, Draw, pack
from foretoken.models.row_slots import list_remaining_rows
from foretoken.request import Request
from foretoken.text.automaton import ROOT_STATE, EarlierOutputs, SuffixAutomaton

# far fewer draft tokens are accepted after a match of up to this length than after a longer one
SHORT_MATCH_TOKENS = 2
# a draft ends before a token if the estimated probability that this token and all before it are
# accepted is lower than this
MIN_ACCEPTED_CHANCE = 0.1
MAX_CONTINUATIONS = 128  # only the first 128 different next tokens are compared: bounds the time
MAX_SEARCHED_TOKENS = 32  # only the last 32 tokens are searched for in earlier outputs


class LookupDrafter(Drafter):
    """A drafter that finds the longest suffix of the sequence that occurred before, and proposes
    the tokens that most often followed this suffix.

    If several tokens followed equally often, it proposes the token that followed last. It stops
    proposing when the next token is unlikely to be accepted. It searches the prompt, the output
    and, for an encoder-decoder, the source. In an engine with prefix_cache, it also searches
    earlier outputs of the same salt, for greedy and coupled requests. The draft tokens are certain
    (paper, section 3.6; SAM-Decoding, arXiv 2411.10666; SuffixDecoding, arXiv 2411.04975).

    Examples:
        >>> import foretoken
        >>> spec = foretoken.load("novels", draft=foretoken.LookupDrafter())
        >>> (out,) = spec.generate("one two three one two three one", max_new_tokens=4, gamma=3)
        >>> out.stats.drafted > 0
        True
    """

    # by grade: without a match, after a short match, and after a longer match
    priors = ((6.0, 0.0), (6.0, 0.3), (6.0, 0.6))

    def __init__(self) -> None:
        self.seqs: list[_LookupSequence] = []
        self._earlier: EarlierOutputs | None = None
        self._salt = ""  # of the sequences that start next

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
        # a sampled output must depend on its seed only, not on which requests came before
        for seq, params in zip(self.seqs, draw.params, strict=True):
            seq.copies_earlier = draw.coupled or (params.greedy and not draw.lenient)
        pairs = zip(self.seqs, gamma, strict=True)
        return pack(
            [seq.propose(g, self._get_earlier_outputs(seq) if g else []) for seq, g in pairs]
        )

    def predict_grades(self) -> list[int]:
        """Return each sequence's grade, by the number of its last tokens that occurred before.

        Returns:
            0 if none occurred before, 1 for up to `SHORT_MATCH_TOKENS` tokens, 2 for more.
        """
        matched = [seq.count_matched_tokens(self._get_earlier_outputs(seq)) for seq in self.seqs]
        return [(n > 0) + (n > SHORT_MATCH_TOKENS) for n in matched]

    def _get_earlier_outputs(self, seq: _LookupSequence) -> list[SuffixAutomaton]:
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
    """Predicts the next tokens of one sequence by a look-up in its source, prompt and output."""

    priors = ((6.0, 0.3), (6.0, 0.7))  # by grade: after a short match, and after a longer match

    def __init__(self, request: Request) -> None:
        self._seq = _LookupSequence(request.prompt, request.source or [], request.salt)
        self._tokens: list[int] = []

    def predict_next(self, new_tokens: list[int], max_tokens: int) -> list[int]:
        """Return up to `max_tokens` tokens that are likely to follow the output `new_tokens`."""
        common = len(self._tokens) if new_tokens[: len(self._tokens)] == self._tokens else 0
        self._seq.pop(len(self._tokens) - common)
        self._seq.append(new_tokens[common:])
        self._tokens = list(new_tokens)
        return self._seq.propose(max_tokens)

    @property
    def grade(self) -> int:
        """The grade of the last prediction, by the number of tokens that occurred before."""
        return int(self._seq.count_matched_tokens([]) > SHORT_MATCH_TOKENS)


class _LookupSequence:
    """One sequence and the automaton of its tokens: the source and a barrier if there is a source,
    then prompt and output."""

    def __init__(self, prompt: list[int], source: list[int], salt: str) -> None:
        self.salt, self.automaton = salt, SuffixAutomaton()
        # whether this sequence may copy from earlier outputs; `LookupDrafter.propose` decides
        self.copies_earlier = False
        # result of `_find_matches`, until the sequence changes
        self._matches: list[tuple[SuffixAutomaton, int, int]] | None = None
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

    def propose(self, max_tokens: int, others: Sequence[SuffixAutomaton] = ()) -> list[int]:
        """Return up to `max_tokens` tokens that followed the longest match, in this sequence or in
        one of the earlier outputs `others`. Among several such continuations, return the
        continuation with the most tokens expected to be accepted; at a tie, this sequence's own
        continuation."""
        if not max_tokens:
            return []
        matches = self._matches or self._find_matches(others)
        continuations = [continue_match(*match, max_tokens) for match in matches]
        nothing: tuple[list[int], float] = ([], 0.0)
        return max(continuations, key=lambda each: each[1], default=nothing)[0]

    def count_matched_tokens(self, others: Sequence[SuffixAutomaton]) -> int:
        """Return the length of the longest suffix of this sequence that occurred before, in this
        sequence or in one of `others`."""
        self._matches = self._find_matches(others)
        return max(length for _, _, length in self._matches)

    def _find_matches(
        self, others: Sequence[SuffixAutomaton]
    ) -> list[tuple[SuffixAutomaton, int, int]]:
        """Return a match for this sequence and for each of `others`: the automaton, the state of
        the longest suffix of this sequence that occurred before in that automaton, and the length
        of this suffix."""
        matches = [
            (self.automaton, self.automaton.match, self.automaton.length[self.automaton.match])
        ]
        last = self.automaton.ids[-MAX_SEARCHED_TOKENS:].tolist() if others else []
        return matches + [(other, *other.find(last)) for other in others]


def continue_match(
    automaton: SuffixAutomaton, state: int, num_matched: int, max_tokens: int
) -> tuple[list[int], float]:
    """Return up to `max_tokens` tokens that follow a match of `num_matched` tokens, and how many of
    them are expected to be accepted. `state` is the state of `automaton` at the end of the match.

    If a token followed a match of n tokens (including earlier draft tokens) in k of N cases, its
    estimated probability of being accepted is k / (N + 1/n), which grows with n. When the draft
    reaches the end of the automaton's tokens, it continues after the longest earlier match of these
    tokens, so that a periodic sequence continues.
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
