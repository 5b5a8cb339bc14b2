"""One step: what it records, what ends a row inside a block, and what it refuses."""

from __future__ import annotations

import math
import random
from dataclasses import replace
from typing import Any

import pytest
import torch

from foretoken.controls.chain import build_chain
from foretoken.drafters.base import Draft, Drafter, pack
from foretoken.errors import NumericsError, RefusedError
from foretoken.request import Request, SequenceState
from foretoken.sampling.acceptance_rules import EXACT_RULES, speculative
from foretoken.sampling.distributions import SamplingParams
from foretoken.sampling.keys import SequenceKey
from foretoken.sampling.verifier import make_verifier
from foretoken.step import step
from table import TableModel

V = 4
SECONDS = dict.fromkeys(("draft_seconds", "score_seconds", "verify_seconds"), 0.0)
GREEDY, SAMPLED = SamplingParams(), SamplingParams(temperature=1.0)


def counting(text: tuple[int, ...]) -> list[float]:
    """0, 1, 2, 3, 0, ...: the successor is nearly certain."""
    distribution = [0.01] * V
    distribution[(text[-1] + 1) % V] = 0.97
    return distribution


class Says(Drafter):
    """A drafter that proposes what it is told to, and notes what is kept."""

    runtime = "test"

    def __init__(self, draft: Draft) -> None:
        self.draft = draft
        self.committed: list[list[int]] = []

    def start(self, rows, prompts, sources) -> None: ...

    def propose(self, gamma, draw) -> Draft:
        return self.draft

    def commit(self, tokens) -> None:
        self.committed = tokens

    def leave(self, rows) -> None: ...


def one_step(
    draft: Draft,
    gamma: list[int],
    rows: list[SequenceState] | None = None,
    params: SamplingParams | None = None,
    distribution=counting,
    rule=speculative,
) -> tuple[list[SequenceState], TableModel, Says]:
    keys = [SequenceKey(0, b) for b in range(len(gamma))]
    rows = rows or [SequenceState.from_request(Request([0], 100, key)) for key in keys]
    for row in rows:
        row.request = replace(row.request, params=params or row.request.params)
        row.controls = row.controls or build_chain(row.request, V)
    target, drafter = TableModel(distribution, V), Says(draft)
    target.start([row.tokens[:-1] for row in rows])
    step(rows, target, drafter, make_verifier(rule), gamma)
    return rows, target, drafter


def test_leading_matches_are_kept_and_the_target_goes_on():
    rows, target, drafter = one_step(pack([[1, 2, 0], [3], []]), [3, 1, 0])
    assert [row.tokens for row in rows] == [[0, 1, 2, 3], [0, 1], [0, 1]]
    assert drafter.committed == [[1, 2, 3], [1], [1]]
    assert target._texts == [[0, 1, 2], [0], [0]]  # all but the last token


def test_a_greedy_row_is_verified_alike_with_lists_and_with_tensors():
    """Rows that report their logits need tensors; all others are compared on the host."""
    dice = random.Random(4)

    def told(params: SamplingParams) -> list[list[Any]]:
        drafts = [pack([[dice.randrange(V) for _ in range(g)] for g in (3, 0, 2)]) for _ in (1, 2)]
        rows = [SequenceState.from_request(Request([0], 100, SequenceKey(0, b))) for b in range(3)]
        for draft in drafts:
            one_step(draft, [3, 0, 2], rows, params)
        records = [replace(r, **SECONDS) for row in rows for r in row.records]
        return [[row.tokens for row in rows], records]

    for _ in range(20):
        state = dice.getstate()
        lists = told(GREEDY)
        dice.setstate(state)
        assert told(SamplingParams(logprobs=0)) == lists


def test_the_record_of_a_greedy_step():
    (row, _), _, _ = one_step(pack([[1, 3, 3], [1]], calls=3), [3, 2])
    (record,) = row.records
    assert record.gamma == 3
    assert record.draft_tokens == (1, 3, 3)
    assert record.accepted == 1
    assert record.new_tokens == (1, 2)
    assert record.overlaps == (1.0, 0.0)  # judged: the kept one and the first that was not
    assert (record.draft_calls, record.rows, record.drafted) == (3, 2, 3)
    assert min(record.draft_seconds, record.score_seconds, record.verify_seconds) >= 0


@pytest.mark.parametrize("rule", EXACT_RULES.values(), ids=EXACT_RULES)
def test_the_record_holds_the_distributions_overlap(rule):
    q = torch.full((1, 2, V), 0.25, dtype=torch.float64)
    (row,), _, _ = one_step(
        Draft(torch.tensor([[1, 2]]), torch.tensor([2]), q), [2], params=SAMPLED, rule=rule
    )
    (record,) = row.records
    assert len(record.overlaps) == min(record.accepted + 1, 2)
    assert record.overlaps == pytest.approx([0.25 + 0.03] * len(record.overlaps))
    assert record.new_tokens[: record.accepted] == record.draft_tokens[: record.accepted]
    assert len(record.new_tokens) == record.accepted + 1


