"""Algorithm 1 on a ragged batch: draft, score, verify, commit.

Plain decoding is this step with gamma 0. The step works with any model, drafter and verifier.
"""
# torch leaves the type of tolist() open
# pyright: reportUnknownMemberType=false

from __future__ import annotations

import math
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import replace
from itertools import chain, pairwise
from time import perf_counter
from typing import NamedTuple, cast

import torch
from torch import Tensor

from foretoken.drafters.base import Draft, Drafter, pack
from foretoken.errors import ControlError, RefusedError
from foretoken.models.base import Scorer
from foretoken.records import StepRecord
from foretoken.request import SequenceState, StepLogits
from foretoken.sampling.acceptance_rules import find_drafted
from foretoken.sampling.distributions import (
    find_peaks,
    get_working_dtype,
    is_known_finite,
    make_invalid_error,
    mask_invalid,
    probabilities,
    require_finite,
    require_mass,
)
from foretoken.sampling.draw import Draw
from foretoken.sampling.logprobs import logprobs
from foretoken.sampling.verifier import (
    ScoredBlock,
    Verification,
    Verifier,
    compares_with_argmax,
    draws_by_kernel,
)
from foretoken.transfer import read_lists, send, to_list


class _DeadEnd(NamedTuple):
    """The first position of a sequence's block that has no distribution, because the controls leave
    no token or the logits are invalid."""

    offset: int  # number of draft tokens before that position
    error: RefusedError


class _DraftedSequences(NamedTuple):
    """The sequences that gain tokens in this step, and their draft tokens."""

    indices: list[int]  # their rows in the batch
    seqs: list[SequenceState]
    gamma: list[int]
    draft: Draft
    counts: list[int]  # numbers of draft tokens
    draw: Draw
    ids: list[list[int]] | None  # the draft tokens; None: they are on a device


class _ScoredDraft(NamedTuple):
    """Draft tokens that the target has scored, as tensors."""

    block: ScoredBlock
    ids: Tensor  # [B, G], the draft tokens as the drafter returned them, not checked yet
    tops: Tensor  # [B, G+1], the target's largest logits: not finite if any logit is invalid
    raw: dict[int, Tensor]  # by row: the target's logits [n, V], if the sequence reports logits
    failed: dict[int, _DeadEnd]  # by row: the position at which controls leave no token


class _VerifiedSequence(NamedTuple):
    """The verification of a sequence's draft tokens, on the host."""

    x: list[int]  # the draft tokens
    n: int  # number of accepted draft tokens
    t: int  # the token after the accepted draft tokens
    beta: list[float]
    bias: list[float]  # [] if the verifier is exact
    failed: RefusedError | None = None  # if not None, t is invalid and the sequence fails


class _VerifiedStep(NamedTuple):
    """The verifications of all sequences, and the tensors that they were computed from."""

    sequences: list[_VerifiedSequence]
    scored: _ScoredDraft | None = None  # None: verified on the host
    p: Tensor | None = None  # [B, G+1, V], the target's distributions


