"""Recurrent states of hybrid models, stored so that they can be rewound when draft tokens are
rejected: inputs of convolution windows, and states of linear recurrences and selective scans.

The state of a sequence is stored after one of its tokens, the base. The tokens after the base are
called pending tokens; there are at most `MAX_PENDING_TOKENS`. For each pending token t, the inputs
of convolution windows are stored, and k_t, u_t and decay_t of the recurrence S_t = decay_t *
S_(t-1) + k_t u_t^T. These determine the state after any pending token:

    S_n = D_n S_0 + sum over i <= n of (D_n / D_i) k_i u_i^T,    D_i = exp(c_i),

where S_0 is the state at the base, and c_i is the sum of the log decays up to token i. The k, u and
c of a token do not depend on later tokens, so a rejected token leaves no trace. The base moves
forward ("folds") only when too many tokens would be pending; at least `MAX_REWIND_TOKENS` remain
pending.

In a selective scan each number of the state has its own decay, so the formula above does not apply.
Instead, a rewind runs the scan again: from the state before the last pass or, if the sequence is
rewound further, from the base.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from foretoken.errors import InputError
from foretoken.models.row_slots import RowSlots
from foretoken.transfer import send

MAX_REWIND_TOKENS = 32  # a sequence can always be truncated by this many tokens
MAX_PENDING_TOKENS = 64  # tokens after a base, including those of the running pass
MAX_PASS_WIDTH = MAX_PENDING_TOKENS  # a wider block is run in parts
PENDING_SLOTS = MAX_PENDING_TOKENS + 1  # the last slot receives padding
DECAY_CHUNK_TOKENS = 8  # tokens whose decays per channel are computed at a time
Arrays = dict[str, Tensor]


class RecurrentStateLayer:
    """The states of one layer: arrays `[slots, ..]` by name. An array of window inputs, whose name
    is a number, has its tokens along axis 1; the arrays of pending k, u, c and t have their tokens
    along axis 2."""

    def __init__(self) -> None:
        self.arrays: Arrays = {}

    @property
    def is_initialized(self) -> bool:
        return bool(self.arrays)

    @property
    def device(self) -> torch.device:
        return next(iter(self.arrays.values())).device

    def resize(self, like: Arrays, rows: int, capacity: int, num_used: int) -> None:
        """Allocate arrays of `rows` slots, shaped like the arrays `like`, and copy the first
        `num_used` slots of the present arrays."""
        old, new = self.arrays, dict[str, Tensor]()
        for name, x in like.items():
            if name in old and len(old[name]) == rows:  # only `capacity` has changed
                new[name] = old[name]
                continue
            new[name] = x.new_zeros(rows, *x.shape[1:])
            if name in old:
                new[name][:num_used] = old[name][:num_used]
        self.arrays = new  # all at once, so that a Ctrl-C cannot leave only some of them replaced

    def put(self, slot: int, row: Arrays) -> None:
        for name, x in self.arrays.items():
            x[slot] = row[name]

    def get_row(self, slot: int, slots: int) -> Arrays:
        """Return the states in a slot; zeros if its sequence has no tokens (`slots` is 0)."""
        rows = {name: x[slot] for name, x in self.arrays.items()}
        return rows if slots else {name: torch.zeros_like(x) for name, x in rows.items()}

    def clear(self, slot: int) -> None:
        for x in self.arrays.values():
            x[slot] = 0

    def extend_window(
        self, name: str, x: Tensor, size: int, cursor: PendingCursor, num_rows: int
    ) -> Tensor:
        """Store new inputs `[B, C, W]` of a convolution whose kernel has `size` taps. Returns the
        previous `size` - 1 inputs followed by the new inputs, `[B, C, size - 1 + W]`."""
        if name not in self.arrays:
            self.arrays[name] = x.new_zeros(num_rows, size - 1 + PENDING_SLOTS, x.shape[1])
        left = get_last_inputs(self.arrays[name][: len(x)], size, cursor)
        self.arrays[name][cursor.row, size - 1 + cursor.slots] = x.transpose(1, 2)
        return torch.cat([left.transpose(1, 2), x], 2)

    def advance_recurrence(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        g: Tensor,
        beta: Tensor | None,
        cursor: PendingCursor,
        num_rows: int,
    ) -> Tensor:
        """Return the outputs of new tokens (arguments as in `compute_outputs`), and store the
        tokens' k, u and decays. num_rows: number of slots to allocate in the first call."""
        B, H, _, Dv = v.shape
        if "S" not in self.arrays:
            shapes = {"S": (H, k.shape[3], Dv), "k": (k.shape[1], PENDING_SLOTS, k.shape[3])}
            for name, shape in (shapes | {"u": (H, PENDING_SLOTS, Dv)}).items():
                self.arrays[name] = v.new_zeros(num_rows, *shape)
            # float64: small differences of sums of many decays
            self.arrays["c"] = g.new_zeros(
                num_rows, H, PENDING_SLOTS, g.shape[3], dtype=torch.float64
            )
        S = self.arrays["S"][:B]
        kp, up, cp = (self.arrays[name][:B, :, : cursor.max_pending] for name in "kuc")
        if not cursor.is_even:  # entries beyond a sequence's pending tokens are undefined
            seen = (torch.arange(cursor.max_pending, device=k.device) < cursor.pending[:, None])[
                :, None, :, None
            ]
            kp, up, cp = (torch.where(seen, x, 0) for x in (kp, up, cp))
        log_decays = compute_log_decays(cp, cursor.pending)
        out, u, c = compute_outputs(q, k, v, g, beta, S, kp, up, log_decays)
        for name, x in (("k", k), ("u", u), ("c", c + log_decays[:, :, -1:])):
            self.arrays[name][cursor.row, :, cursor.slots] = x.transpose(1, 2)
        return out

    def advance_scan(
        self,
        q: Tensor,
        k: Tensor,
        u: Tensor,
        t: Tensor,
        A: Tensor,
        call: int,
        cursor: PendingCursor,
        num_rows: int,
    ) -> Tensor:
        """Return the outputs o_t = S_t q_t, `[B, W, C]`, of states S_t = exp(t_t A) S_(t-1) + u_t
        k_t^T with C channels (arXiv 2312.00752), and store k, u and t of the new tokens.

        Args:
            q, k: Queries and keys, `[B, W, N]`. u, t: Inputs and steps, `[B, W, C]`.
            A: Negative decay rates `[C, N]`. Stored for each slot, because `fold` needs A too.
            call: The index of this scan in the layer.
            cursor: The positions of the new tokens.
            num_rows: Number of slots to allocate in the first call.
        """
        B, _, N = k.shape
        if f"S{call}" not in self.arrays:
            C = u.shape[2]
            shapes = {"S": (C, N), "L": (C, N), "A": (C, N)}
            shapes |= {
                "k": (1, PENDING_SLOTS, N),
                "u": (1, PENDING_SLOTS, C),
                "t": (1, PENDING_SLOTS, C),
            }
            for name, shape in shapes.items():
                self.arrays[name + str(call)] = u.new_zeros(num_rows, *shape)
            self.arrays[f"n{call}"] = torch.zeros(num_rows, dtype=torch.long)  # on the host
        own = self._get_scan_arrays(call, slice(B))
        own["A"].copy_(A.expand(B, -1, -1))
        pending = torch.tensor(cursor.counts)
        S = _compute_scan_states(own, pending)
        own["L"].copy_(S)
        own["n"].copy_(pending)
        for name, x in (("k", k), ("u", u), ("t", t)):
            self.arrays[name + str(call)][cursor.row, 0, cursor.slots] = x
        return _run_scan_steps(S, A, t, u, k, q)[1]

    def _get_scan_arrays(self, call: int, rows: slice) -> Arrays:
        """Return the arrays of one scan at these slots. S: the states at the base. L: the states
        before the last pass, n tokens after the base."""
        return {name: self.arrays[name + str(call)][rows] for name in "SLAkutn"}

    def fold(self, counts: list[int], first: int = 0) -> None:
        """Move the base of slot `first` + i forward by counts[i] tokens, for each i."""
        rows, to = slice(first, first + len(counts)), torch.tensor(counts)
        tokens = send(to, self.device)
        for call in range(sum(name[0] == "n" for name in self.arrays)):
            own = self._get_scan_arrays(call, rows)
            own["S"].copy_(_compute_scan_states(own, to))
            late = send(own["n"] < to, self.device)[:, None, None]
            own["L"].copy_(torch.where(late, own["S"], own["L"]))
            own["n"].sub_(to).clamp_(min=0)
        arrays = {name: x[rows] for name, x in self.arrays.items()}
        if "S" in arrays:
            some = slice(max(counts))
            k, u, c = (arrays[name][:, :, some] for name in "kuc")
            fold_tokens(arrays["S"], k, u, c, tokens)
        if "c" in arrays:
            arrays["c"].sub_(_gather_token(arrays["c"], tokens - 1))
        for name, x in arrays.items():
            if name[0] in "kuct" or name.isdigit():
                _shift(x, counts, 1 if name.isdigit() else 2)


