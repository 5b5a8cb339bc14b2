"""Softmax, sampling and verification by the compiled kernels, for float32 tensors on the CPU.

The functions of `reference` define the results. If `can_compute` returns False, callers must use
torch.
"""

from __future__ import annotations

import os
from ctypes import addressof, c_int32
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from foretoken.errors import InputError, RefusedError
from foretoken.kernels.library import (
    INSTRUCTIONS_VARIABLE,
    DrawsRecord,
    MatrixRecord,
    SoftmaxRecord,
    VerificationRecord,
    choose_instruction_set,
    load_library,
)

KERNEL_RULES = ("speculative", "block")  # in network.h's order
MIN_THREADED_NUMBERS = 1 << 20  # smaller tensors use one thread


class VerifiedTokens(NamedTuple):
    """The result of `verify`."""

    n: Tensor  # [B]: number of accepted draft tokens
    t: Tensor  # [B]: the token after the accepted draft tokens
    beta: Tensor  # [B, G], float64: sum of min(p, q); 0 after a row's last draft token
    masses: Tensor  # [B], float64: the masses of the distributions that t was drawn from


def can_compute(*tensors: Tensor | None) -> bool:
    """Return whether the kernels are compiled and support these tensors (float32 on the CPU)."""
    kinds = [each for each in tensors if each is not None]
    return all(x.is_cpu and x.dtype == torch.float32 for x in kinds) and _is_compiled()


def softmax(
    logits: Tensor, temperature: float, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0
) -> Tensor:
    """Return the distributions of logits at a temperature, after top-k, top-p and min-p.

    Args:
        logits: `[..., V]`.
        temperature: Above 0.
        top_k: Number of most probable ids that remain; ids as probable as the last of them also
            remain. 0: all.
        top_p: The most probable ids remain, until their mass reaches top_p; among equally probable
            ids, the highest ids remain.
        min_p: Ids remain if their probability is at least min_p times the largest probability.

    Returns:
        `[..., V]`; NaN for rows with NaN, with +inf, or with only -inf.

    Raises:
        MemoryError: There is not enough memory, or threads cannot be started.

    Examples:
        >>> import torch
        >>> from foretoken.kernels import tokens
        >>> tokens.softmax(torch.tensor([[0.0, -torch.inf]]), 0.5).tolist()
        [[1.0, 0.0]]
    """
    p, V = torch.empty(logits.shape), logits.shape[-1]
    if not p.numel():
        return p
    tensor, matrix = _make_matrix(logits)
    rows = tensor.numel() // V
    threads = NUM_THREADS if rows * V >= MIN_THREADED_NUMBERS else 1
    failed = c_int32()
    filters = 0 if top_k >= V else top_k, temperature, min_p, top_p
    record = SoftmaxRecord(rows, V, threads, *filters, matrix, p.data_ptr(), addressof(failed))
    if not load_library().foretoken_softmax(_get_instruction_set(), record):
        raise MemoryError("not enough memory or threads for distributions")
    return p


def draw(distributions: Tensor, uniforms: Tensor) -> tuple[Tensor, Tensor]:
    """Sample an id from each distribution by inverting its CDF.

    Args:
        distributions: `[B, V]`.
        uniforms: Random numbers, `[B]`, float64, in [0, 1).

    Returns:
        The ids `[B]`, and the masses (sums) of the distributions, `[B]`. If a mass is not a
        positive number, the id of that distribution is arbitrary.
    """
    B, V = distributions.shape
    ids, masses = torch.empty(B, dtype=torch.int64), torch.empty(B, dtype=torch.float64)
    if B:
        (tensor, matrix), u = _make_matrix(distributions), uniforms.double().contiguous()
        pointers = u.data_ptr(), ids.data_ptr(), masses.data_ptr()
        load_library().foretoken_draw(
            _get_instruction_set(), DrawsRecord(len(tensor), V, matrix, *pointers)
        )
    return ids, masses


def verify(
    rule: str,
    p: Tensor,
    q: Tensor | None,
    x: Tensor,
    lengths: Tensor,
    accept: Tensor,
    following: Tensor,
) -> VerifiedTokens:
    """Verify every row's draft tokens, and sample the token after the accepted ones.

    Args:
        rule: The acceptance method, one of KERNEL_RULES.
        p: `[B, G+1, V]`.
        q: `[B, G, V]`, or None if each draft token has probability 1.
        x: Draft tokens, `[B, G]`.
        lengths: Number of draft tokens of each row, `[B]`.
        accept: Random numbers that decide how many draft tokens are accepted, `[B]`, float64, in
            [0, 1).
        following: Random numbers that sample the tokens after the accepted ones, `[B]`, float64, in
            [0, 1).

    Returns:
        For each row, the number of accepted tokens, the token after the accepted ones, the betas
        and the mass.

    Raises:
        InputError: A draft token is not in the vocabulary.
    """
    B, G = x.shape
    V = p.shape[-1]
    n, t = torch.empty(2, B, dtype=torch.int64)
    beta, masses = torch.empty(B, G, dtype=torch.float64), torch.empty(B, dtype=torch.float64)
    survival, scale = torch.empty(2, B, G + 1, dtype=torch.float64)  # the kernels' workspace
    (p, of_p), (q, of_q) = (
        _make_matrix(p),
        _make_matrix(q) if q is not None and G else (q, MatrixRecord()),
    )
    given = [each.long().contiguous() for each in (x, lengths)]
    given += [each.double().contiguous() for each in (accept, following)]
    record = VerificationRecord(KERNEL_RULES.index(rule), B, G, V, of_p, of_q)
    record.x, record.lengths, record.accept, record.next = (each.data_ptr() for each in given)
    made = survival, scale, n, t, beta, masses
    for name, tensor in zip(("survival", "scale", "n", "t", "beta", "masses"), made, strict=True):
        setattr(record, name, tensor.data_ptr())
    if not load_library().foretoken_verify(_get_instruction_set(), record):
        raise InputError(
            f"a draft token is not one of the target's {V:,} ids; correct the drafter's tokens"
        )
    return VerifiedTokens(n, t, beta, masses)


def count_threads() -> int:
    """Return the number of threads for the kernels: torch's number of threads, but at most the
    number of processors that this process may use."""
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return max(1, min(torch.get_num_threads(), allowed or 1, 256))  # MOST_THREADS of team.h


NUM_THREADS = count_threads()  # at import: later, torch may be set to one thread


@cache
def _is_compiled() -> bool:
    try:
        load_library()
    except RefusedError:
        return False
    return True


def _get_instruction_set() -> bytes:
    return _choose_instruction_set(os.environ.get(INSTRUCTIONS_VARIABLE))


@cache
def _choose_instruction_set(requested: str | None) -> bytes:
    return choose_instruction_set().encode()


def _make_matrix(x: Tensor) -> tuple[Tensor, MatrixRecord]:
    """Return a tensor and its struct for the kernels. The tensor is x, `[..., V]`, or a contiguous
    copy of x if two strides cannot describe the rows of x."""
    if x.dim() > 3 or x.stride(-1) != 1:
        x = x.contiguous().view(-1, x.shape[-1]) if x.dim() > 3 else x.contiguous()
    inner = x.shape[-2] if x.dim() > 1 else 1
    of_group = x.stride(0) if x.dim() == 3 else 0
    return x, MatrixRecord(x.data_ptr(), of_group, x.stride(-2) if x.dim() > 1 else 0, inner)