@torch.inference_mode()
def step(
    seqs: list[SequenceState],
    target: Scorer,
    drafter: Drafter,
    verifier: Verifier,
    gamma: list[int],
    num_scheduled: list[int] | None = None,
) -> Tensor | None:
    """Advance every sequence by 1 to gamma[b] + 1 tokens from the target's distribution (paper,
    Algorithm 1), or from an approximation if the verifier is lenient.

    Args:
        seqs: The sequences of the batch; sequence b of target and drafter is seqs[b].
        target: The target, with the sequences in its cache.
        drafter: The drafter, with the sequences in its cache.
        verifier: Accepts or rejects draft tokens.
        gamma: The maximum number of draft tokens for each sequence.
        num_scheduled: For each sequence, the number of its pending tokens to score; None: all. A
            sequence that does not score all of them is in prefill: it gains no token, and its gamma
            must be 0. At least one sequence has to gain tokens.

    Returns:
        The target's distributions, `[B, G+1, V]`, for the sequences that gain tokens; None if the
        verifier compares with the argmax only. Each of these sequences gets a StepRecord.

    Raises:
        NumericsError: Logits are invalid before any draft token is accepted.
        RefusedError: The draft is invalid.

    After an error the sequences are unchanged. A sequence fails without an exception if its
    controls leave no token, or if its logits are invalid after accepted draft tokens.

    If the target is on a device, the host waits for the device once, to get the verification; if
    sequences have controls, it waits once more, to get the draft tokens. The recorded times then
    measure the submission of work, not its execution.
    """
    times = [perf_counter()]
    draw = verifier.draw_class(
        [seq.request.key for seq in seqs],
        [len(seq.tokens) for seq in seqs],
        [seq.request.params for seq in seqs],
        [seq.controls for seq in seqs],
    )
    if target.capabilities.tensors and not draw.greedy:
        draw.prefetch(max(gamma), target.device)

    # Sample gamma draft tokens x_1, .., x_gamma from M_q autoregressively
    draft = drafter.propose(list(gamma), draw)
    counts = _count_draft_tokens(draft, gamma, target.vocab_size)
    ids = _list_host_ids(draft, counts, target.vocab_size)
    times.append(perf_counter())

    # Run M_p in parallel, over the pending tokens (usually only the last one) and the draft tokens
    num_scheduled = [seq.num_pending for seq in seqs] if num_scheduled is None else num_scheduled
    drafted = _select_advanced(
        _DraftedSequences([*range(len(seqs))], seqs, gamma, draft, counts, draw, ids), num_scheduled
    )
    logits = _score(seqs, num_scheduled, target, drafted)
    times.append(perf_counter())

    # Determine the number n of accepted draft tokens, and the token t that follows them
    verified = _verify_on_host(logits, drafted, verifier) or _verify_by_tensors(
        logits, drafted, verifier
    )

    # Return prefix + [x_1, .., x_n, t]
    with _rolling_back(seqs):
        gained = [_commit(seq, v) for seq, v in zip(drafted.seqs, verified.sequences, strict=True)]
        _report_logits(drafted.seqs, verified, gained)
        _commit_to_models(seqs, num_scheduled, drafted.indices, gained, target, drafter)
        times.append(perf_counter())
        seconds = [after - before for before, after in pairwise(times)]
        for b, seq in enumerate(drafted.seqs):
            record = _make_record(
                drafted, b, verified.sequences[b], gained[b], seconds, target.padding
            )
            seq.records.append(record)
    return verified.p


@contextmanager
def _rolling_back(seqs: list[SequenceState]) -> Generator[None]:
    """Undo a step that an exception interrupts, such as Ctrl-C in a user's stopping criterion, so
    that tokens and records of a sequence stay consistent."""
    before = [(len(seq.tokens), len(seq.records), len(seq.logprobs)) for seq in seqs]
    try:
        yield
    except BaseException:
        for seq, lengths in zip(seqs, before, strict=True):
            seq.roll_back(*lengths)
        raise


def _count_draft_tokens(draft: Draft, gamma: list[int], V: int) -> list[int]:
    """Return the number of draft tokens of each sequence. Raises RefusedError if the draft has
    invalid types or shapes."""
    for name, value, axes in (("tokens", draft.tokens, 2), ("lengths", draft.lengths, 1)):
        dtype = getattr(value, "dtype", None)  # a user's drafter may return anything
        if dtype not in (torch.int64, torch.int32) or value.ndim != axes:
            raise RefusedError(f"the drafter's {name} must be an integer tensor with {axes} axes")
    G = draft.tokens.shape[1]
    counts: list[int] = to_list(draft.lengths)
    if not len(counts) == len(draft.tokens) == len(gamma) or any(
        not 0 <= a <= min(b, G) for a, b in zip(counts, gamma, strict=False)
    ):
        raise RefusedError(
            f"the drafter proposed {counts} draft tokens; it must propose at most {gamma}"
        )
    shape = (len(gamma), G, V)
    if draft.q is not None and tuple(draft.q.shape) != shape:
        raise RefusedError(f"the drafter's q has shape {tuple(draft.q.shape)}; it must be {shape}")
    return counts


