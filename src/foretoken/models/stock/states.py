"""States of hybrid models by row, which can go back: windows of convolutions, linear recurrences.

A row's state stands at a length of its own, the base. All is kept that the states of the tokens
behind it, at most `REACH`, follow from: the inputs of a window, and k, u and the decays of a
recurrence S_t = decay_t * S_(t-1) + k_t u_t^T, so that after any of them

    S_n = D_n S_0 + sum over i <= n of (D_n / D_i) k_i u_i^T,    D_i = exp(c_i),

where c_i sums the log decays up to token i. Neither k, u nor c of a token depends on tokens behind
it: a rejected token leaves nothing. A pass reads S_0 and these; the base moves ("folds") only where
they get too many, and never to within `REWIND` tokens of a row's end. It does not know families.

The states of a selective scan have a decay for each of their numbers, and no such sum: their steps
are run again, from the state that the last pass began with, or where a row went back behind it,
from the base.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from foretoken.transfer import sent

REWIND = 32  # tokens that a row can always go back
PASS = 64  # tokens of the widest pass
REACH = REWIND + PASS  # tokens behind a base, at most, those of a pass included
SOME = 8  # tokens whose decays by channel are formed at a time
Arrays = dict[str, Tensor]


class StateLayer:
    """The states of one layer, by place: arrays `[rows, ..]` by name, of which windows have their
    tokens in the last axis and pending updates in the one before the last."""

    def __init__(self) -> None:
        self.arrays: Arrays = {}

    @property
    def is_initialized(self) -> bool:
        return bool(self.arrays)

    def fit(self, like: Arrays, rows: int, capacity: int, used: int) -> None:
        """New arrays, shaped like these; the first `used` places stay."""
        old, self.arrays = self.arrays, {}
        for name, x in like.items():
            if name in old and len(old[name]) == rows:  # slots alone have changed
                self.arrays[name] = old[name]
                continue
            self.arrays[name] = x.new_zeros(rows, *x.shape[1:])
            if name in old:
                self.arrays[name][:used] = old[name][:used]

    def put(self, place: int, row: Arrays) -> None:
        for name, x in self.arrays.items():
            x[place] = row[name]

    def row(self, place: int, slots: int) -> Arrays:
        """A row; one without tokens stands at the beginning."""
        rows = {name: x[place] for name, x in self.arrays.items()}
        return rows if slots else {name: torch.zeros_like(x) for name, x in rows.items()}

    def clear(self, place: int) -> None:
        for x in self.arrays.values():
            x[place] = 0

    def window(self, name: str, x: Tensor, size: int, at: Cursor, rows: int) -> Tensor:
        """Return new inputs `[B, C, W]` behind the `size` - 1 inputs before them, and keep them."""
        if name not in self.arrays:
            self.arrays[name] = x.new_zeros(rows, x.shape[1], size - 1 + REACH)
        kept = self.arrays[name]
        index = at.pending[:, None] + torch.arange(size - 1, device=x.device)
        left = kept[: len(x)].gather(2, index[:, None].expand(-1, x.shape[1], -1))
        kept[at.row, :, size - 1 + at.slots] = x.transpose(1, 2)
        return torch.cat([left, x], 2)

    def recurrence(
        self, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor | None, at: Cursor, rows: int
    ) -> Tensor:
        """Return o_t = S_t^T q_t, `[B, H, W, Dv]`, and keep what the states follow from.

        Args:
            q: `[B, H, W, Dk]`, as are the keys k; v `[B, H, W, Dv]`.
            g: Log decays, at most 0: `[B, H, W, 1]`, or `[B, H, W, Dk]`, one for each channel.
            beta: `[B, H, W, 1]` of the delta rule, whose u_t = beta_t (v_t - decayed S_(t-1)^T k_t)
                (arXiv 2412.06464); None: u = v (Mamba2, arXiv 2405.21060).
            at: Where the new tokens go.
            rows: Rows for which arrays are made.
        """
        B, H, _, Dk = k.shape
        if "S" not in self.arrays:
            shapes = {"S": (Dk, v.shape[3]), "k": (REACH, Dk), "u": (REACH, v.shape[3])}
            for name, shape in shapes.items():
                self.arrays[name] = v.new_zeros(rows, H, *shape)
            # sums of many decays, whose differences are small
            self.arrays["c"] = g.new_zeros(rows, H, REACH, g.shape[3], dtype=torch.float64)
        S = self.arrays["S"][:B]
        kp, up, cp = (self.arrays[name][:B, :, : at.most] for name in "kuc")
        if not at.even:  # places without a token may hold anything
            seen = (torch.arange(at.most, device=k.device) < at.pending[:, None])[:, None, :, None]
            kp, up, cp = (torch.where(seen, x, 0) for x in (kp, up, cp))
        c = g.double().cumsum(2) + _at(cp, at.pending - 1)
        whole = c.exp().to(v.dtype)  # the decay since the base
        if beta is None:
            u = v
        else:
            kb = k * beta
            u = v * beta - (kb * whole) @ S - _dots(kb, c, kp, cp) @ up
            if k.shape[2] > 1:
                among = _dots(kb, c, k, c)
                u = torch.linalg.solve_triangular(among, u, upper=False, unitriangular=True)
        for name, x in (("k", k), ("u", u), ("c", c)):
            self.arrays[name][at.row, :, at.slots] = x.transpose(1, 2)
        out = (q * whole) @ S + _dots(q, c, kp, cp) @ up
        if k.shape[2] == 1:
            return out + (q * k).sum(3, keepdim=True) * u
        return out + _dots(q, c, k, c).tril() @ u

    def scan(
        self,
        q: Tensor,
        k: Tensor,
        u: Tensor,
        t: Tensor,
        A: Tensor,
        call: int,
        at: Cursor,
        rows: int,
    ) -> Tensor:
        """Return o_t = S_t q_t, `[B, W, C]`, of states S_t = exp(t_t A) S_(t-1) + u_t k_t^T of C
        channels (arXiv 2312.00752), and keep what these follow from.

        Args:
            q: `[B, W, N]`, as are the keys k; the inputs u and steps t `[B, W, C]`.
            A: Decays `[C, N]`, below 0: kept by place, as a row without tokens knows none.
            call: The number of this scan in the layer.
            at: Where the new tokens go.
            rows: Rows for which arrays are made.
        """
        B, _, N = k.shape
        if f"S{call}" not in self.arrays:
            C = u.shape[2]
            shapes = {"S": (C, N), "L": (C, N), "A": (C, N)}
            shapes |= {"k": (1, REACH, N), "u": (1, REACH, C), "t": (1, REACH, C)}
            for name, shape in shapes.items():
                self.arrays[name + str(call)] = u.new_zeros(rows, *shape)
            self.arrays[f"n{call}"] = torch.zeros(rows, dtype=torch.long)  # on the host
        own = self._scanned(call, B)
        own["A"].copy_(A.expand(B, -1, -1))
        pending = torch.tensor(at.counts)
        S = _behind(own, pending)
        own["L"].copy_(S)
        own["n"].copy_(pending)
        for name, x in (("k", k), ("u", u), ("t", t)):
            self.arrays[name + str(call)][at.row, 0, at.slots] = x
        return _steps(S, A, t, u, k, q)[1]

    def _scanned(self, call: int, rows: int) -> Arrays:
        """Return what is kept of one scan of the first places: states S at the base and L behind n
        pending tokens, where the last pass began."""
        return {name: self.arrays[name + str(call)][:rows] for name in "SLAkutn"}

    def fold(self, tokens: Tensor) -> None:
        """Move the bases of the first places by so many tokens `[B]`."""
        B = len(tokens)
        for call in range(sum(name[0] == "n" for name in self.arrays)):
            own, to = self._scanned(call, B), tokens.cpu()
            own["S"].copy_(_behind(own, to))
            late = (own["n"] < to).to(tokens.device)[:, None, None]
            own["L"].copy_(torch.where(late, own["S"], own["L"]))
            own["n"].sub_(to).clamp_(min=0)
        if "S" in self.arrays:
            S, k, u, c = (self.arrays[name][:B] for name in "Skuc")
            moved = torch.arange(REACH, device=k.device) < tokens[:, None]
            moved = moved[:, None, :, None]
            end = _at(c, tokens - 1)
            weight = torch.where(moved, (end - c).clamp(max=0).exp(), 0).to(k.dtype)
            k, u = torch.where(moved, k, 0) * weight, torch.where(moved, u, 0)
            S.mul_(end.exp().to(S.dtype).transpose(2, 3)).add_(k.transpose(2, 3) @ u)
            c.sub_(end)
        for name, x in self.arrays.items():
            if name[0] in "kuct" or name.isdigit():
                _shift(x[:B], tokens, -1 if name.isdigit() else 2)


class Cursor:
    """Where the tokens of a pass go: behind the pending ones of each place."""

    def __init__(self, pending: list[int], width: int, device: torch.device) -> None:
        self.counts = pending
        self.most, self.even = max(pending), min(pending) == max(pending)
        self.pending = torch.tensor(pending, device=device)
        self.row = torch.arange(len(pending), device=device)[:, None]
        self.slots = self.pending[:, None] + torch.arange(width, device=device)


def folds(pending: list[int], width: int) -> list[int]:
    """Tokens by which the bases of rows move before a pass of this width, so that it has room."""
    return [n - REWIND if n + width > PASS and n > REWIND else 0 for n in pending]


def _at(c: Tensor, index: Tensor) -> Tensor:
    """`c` at one token of each row, `[B, H, 1, ..]`; 0 at -1."""
    if not c.shape[2]:
        return c.new_zeros(*c.shape[:2], 1, c.shape[3])
    place = index.clamp(min=0)[:, None, None, None].expand(-1, c.shape[1], 1, c.shape[3])
    return torch.where((index >= 0)[:, None, None, None], c.gather(2, place), 0)


def _dots(x: Tensor, c: Tensor, y: Tensor, earlier: Tensor) -> Tensor:
    """Decayed products of tokens x and y, `[B, H, i, j]`, right where y is not behind x.

    A decay is exp(c_i - c_j), never a quotient, which would overflow. Decays by channel are formed
    for a few tokens at a time: for all they would take much memory.
    """
    if c.shape[3] == 1:
        decays = (c - earlier.transpose(2, 3)).clamp(max=0).exp()
        return (x @ y.transpose(2, 3)) * decays.to(x.dtype)
    parts = [x.new_zeros(*x.shape[:2], 0, y.shape[2])]
    for at in range(0, x.shape[2], SOME):
        some = c[:, :, at : at + SOME, None] - earlier[:, :, None]
        decayed = some.clamp(max=0).exp().to(x.dtype) * y[:, :, None]
        parts.append((decayed @ x[:, :, at : at + SOME, :, None])[..., 0])
    return torch.cat(parts, 2)


def _behind(own: Arrays, to: Tensor) -> Tensor:
    """States of a scan behind so many pending tokens `[B]` of each place, a tensor on the host."""
    near = own["n"] <= to
    begin = torch.where(near, own["n"], 0)
    steps = int((to - begin).max())
    index = (to - steps)[:, None] + torch.arange(steps)
    there = sent(index >= begin[:, None], own["S"].device)[:, :, None]
    index = sent(index.clamp(min=0), own["S"].device)
    row = torch.arange(len(to), device=index.device)[:, None]
    t, u, k = (torch.where(there, own[name][row, 0, index], 0) for name in "tuk")
    S = torch.where(sent(near, index.device)[:, None, None], own["L"], own["S"])
    return _steps(S, own["A"], t, u, k)[0]


def _steps(
    S: Tensor, A: Tensor, t: Tensor, u: Tensor, k: Tensor, q: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Return the state behind some tokens, and what q reads of each."""
    out = u.new_zeros(u.shape)
    for i in range(u.shape[1]):
        S = (t[:, i, :, None] * A).exp_() * S + u[:, i, :, None] * k[:, i, None]
        if q is not None:
            out[:, i] = (S @ q[:, i, :, None])[..., 0]
    return S, out


def _shift(x: Tensor, tokens: Tensor, axis: int) -> None:
    """Move what is kept of tokens to the front, by so many in each place, in place."""
    x = x.movedim(axis, 1)
    n = x.shape[1]
    index = (tokens[:, None] + torch.arange(n, device=x.device)).clamp(max=n - 1)
    view: Any = index.view(len(tokens), n, *[1] * (x.dim() - 2)).expand(x.shape)
    x.copy_(x.gather(1, view))