@pytest.mark.parametrize(("bad", "what"), [(math.nan, "NaN"), (0.0, "nothing but -inf")])
@pytest.mark.parametrize("params", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_invalid_logits_raise_and_leave_the_rows(bad, what, params):
    def distribution(text):
        return [bad] * V if len(text) == 3 else counting(text)

    rows = [
        SequenceState.from_request(Request([0], 9, SequenceKey(0, 0))),
        SequenceState.from_request(Request([0, 1, 2], 9, SequenceKey(0, 1))),
    ]
    message = f"the target's logits hold {what} at position 3 of row 1; try dtype='float32'"
    with pytest.raises(NumericsError, match=message):
        one_step(pack([[1], [3, 0]]), [1, 2], rows, params, distribution)
    assert [row.tokens for row in rows] == [[0], [0, 1, 2]]
    assert not rows[0].records


@pytest.mark.parametrize(("bad", "what"), [(math.nan, "NaN"), (0.0, "nothing but -inf")])
@pytest.mark.parametrize("params", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_invalid_logits_behind_draft_tokens_that_are_kept_fail_their_row(bad, what, params):
    """As by plain decoding, which gets there a step later; the other rows go on."""

    def distribution(text):
        return [bad] * V if len(text) == 5 else counting(text)

    rows = [
        SequenceState.from_request(Request([0], 9, SequenceKey(0, 0))),
        SequenceState.from_request(Request([0, 1, 2], 9, SequenceKey(0, 1))),
    ]
    one_step(pack([[1, 2], [3, 0, 1]]), [3, 3], rows, params, distribution)
    assert [row.tokens for row in rows] == [[0, 1, 2, 3], [0, 1, 2, 3, 0]]
    assert f"target's logits hold {what} at position 5 of row 1" in str(rows[1].error)
    assert [row.finish_reason for row in rows] == [None, "error"]
    assert rows[1].records[0].draft_tokens == (3, 0) and rows[1].records[0].accepted == 2


@pytest.mark.parametrize("params", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("whose", ["target", "draft"])
def test_invalid_logits_behind_a_rejected_draft_token_fail_nobody(whose, params):
    """The text never gets there, so whether it is guessed at is no concern of the row."""

    def distribution(text):
        return [math.nan] * V if whose == "target" and text[1:2] == (3,) else counting(text)

    tops = torch.tensor([[0.0, math.nan, math.nan]]) if whose == "draft" else None
    draft = replace(pack([[3, 0, 1]]), tops=tops)
    (row,), _, _ = one_step(
        draft,
        [3],
        [SequenceState.from_request(Request([0], 9, SequenceKey(0, 0)))],
        params,
        distribution,
    )
    assert row.tokens == [0, 1] and row.finish_reason is None and row.error is None


@pytest.mark.parametrize("gets", [1, 3], ids=["at once", "behind a guess"])
def test_an_invalid_draft_is_no_concern_of_a_row_that_mends_its_logits(gets):
    """remove_invalid_values is for logits that overflow, the draft's too."""
    tops = torch.tensor([[0.0, 0.0, 0.0]])
    tops[0, gets - 1] = math.nan
    row = controlled([0], remove_invalid_values=True)
    one_step(replace(pack([[1, 2, 3]]), tops=tops), [3], [row], row.request.params)
    assert row.tokens == [0, 1, 2, 3, 0] and row.records[0].accepted == 3


def test_a_draft_that_is_invalid_where_the_text_gets_is_named():
    draft = replace(pack([[1, 2, 3]]), tops=torch.tensor([[0.0, math.nan, 0.0]]))
    rows = [SequenceState.from_request(Request([0], 9, SequenceKey(0, 0)))]
    with pytest.raises(NumericsError, match="the draft's logits hold NaN at position 2 of row 0"):
        one_step(draft, [3], rows)
    assert rows[0].tokens == [0]


@pytest.mark.parametrize(
    ("draft", "message"),
    [
        (
            pack([[1, 2, 3], [1]]),
            r"proposed \[3, 1\] draft tokens; it must propose at most \[2, 2\]",
        ),
        (pack([[1]]), r"proposed \[1\] draft tokens; it must propose at most \[2, 2\]"),
        (Draft(torch.zeros(2, 1).long(), torch.tensor([2, 1])), r"proposed \[2, 1\] draft tokens"),
        (
            Draft(torch.zeros(2, 1).long(), torch.tensor([-1, 1])),
            r"proposed \[-1, 1\] draft tokens",
        ),
        (pack([[1], [V]]), r"proposed \[4\] for row 1; ids must be in 0\.\.3"),
        (pack([[1], [-1]]), r"proposed \[-1\] for row 1"),
        (pack([[1], [1]], torch.ones(2, 1, V + 1)), r"shape \(2, 1, 5\); it must be \(2, 1, 4\)"),
        (pack([[1], [1]], torch.ones(1, 1, V)), r"shape \(1, 1, 4\); it must be \(2, 1, 4\)"),
        (pack([[1, 1], [1]], torch.ones(2, 1, V)), r"shape \(2, 1, 4\); it must be \(2, 2, 4\)"),
        (Draft([[1], [1]], torch.tensor([1, 1])), "tokens must be an integer tensor with 2 axes"),
        (Draft(torch.tensor([1, 1]), torch.tensor([1, 1])), "tokens must be an integer tensor"),
        (Draft(torch.ones(2, 1).long(), torch.ones(2)), "lengths must be an integer tensor with 1"),
        (Draft(torch.ones(3, 1).long(), torch.tensor([1, 1])), r"proposed \[1, 1\] draft tokens"),
    ],
)
def test_drafts_that_are_refused(draft, message):
    rows = [SequenceState.from_request(Request([0], 9, SequenceKey(0, b))) for b in range(2)]
    with pytest.raises(RefusedError, match=message):
        one_step(draft, [2, 2], rows)
    assert [row.tokens for row in rows] == [[0], [0]]


def test_a_q_that_holds_nan_is_refused():
    """A NaN row must raise, not turn into some token (vLLM #41834)."""
    rows = [SequenceState.from_request(Request([0], 9, SequenceKey(0, 0)))]
    with pytest.raises((RefusedError, NumericsError), match="NaN"):
        one_step(pack([[1]], torch.full((1, 1, V), math.nan)), [1], rows, SAMPLED)
    assert rows[0].tokens == [0]


def test_at_temperature_0_the_overlap_is_q_at_the_argmax():
    q = torch.full((1, 1, V), 1 / V, dtype=torch.float64)
    rows, _, _ = one_step(pack([[1]], q), [1], params=GREEDY)
    assert rows[0].records[0].overlaps == (1 / V,)


def controlled(tokens: list[int], **sampling) -> SequenceState:
    row = SequenceState.from_request(
        Request(tokens, 10, SequenceKey(0, 0), params=SamplingParams(**sampling))
    )
    row.controls = build_chain(row.request, V)
    return row


@pytest.mark.parametrize("draft_token", [V, -1, 10**9])
def test_ids_of_no_vocabulary_are_refused_before_controls_see_them(draft_token):
    for sampling in ({"repetition_penalty": 1.5}, {"no_repeat_ngram_size": 1}):
        row = controlled([0], **sampling)
        with pytest.raises(RefusedError, match=rf"proposed \[1, {draft_token}\] for row 0"):
            one_step(pack([[1, draft_token]]), [2], [row], row.request.params)
        assert row.tokens == [0] and not row.records


@pytest.mark.parametrize("told", ["raw", "drawn"])
def test_a_dead_end_ends_a_row_behind_the_draft_tokens_before_it(told):
    """Guesses behind it do not count, though the target's own logits would have kept them."""
    sampling = {"no_repeat_ngram_size": 1, "suppress_tokens": [2, 3], "logprobs": 0}
    row = controlled([0], **sampling, logprobs_of=told)
    mate = SequenceState.from_request(Request([0], 10, SequenceKey(0, 1)))
    (failed, whole), _, drafter = one_step(pack([[1, 2, 3], [1, 2, 3]]), [3, 3], [row, mate])
    assert failed.tokens == [0, 1] and failed.finish_reason == "error"
    assert str(failed.error) == "suppress_tokens allows no token after 2 tokens"
    assert failed.records[0].accepted == 1 and failed.records[0].new_tokens == (1,)
    assert len(failed.records[0].overlaps) == len(failed.logprobs) == 1
    assert whole.tokens == [0, 1, 2, 3, 0] and whole.error is None
    assert drafter.committed == [[1], [1, 2, 3, 0]]


def test_a_dead_end_at_once_leaves_a_row_as_it_was():
    row = controlled([0], suppress_tokens=range(V), logprobs=1, logprobs_of="drawn")
    (failed,), _, drafter = one_step(pack([[1, 2]]), [2], [row])
    assert failed.tokens == [0] and failed.error is not None and failed.logprobs == []
    assert failed.records[0].new_tokens == () and drafter.committed == [[]]


def test_a_record_has_the_padding_of_its_pass():
    class Padded(TableModel):
        padding = 5

    rows = [SequenceState.from_request(Request([0], 100, SequenceKey(0, b))) for b in range(2)]
    target = Padded(counting, V)
    target.start([[], []])
    step(rows, target, Says(pack([[1], []])), make_verifier(speculative), [1, 0])
    assert [row.records[-1].padding for row in rows] == [5, 5]