def _list_host_ids(draft: Draft, counts: list[int], V: int) -> list[list[int]] | None:
    """Return draft tokens that are on the host, else None. Raises RefusedError for invalid ids."""
    if not draft.tokens.is_cpu:
        return None
    ids = [row[:count] for row, count in zip(to_list(draft.tokens), counts, strict=True)]
    _require_ids(ids, V)
    return ids


def _require_ids(ids: list[list[int]], V: int) -> None:
    for b, x in enumerate(ids):
        if x and not 0 <= min(x) <= max(x) < V:
            raise RefusedError(f"the drafter proposed {x} for row {b}; ids must be in 0..{V - 1}")


def _select_advanced(drafted: _DraftedSequences, num_scheduled: list[int]) -> _DraftedSequences:
    """Return the part of `drafted` for the sequences that gain tokens in this step: this forward
    pass completes their prefill, or an earlier one did."""
    pairs = zip(drafted.seqs, num_scheduled, strict=True)
    indices = [b for b, (seq, count) in enumerate(pairs) if seq.num_pending <= count]
    if len(indices) == len(num_scheduled):
        return drafted
    draft, index = drafted.draft, torch.tensor(indices)
    draft = replace(
        draft,
        tokens=draft.tokens[index.to(draft.tokens.device)],
        lengths=draft.lengths[index],
        q=None if draft.q is None else draft.q[index.to(draft.q.device)],
        tops=None if draft.tops is None else draft.tops[index.to(draft.tops.device)],
    )
    seqs = [drafted.seqs[b] for b in indices]
    gamma, counts = ([each[b] for b in indices] for each in (drafted.gamma, drafted.counts))
    ids = None if drafted.ids is None else [drafted.ids[b] for b in indices]
    return _DraftedSequences(indices, seqs, gamma, draft, counts, drafted.draw.select(indices), ids)


def _score(
    seqs: list[SequenceState], num_scheduled: list[int], target: Scorer, drafted: _DraftedSequences
) -> Tensor:
    """Run the target's forward pass over the scheduled tokens of all sequences and the draft tokens
    in `drafted`. For the sequences in `drafted`, return the logits at the last scheduled token and
    at the draft tokens, `[len(drafted.indices), G+1, V]`."""
    need = [0] * len(seqs)
    for b, count in zip(drafted.indices, drafted.counts, strict=True):
        need[b] = 1 + count
    every = len(drafted.indices) == len(seqs)
    if target.capabilities.tensors and every and all(seq.num_pending == 1 for seq in seqs):
        last = send(torch.tensor([seq.tokens[-1] for seq in seqs]), target.device)
        x = _clamp_ids(drafted, target.vocab_size, target.device)
        return target.score(torch.cat([last[:, None], x], 1), need)
    ids = drafted.ids
    if ids is None:
        ids = to_list(_clamp_ids(drafted, target.vocab_size, target.device))
    blocks = [seq.pending_tokens[:count] for seq, count in zip(seqs, num_scheduled, strict=True)]
    for b, x, count in zip(drafted.indices, ids, drafted.counts, strict=True):
        blocks[b] += x[:count]
    logits = target.score(blocks, need)
    return logits if every else logits[drafted.indices]


def _clamp_ids(drafted: _DraftedSequences, V: int, device: torch.device) -> Tensor:
    """Return the draft tokens `[B, G]` on a device, clamped to valid ids. `_require_ids` refuses
    invalid draft tokens later, when the host reads them."""
    ids, _ = _pad_draft_tokens(drafted, device)
    return ids.clamp(0, V - 1)