class PendingCursor:
    """The indices at which a pass stores its tokens in each slot: after the slot's pending
    tokens."""

    def __init__(self, pending: list[int], width: int, device: torch.device) -> None:
        self.counts = pending
        self.max_pending, self.is_even = max(pending), min(pending) == max(pending)
        self.pending = torch.tensor(pending, device=device)
        self.row = torch.arange(len(pending), device=device)[:, None]
        slots = self.pending[:, None] + torch.arange(width, device=device)
        self.slots = slots.clamp(max=MAX_PENDING_TOKENS)


class RewindableRows(RowSlots):
    """Sequences with recurrent states. Each sequence has its own base."""

    base_lengths: list[int]  # by row

    def list_state_layers(self) -> list[RecurrentStateLayer]:
        """Return the layers that have states."""
        raise NotImplementedError

    def advance_bases(self, rows: list[int], lengths: list[int], counts: list[int]) -> list[int]:
        """Return the number of pending tokens of each sequence b in `rows`. Sequence b has
        lengths[b] tokens and gets counts[b] more. If a sequence would exceed `MAX_PENDING_TOKENS`,
        bases are moved forward first."""
        for b in rows:
            if lengths[b] == 0 and self.base_lengths[b]:  # truncated to nothing
                self.base_lengths[b] = 0
                for layer in self.list_state_layers():
                    layer.clear(self.slots[b])
        pending = [lengths[b] - self.base_lengths[b] for b in rows]
        if all(n + counts[b] <= MAX_PENDING_TOKENS for b, n in zip(rows, pending, strict=True)):
            return pending
        moved = {  # includes bases that need not move yet, since one call moves all of them
            self.slots[b]: n - min(MAX_REWIND_TOKENS, MAX_PENDING_TOKENS - counts[b])
            for b, n in zip(rows, pending, strict=True)
        }
        moved = {slot: n for slot, n in moved.items() if n > 0}
        if moved:
            first = min(moved)
            each = [moved.get(slot, 0) for slot in range(first, max(moved) + 1)]
            for layer in self.list_state_layers():
                layer.fold(each, first)
            for b in rows:
                self.base_lengths[b] += moved.get(self.slots[b], 0)
        return [lengths[b] - self.base_lengths[b] for b in rows]

    def check_rewind(self, old: list[int], new: list[int]) -> None:
        """Raise InputError if a sequence b cannot be truncated from old[b] to new[b] tokens: a
        sequence can only be truncated to its base or later, or to 0 tokens."""
        for b, base in enumerate(self.base_lengths):
            check_rewind_to_base(b, old[b], new[b], base)

    def join(self, other: Any) -> None:
        super().join(other)
        self.base_lengths = self.base_lengths + other.base_lengths

    def select(self, rows: list[int]) -> None:
        self.base_lengths = [self.base_lengths[b] for b in rows]
        super().select(rows)


