"""A draft model that is itself accelerated by a faster drafter (paper, section 5: hierarchical).

The draft tokens are the output of `step`, run with the middle model as its target.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from foretoken.drafters.base import (
    Draft,
    Drafter,
    pack,
    require_rewindable,
    require_vocabulary,
)
from foretoken.errors import NumericsError
from foretoken.models.base import Blocks, Model, Scorer, require_model
from foretoken.models.draft_sequences import DraftSequences
from foretoken.models.row_slots import list_remaining_rows
from foretoken.request import Request, SequenceState
from foretoken.sampling.acceptance_rules import block
from foretoken.sampling.checks import Count
from foretoken.sampling.draw import Draw, LogitShaper
from foretoken.sampling.keys import SequenceKey
from foretoken.sampling.verifier import COUPLED_VERIFIER, make_verifier
from foretoken.step import step


class CascadeDrafter(Drafter):
    """A draft model that is itself accelerated by a drafter (paper, section 5: hierarchical).

    The draft tokens are the output of speculative decoding with the middle model as target. So they
    follow the middle model's distribution, which is q. A cascade can rewind, so it may be part of
    another cascade. It proposes no tokens for sequences that are longer than the middle model's
    context or contain ids that the middle model does not have.

    Args:
        middle: The draft model.
        drafter: The drafter that accelerates `middle`; it must have `rewind`.
        gamma: Number of draft tokens of `drafter` per forward pass of the middle model.

    Raises:
        InputError: The vocabularies differ, or gamma is invalid.
        RefusedError: `drafter` cannot rewind.

    Examples:
        >>> import foretoken
        >>> middle = foretoken.load("novels", draft="none").target
        >>> cascade = foretoken.CascadeDrafter(middle, foretoken.LookupDrafter(), gamma=2)
        >>> spec = foretoken.load("novels", draft=cascade)
        >>> (out,) = spec.generate("The captain looked", max_new_tokens=8, gamma=3)
        >>> out.text
        ' at the doctor, and the doctor said'
    """

    has_own_speed = True  # its speed depends on its parts

    def __init__(self, middle: Model, drafter: Drafter, gamma: int = 4) -> None:
        require_model(middle)
        remedy = "the number of draft tokens per forward pass of the middle model, 0 or more"
        self.gamma = Count(ge=0, remedy=remedy)("gamma", gamma)
        self.middle, self.drafter = middle, require_rewindable(drafter, "a cascade")
        require_vocabulary(self.drafter, middle.vocab_size, "the model that it drafts for")
        self.holds = (middle, self.drafter)
        self.vocab_size, self.runtime = middle.vocab_size, middle.runtime
        self._sequences = DraftSequences(middle)
        # draft tokens of the last step: committed to `drafter`, but not yet to `_sequences`
        self._draft_tokens: list[list[int]] = []

    def start(
        self, rows: list[int], prompts: list[list[int]], sources: list[list[int]] | None
    ) -> None:
        self.middle.start(*self._sequences.join(prompts, sources))
        contexts = [list(ids) for ids in self._sequences.token_ids[len(self._draft_tokens) :]]
        self.drafter.start(rows, contexts, sources if self.middle.encoder_decoder else None)
        self._draft_tokens += [[] for _ in prompts]

    def propose(self, gamma: list[int], draw: Draw) -> Draft:
        tasks = zip(
            self._sequences.token_ids,
            self._sequences.compute_budgets(gamma),
            draw.derive_keys(),
            strict=True,
        )
        seqs = [_make_inner_sequence(*task, b, draw) for b, task in enumerate(tasks)]
        # coupled mode: the middle model samples with the same noise as the target
        verifier = COUPLED_VERIFIER if draw.coupled else make_verifier(block)
        target = _MiddleScorer(self._sequences, seqs)
        distributions: list[list[Tensor]] = [[] for _ in seqs]
        calls = 0
        while any(map(_is_unfinished, seqs)):
            gammas = [
                min(self.gamma, seq.num_remaining - 1) if _is_unfinished(seq) else 0 for seq in seqs
            ]
            try:
                p = step(seqs, target, self.drafter, verifier, gammas)
            except NumericsError as error:
                message = f"in a cascade's middle model, which is its drafter's target: {error}"
                raised = NumericsError(message, error.row, whose="draft")
                if error.row is None or not seqs[error.row].new_tokens:
                    raise raised from None
                # draft the tokens before the error: the error matters only if the target accepts
                # all of these tokens
                seqs[error.row].fail(raised)
                continue
            if p is not None:
                for b, seq in enumerate(seqs):
                    distributions[b].append(p[b, : len(seq.records[-1].new_tokens)])
            calls += 1
        self._draft_tokens = [seq.new_tokens for seq in seqs]
        q = (
            pad_sequence([torch.cat(p) for p in distributions], batch_first=True)
            if any(distributions)
            else None
        )
        return pack(self._draft_tokens, q, calls)

    def commit(self, tokens: list[list[int]]) -> None:
        accepted = [
            _count_accepted(x, new) for x, new in zip(self._draft_tokens, tokens, strict=True)
        ]
        surplus = [len(x) - n for x, n in zip(self._draft_tokens, accepted, strict=True)]
        if any(surplus):
            self.drafter.rewind(surplus)
        for b, n in enumerate(accepted):
            # after the accepted tokens, the middle model's cache holds rejected ones
            valid = len(self._sequences.token_ids[b]) + n
            self._sequences.num_cached[b] = min(self._sequences.num_cached[b], valid)
        rest = [new[n:] for new, n in zip(tokens, accepted, strict=True)]
        if any(rest):
            self.drafter.commit(rest)
        self._settle([0] * len(tokens), tokens)

    def rewind(self, counts: list[int]) -> None:
        back = [len(x) + count for x, count in zip(self._draft_tokens, counts, strict=True)]
        if any(back):
            self.drafter.rewind(back)
        self._settle(counts, [[] for _ in counts])

    def _settle(self, back: list[int], tokens: list[list[int]]) -> None:
        self._draft_tokens = [[] for _ in tokens]
        self._sequences.update(back, tokens)
        self.middle.set_lengths(self._sequences.num_cached)

    def leave(self, rows: list[int]) -> None:
        self._draft_tokens = [
            self._draft_tokens[b] for b in list_remaining_rows(len(self._draft_tokens), rows)
        ]
        self._sequences.leave(rows)
        self.middle.leave(rows)
        self.drafter.leave(rows)


class _MiddleScorer(Scorer):
    """The middle model as the target of the inner step. It scores each block together with the
    earlier tokens that are not in its cache. It skips sequences that have all their draft
    tokens."""

    def __init__(self, sequences: DraftSequences, seqs: list[SequenceState]) -> None:
        self.model, self.cached, self.seqs = sequences.model, sequences.num_cached, seqs
        self.vocab_size, self.device = self.model.vocab_size, self.model.device

    def score(self, blocks: Blocks, need: list[int]) -> Tensor:
        assert isinstance(blocks, list)
        feed: list[list[int]] = [[] for _ in blocks]
        for b, seq in enumerate(self.seqs):
            if _is_unfinished(seq):
                feed[b] = [*seq.tokens[self.cached[b] : -1], *blocks[b]]
                self.cached[b] += len(feed[b])
        counts = [n if new else 0 for n, new in zip(need, feed, strict=True)]
        logits = self.model.score(feed, counts)
        self.padding = self.model.padding
        return logits

    def set_lengths(self, lengths: list[int]) -> None:
        self.cached[:] = map(min, self.cached, lengths)
        self.model.set_lengths(self.cached)


class _InnerControls:
    """The controls of a sequence in the inner step. They call the controls of the outer sequence;
    the output tokens of the inner step are passed as the outer sequence's draft tokens."""

    def __init__(self, controls: LogitShaper, tokens: list[int]) -> None:
        self.controls, self.V, self.tokens = controls, controls.V, list(tokens)

    def shape(self, logits: Tensor, draft_tokens: list[int]) -> Tensor:
        return self.controls.shape(logits, [*self.tokens, *draft_tokens])

    def find_forced_tokens(self, draft_tokens: list[int]) -> list[int]:
        return self.controls.find_forced_tokens([*self.tokens, *draft_tokens])

    def commit(self, tokens: list[int]) -> None:
        self.tokens += tokens


def _make_inner_sequence(
    tokens: list[int], limit: int, key: SequenceKey, b: int, draw: Draw
) -> SequenceState:
    """Return a sequence of the inner step whose output becomes the draft tokens of sequence b. The
    inner sequence has no logprobs."""
    params, controls = draw.params[b], draw.controls[b]
    if params.logprobs is not None:
        params = replace(params, logprobs=None, logprobs_of="raw")
    seq = SequenceState.from_request(Request(tokens, limit, key, params=params))
    if controls is not None:
        seq.controls = _InnerControls(controls, draw.previous_draft_tokens[b])
    return seq


def _is_unfinished(seq: SequenceState) -> bool:
    return seq.finish_reason is None and seq.num_remaining > 0


def _count_accepted(draft_tokens: list[int], tokens: list[int]) -> int:
    """Return how many of the draft tokens, from the first, equal the committed tokens."""
    return next(
        (i for i, (x, y) in enumerate(zip(draft_tokens, tokens, strict=False)) if x != y),
        min(len(draft_tokens), len(tokens)),
    )