def _pad_draft_tokens(drafted: _DraftedSequences, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return the draft tokens `[B, G]`, padded with 0, and their lengths `[B]`, on a device."""
    draft, counts = drafted.draft, drafted.counts
    whole = min(counts) == draft.tokens.shape[1] and draft.tokens.dtype == torch.int64
    if drafted.ids is not None and not whole:
        packed = pack(drafted.ids)
        return send(packed.tokens, device), send(packed.lengths, device)
    ids = send(draft.tokens[:, : max(counts)], device).long()
    lengths = send(draft.lengths, device)
    if min(counts) < max(counts):  # a drafter's padding may be anything
        ids = torch.where(find_drafted(ids, lengths), ids, 0)
    return ids, lengths


def _verify_on_host(
    logits: Tensor, drafted: _DraftedSequences, verifier: Verifier
) -> _VerifiedStep | None:
    """Return the verification by the fast path: on the host, without controls or reported logits.

    None if that path does not apply, or if logits or q are invalid: the general path then finds
    out whether accepted draft tokens reach the invalid position.
    """
    draft, draw, ids = drafted.draft, drafted.draw, drafted.ids
    if ids is None or not logits.is_cpu or draw.controlled:
        return None
    if any(seq.reports_logits for seq in drafted.seqs):
        return None
    if not (draft.tops is None or is_known_finite(draft.tops)):
        return None
    if draft.q is None and compares_with_argmax(verifier, draw):
        return _verify_by_argmax(logits, ids)
    if not draws_by_kernel(verifier, draw):
        return None
    x, lengths = _pad_draft_tokens(drafted, logits.device)
    q = None if draft.q is None else draft.q[:, : x.shape[1]]
    before = len(draw.masses)
    verification = verifier(ScoredBlock(logits, x, lengths, q), draw)
    assert verification.p is not None
    heads = _to_lists(verification.p[..., 0])  # NaN if logits are invalid
    betas, masses = (
        _to_lists(verification.beta),
        [x for each in draw.masses for x in _to_floats(each)],
    )
    if not all(map(math.isfinite, chain(*heads, masses, *betas))):
        del draw.masses[before:]
        return None
    require_mass(masses)
    results = zip(ids, to_list(verification.n), to_list(verification.t), betas, strict=True)
    verified = [_VerifiedSequence(x, n, t, beta[: len(x)], []) for x, n, t, beta in results]
    return _VerifiedStep(verified, p=verification.p)


def _to_lists(matrix: Tensor) -> list[list[float]]:
    return cast(list[list[float]], matrix.tolist())


def _to_floats(vector: Tensor) -> list[float]:
    return cast(list[float], vector.tolist())


def _verify_by_argmax(logits: Tensor, ids: list[list[int]]) -> _VerifiedStep | None:
    """Return the verification by comparison with the argmax; None if logits are invalid."""
    best, tops = find_peaks(logits)
    if not all(map(math.isfinite, chain.from_iterable(tops))):
        return None
    verified: list[_VerifiedSequence] = []
    for x, best_ids in zip(ids, best, strict=True):
        equal = [a == b for a, b in zip(x, best_ids, strict=False)]
        n = equal.index(False) if False in equal else len(x)
        verified.append(_VerifiedSequence(x, n, best_ids[n], [*map(float, equal)], []))
    return _VerifiedStep(verified)


def _verify_by_tensors(
    logits: Tensor, drafted: _DraftedSequences, verifier: Verifier
) -> _VerifiedStep:
    """Return the verification by the general path: tensors on the target's device and one transfer
    to the host. Raises the errors of `step`."""
    scored = _prepare_block(logits, drafted)
    verification = verifier(scored.block, drafted.draw)
    return _VerifiedStep(_fetch_verification(verification, scored, drafted), scored, verification.p)


def _prepare_block(logits: Tensor, drafted: _DraftedSequences) -> _ScoredDraft:
    """Return the verifier's input: the draft tokens, and the logits after the sequences' controls.
    For sequences that report logits, also return the target's logits before controls."""
    ids, lengths = _pad_draft_tokens(drafted, logits.device)
    # invalid ids from a device are refused later, by `_fetch_verification`
    x = ids if drafted.ids is not None else ids.clamp(0, logits.shape[-1] - 1)
    logits, tops, lengths = _mask_invalid(logits, drafted, lengths)
    raw = {b: logits[b].clone() for b, seq in enumerate(drafted.seqs) if seq.reports_logits}
    logits, failed = _apply_controls(logits, drafted.seqs, x, drafted.counts)
    q = drafted.draft.q
    q = None if q is None else send(q[:, : x.shape[1]], logits.device)
    return _ScoredDraft(ScoredBlock(logits, x, lengths, q), ids, tops, raw, failed)


def _mask_invalid(
    logits: Tensor, drafted: _DraftedSequences, lengths: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Return three tensors: the logits, with invalid ones masked; the largest logit of each
    position, `[B, G+1]`; and the number of draft tokens to verify, `[B]`.

    The largest logits are taken before controls, which may hide invalid logits. Draft tokens after
    invalid logits are not verified. The logits at a position depend only on earlier tokens, so the
    output has the target's distribution: a sequence that reaches the invalid position fails, as in
    plain decoding.
    """
    unmasked, device = logits, logits.device
    logits, tops = mask_invalid(unmasked)
    parts = [tops]
    if drafted.draft.tops is not None:
        parts.append(drafted.draft.tops[:, : tops.shape[1] - 1])
    if all(map(is_known_finite, parts)):
        return logits, tops, lengths
    removes = [bool(seq.request.params.remove_invalid_values) for seq in drafted.seqs]
    skip = send(torch.tensor(removes), device)  # sequences whose controls replace invalid logits
    for part in parts:
        valid = torch.isfinite(send(part, device)) | skip[:, None]
        lengths = torch.minimum(lengths, _count_leading_valid(valid))
    return torch.where(skip[:, None, None], unmasked, logits), tops, lengths


def _count_leading_valid(valid: Tensor) -> Tensor:
    """Return the number of positions before the first invalid position of each sequence, `[B]`."""
    return valid.long().cumprod(1).sum(1)


def _commit_to_models(
    seqs: list[SequenceState],
    num_scheduled: list[int],
    indices: list[int],
    gained: list[list[int]],
    target: Scorer,
    drafter: Drafter,
) -> None:
    """Commit the gained tokens to target and drafter, which then drop rejected draft tokens."""
    for seq, count in zip(seqs, num_scheduled, strict=True):
        seq.num_pending -= count  # below 1 only in sequences that gain tokens: set below
    committed: list[list[int]] = [[] for _ in seqs]
    for b, tokens in zip(indices, gained, strict=True):
        seqs[b].num_pending, committed[b] = 1, list(tokens)
    target.set_lengths([len(seq.tokens) - seq.num_pending for seq in seqs])
    drafter.commit(committed)


def _apply_controls(
    logits: Tensor, seqs: list[SequenceState], x: Tensor, counts: list[int]
) -> tuple[Tensor, dict[int, _DeadEnd]]:
    """Apply the sequences' controls to the logits; at each position, controls depend on the tokens
    before it. Return the result and, by row, the first position at which the controls leave no
    token.

    From that position on, the sequence's logits are left unchanged: nothing is sampled from them,
    but the verifier needs finite numbers.
    """
    dead_ends: dict[int, _DeadEnd] = {}
    if all(seq.controls is None for seq in seqs):
        return logits, dead_ends
    logits = logits.to(get_working_dtype(logits.dtype))
    for b, (seq, draft_tokens) in enumerate(zip(seqs, to_list(x), strict=True)):
        if seq.controls is None:
            continue
        for i in range(counts[b] + 1):
            try:
                logits[b, i] = seq.controls.shape(logits[b, i], draft_tokens[:i])
            except ControlError as error:
                dead_ends[b] = _DeadEnd(i, error)
                break
    return logits, dead_ends


def _fetch_verification(
    verification: Verification, scored: _ScoredDraft, drafted: _DraftedSequences
) -> list[_VerifiedSequence]:
    """Transfer the verification to the host in one copy, check it, and return it for each sequence.
    Raises the errors of `step`."""
    draft, counts, draw = drafted.draft, drafted.counts, drafted.draw
    empty = verification.beta[:, :0]
    n, lengths, t, betas, biases, ids, tops, draft_tops, *masses = read_lists(
        verification.n,
        scored.block.lengths,
        verification.t,
        verification.beta,
        empty if verification.bias is None else verification.bias,
        scored.ids,
        scored.tops,
        empty if draft.tops is None else draft.tops,
        *draw.masses,
    )
    V = scored.block.logits.shape[-1]
    _require_ids([x[:count] for x, count in zip(ids, counts, strict=True)], V)
    failed = _find_invalid(tops, n, drafted)
    first = [int(not params.remove_invalid_values) for params in draw.params]
    require_finite(tops, "target", draw.lengths, first, drafted.indices)
    # invalid logits of the draft matter up to the draft token at which verification ended
    ends = [accepted + (b not in failed) for b, accepted in enumerate(n)]
    reached = [min(count, end) * on for count, end, on in zip(counts, ends, first, strict=True)]
    require_finite(draft_tops, "draft", draw.lengths, reached, drafted.indices)
    require_mass(list(chain.from_iterable(masses)))
    x = [row[:count] for row, count in zip(ids, lengths, strict=True)]
    beta = [row[:count] for row, count in zip(betas, lengths, strict=True)]
    if any(map(math.isnan, chain.from_iterable(beta))):
        raise RefusedError(
            "the drafter's q contains NaN; q must be the distribution of the draft tokens"
        )
    verified = [_VerifiedSequence(*row) for row in zip(x, n, t, beta, biases, strict=True)]
    for b, (offset, error) in chain(failed.items(), scored.failed.items()):
        # after this position, the verifier's logits were not the sequence's own: truncate there
        if offset <= n[b]:
            n[b] = offset
            verified[b] = verified[b]._replace(n=offset, failed=error)
    return verified


def _find_invalid(
    tops: list[list[float]], n: list[int], drafted: _DraftedSequences
) -> dict[int, _DeadEnd]:
    """Return, by row, sequences with invalid logits after the last accepted draft token."""
    failed: dict[int, _DeadEnd] = {}
    for b, accepted in enumerate(n):
        removes = drafted.draw.params[b].remove_invalid_values
        if accepted and not removes and not math.isfinite(tops[b][accepted]):
            position = drafted.draw.lengths[b] + accepted
            error = make_invalid_error(tops[b][accepted], "target", position, drafted.indices[b])
            failed[b] = _DeadEnd(accepted, error)
    return failed


def _commit(seq: SequenceState, verified: _VerifiedSequence) -> list[int]:
    """Append the accepted draft tokens and the token that follows them, and return the appended
    tokens. If there is no valid token to follow, the sequence fails after its accepted draft
    tokens."""
    draft_tokens = verified.x[: verified.n]
    if verified.failed is None:
        return seq.commit([*draft_tokens, verified.t])
    gained = seq.commit(draft_tokens)
    if seq.finish_reason is None:
        seq.fail(verified.failed)
    return gained


def _report_logits(
    seqs: list[SequenceState], verified: _VerifiedStep, gained: list[list[int]]
) -> None:
    """Store the logits and logprobs of the gained tokens in the sequences that request them."""
    if verified.scored is None:
        return
    logits = verified.scored.block.logits
    for b, raw in verified.scored.raw.items():
        seq, n = seqs[b], len(gained[b])
        if seq.step_logits is not None:
            seq.step_logits.append(StepLogits(raw[:n], logits[b, :n].clone()))
        if seq.request.params.logprobs is None:
            continue
        if seq.request.params.logprobs_of == "raw":
            scores = raw[:n].to(get_working_dtype(raw.dtype)).log_softmax(-1)
        elif verified.p is None:
            scores = probabilities(logits[b, :n], seq.request.params).log()
        else:
            scores = verified.p[b, :n].log()
        seq.logprobs += logprobs(scores, gained[b], seq.request.params.logprobs or 0)


def _make_record(
    drafted: _DraftedSequences,
    b: int,
    verified: _VerifiedSequence,
    gained: list[int],
    seconds: list[float],
    padding: int,
) -> StepRecord:
    num_verified = min(verified.n + 1, len(verified.x), len(gained))
    predicted = drafted.indices[b] in drafted.draft.predicted
    calls = 0 if predicted else drafted.draft.calls
    return StepRecord(
        gamma=drafted.gamma[b],
        draft_tokens=tuple(verified.x),
        accepted=min(verified.n, len(gained)),
        new_tokens=tuple(gained),
        overlaps=tuple(verified.beta[:num_verified]),
        draft_calls=min(calls, drafted.counts[b]),  # not for longer drafts of others
        draft_seconds=seconds[0],
        score_seconds=seconds[1],
        verify_seconds=seconds[2],
        rows=len(drafted.seqs),
        biases=tuple(verified.bias[:num_verified]),
        padding=padding,
        predicted=predicted,
        grade=drafted.seqs[b].grade,
    )