def check_rewind_to_base(b: int, old: int, new: int, base: int) -> None:
    """Raise InputError if sequence b cannot be truncated from `old` to `new` tokens: a sequence can
    only be truncated to its base (`base` tokens) or later, or to 0 tokens."""
    if 0 < new < base:
        raise InputError(
            f"sequence {b} would be truncated from {old} to {new} tokens, but its recurrent states "
            f"can only be rewound to {base} tokens; give a gamma below {MAX_REWIND_TOKENS}"
        )


def fold_tokens(S: Tensor, k: Tensor, u: Tensor, c: Tensor, tokens: Tensor) -> None:
    """Advance states S `[B, H, Dk, Dv]` in place: for each sequence b, over its first tokens[b]
    pending tokens."""
    end = _gather_token(c, tokens - 1)
    moved = (torch.arange(k.shape[2], device=k.device) < tokens[:, None])[:, None, :, None]
    weight = torch.where(moved, (end - c).clamp(max=0).exp(), 0).to(k.dtype)
    k, u = torch.where(moved, k, 0), torch.where(moved, u, 0)
    k, u = (k, u * weight) if c.shape[3] == 1 else (k * weight, u)
    S.mul_(end.exp().to(S.dtype).transpose(2, 3)).add_(_multiply_by_group(k.transpose(2, 3), u))


def get_last_inputs(window: Tensor, size: int, cursor: PendingCursor) -> Tensor:
    """Return the last `size` - 1 inputs of each sequence, `[B, size - 1, C]`."""
    if cursor.is_even:
        return window[:, cursor.max_pending : cursor.max_pending + size - 1]
    return window[
        cursor.row, cursor.pending[:, None] + torch.arange(size - 1, device=window.device)
    ]


def compute_log_decays(c: Tensor, pending: Tensor) -> Tensor:
    """Return `[B, H, P + 1, ..]`: for each of the P pending tokens, the sum of the log decays of
    all later tokens; as the last entry, the sum for all pending tokens. c: for each pending token,
    the sum of the log decays from the base up to this token."""
    end = _gather_token(c, pending - 1)
    return torch.cat([end - c, end], 2)


def compute_outputs(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor | None,
    S: Tensor,
    kp: Tensor,
    up: Tensor,
    log_decays: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute o_t = S_t^T q_t of new tokens, `[B, H, W, Dv]`.

    Args:
        q, k: `[B, Hk, W, Dk]`. v: `[B, H, W, Dv]`; H / Hk heads of values share one head of keys.
        g: Log decays, at most 0: `[B, H, W, 1]`, or one for each channel, `[B, H, W, Dk]` (H = Hk).
        beta: `[B, H, W, 1]` for the delta rule (arXiv 2412.06464), in which u_t = beta_t (v_t -
            decayed S_(t-1)^T k_t); None: u = v (Mamba2, arXiv 2405.21060).
        S: The stored state, before the pending tokens (at the base), `[B, H, Dk, Dv]`.
        kp, up: k and u of the P pending tokens.
        log_decays: The result of `compute_log_decays`, `[B, H, P + 1, 1 or Dk]`; -inf for padding.

    Returns:
        The outputs, the new tokens' u, and, in float64, the sums of g up to each token.
    """
    W, c, earlier = k.shape[2], g.double().cumsum(2), log_decays[:, :, :-1]
    x, cx = q, c
    if beta is not None:  # keys and queries in one product, which loads the state once
        x, cx = torch.cat([k, q], 2), torch.cat([c, c], 2)
    decay = (cx + log_decays[:, :, -1:]).exp().to(v.dtype)
    past = _multiply_state(x, decay, S) + _compute_decayed_products(x, cx, kp, earlier) @ up
    # a draft token may have non-finite values: 0 times such a value would make earlier tokens NaN
    u = zero_nonfinite(v if beta is None else beta * (v - past[:, :, :W]))
    if W == 1:  # no products between different new tokens
        return past[:, :, -1:] + _multiply_by_group((q * k).sum(3, keepdim=True), u), u, c
    products = _compute_decayed_products(x, cx, k, -c)
    if beta is not None:
        u = _solve(zero_nonfinite(beta * products[:, :, :W]), u)
    return past[:, :, -W:] + zero_nonfinite(products[:, :, -W:]).tril() @ u, u, c


def zero_nonfinite(x: Tensor) -> Tensor:
    """Return x with its non-finite values replaced by 0."""
    return torch.where(x.abs() < torch.inf, x, 0)


def _gather_token(c: Tensor, index: Tensor) -> Tensor:
    """Return `c` at token index[b] of each sequence b, `[B, H, 1, ..]`; 0 for index -1."""
    if not c.shape[2]:
        return c.new_zeros(*c.shape[:2], 1, c.shape[3])
    token = index.clamp(min=0)[:, None, None, None].expand(-1, c.shape[1], 1, c.shape[3])
    return torch.where((index >= 0)[:, None, None, None], c.gather(2, token), 0)


def _multiply_by_group(x: Tensor, y: Tensor) -> Tensor:
    """Return `x @ y` for x `[B, Hk, ..]` and y `[B, H, ..]`, multiplying each head of x by H / Hk
    heads of y."""
    if x.shape[1] == y.shape[1]:
        return x @ y
    return (x[:, :, None] @ y.unflatten(1, (x.shape[1], -1))).flatten(1, 2)


def _multiply_state(x: Tensor, decay: Tensor, S: Tensor) -> Tensor:
    """Return `[B, H, W, Dv]`: the products of tokens x and a state S, each multiplied by its
    token's decay."""
    return _multiply_by_group(x, S) * decay if decay.shape[3] == 1 else (x * decay) @ S


def _compute_decayed_products(x: Tensor, c: Tensor, y: Tensor, fade: Tensor) -> Tensor:
    """Return `[B, H, i, j]`: the products of tokens x_i and y_j, each multiplied by the decay from
    j to i; undefined if y_j comes after x_i.

    A decay is exp(c_i + fade_j), since a quotient of exponentials would overflow. Decays per
    channel are computed for a few tokens at a time, to save memory.
    """
    if c.shape[3] == 1:
        decays = (c + fade.transpose(2, 3)).clamp(max=0).exp().to(x.dtype)
        products = x @ y.transpose(2, 3)
        groups = c.shape[1] // x.shape[1]
        return (products.repeat_interleave(groups, 1) if groups > 1 else products) * decays
    parts = [x.new_zeros(*x.shape[:2], 0, y.shape[2])]
    for at in range(0, x.shape[2], DECAY_CHUNK_TOKENS):
        some = c[:, :, at : at + DECAY_CHUNK_TOKENS, None] + fade[:, :, None]
        decayed = some.clamp(max=0).exp().to(x.dtype) * y[:, :, None]
        parts.append((decayed @ x[:, :, at : at + DECAY_CHUNK_TOKENS, :, None])[..., 0])
    return torch.cat(parts, 2)


def _solve(A: Tensor, y: Tensor) -> Tensor:
    """Solve (1 + A) x = y for x; uses only the entries of A below the diagonal."""
    return torch.linalg.solve_triangular(A, y, upper=False, unitriangular=True)


def _compute_scan_states(own: Arrays, to: Tensor) -> Tensor:
    """Return the states of a scan after the first to[b] pending tokens of each slot b. own: the
    arrays that `_get_scan_arrays` returns. to: a tensor on the host."""
    near = own["n"] <= to
    begin = torch.where(near, own["n"], 0)
    steps = int((to - begin).max())
    index = (to - steps)[:, None] + torch.arange(steps)
    there = send(index >= begin[:, None], own["S"].device)[:, :, None]
    index = send(index.clamp(min=0), own["S"].device)
    row = torch.arange(len(to), device=index.device)[:, None]
    t, u, k = (torch.where(there, own[name][row, 0, index], 0) for name in "tuk")
    S = torch.where(send(near, index.device)[:, None, None], own["L"], own["S"])
    return _run_scan_steps(S, own["A"], t, u, k)[0]


def _run_scan_steps(
    S: Tensor, A: Tensor, t: Tensor, u: Tensor, k: Tensor, q: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Return the state of a scan after these tokens, and the outputs S_t q_t; without q, the
    outputs are zeros."""
    out = u.new_zeros(u.shape)
    for i in range(u.shape[1]):
        S = (t[:, i, :, None] * A).exp_() * S + u[:, i, :, None] * k[:, i, None]
        if q is not None:
            out[:, i] = (S @ q[:, i, :, None])[..., 0]
    return S, out


def _shift(x: Tensor, counts: list[int], axis: int) -> None:
    """Remove the first counts[i] tokens of each slot i along `axis`, by moving later tokens forward
    in place."""
    for row, count in zip(x.unbind(), counts, strict=True):
        if count:
            row = row.movedim(axis - 1, 0)
            row[:-count] = row[count:].clone()


# takes the arguments blocks and need of `Model.score`; returns logits and the output layer's inputs
RunBlocks = Callable[[list[list[int]], list[int]], tuple[Tensor, Tensor]]


def run_in_parts(
    run: RunBlocks, blocks: list[list[int]], need: list[int]
) -> tuple[Tensor, Tensor] | None:
    """Run blocks of more than `MAX_PASS_WIDTH` tokens in several passes. Returns logits and the
    output layer's inputs, `[B, max(need), ..]`; None if no logits are needed."""
    outputs: tuple[Tensor, Tensor] | None = None
    firsts = [len(block) - n for block, n in zip(blocks, need, strict=True)]
    for at in range(0, max(map(len, blocks)), MAX_PASS_WIDTH):
        parts = [block[at : at + MAX_PASS_WIDTH] for block in blocks]
        ends = [at + len(part) - first for part, first in zip(parts, firsts, strict=True)]
        some = [min(len(part), max(0, end)) for part, end in zip(parts, ends, strict=True)]
        new = run(parts, some)
        if not any(some):
            continue
        if outputs is None:
            logits, hidden = (x.new_zeros(len(blocks), max(need), x.shape[-1]) for x in new)
            outputs = logits, hidden
        for whole, part in zip(outputs, new, strict=True):
            for b, (n, end) in enumerate(zip(some, ends, strict=True)):
                whole[b, end - n : end] = part[b, :n]
    return outputs
