"""States of hybrid models in a graph for flat passes: windows and recurrences as inputs, and what
later states follow from as outputs.

A flat pass gives each token a row of its own. `Grid` brings tokens of one row together, and back.
The recurrence is torch's (`models/states`), traced; the graph holds no state itself.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer

from foretoken.errors import RefusedError
from foretoken.models.states import SLOTS, advanced, finite
from foretoken.models.stock.cache import KEEPS_BOTH, KEEPS_TOKENS, StateCalls


class Grid(NamedTuple):
    """Tokens of a flat pass by row."""

    tokens: Tensor  # [B, W]: the flat places of each row's tokens
    places: Tensor  # [N]: b * W + i, where token i of row b is in `tokens`
    rows: Tensor  # [N]: b

    def gathered(self, x: Tensor) -> Tensor:
        """`[N, ..]` -> `[B, W, ..]`."""
        return x[self.tokens]

    def flat(self, x: Tensor) -> Tensor:
        """`[B, W, ..]` -> `[N, ..]`."""
        return x.flatten(0, 1).index_select(0, self.places)


EXAMPLE = Grid(torch.tensor([[0, 1]]), torch.tensor([0, 1]), torch.tensor([0, 0]))
GRID = tuple(f"grid.{name}" for name in Grid._fields)


class Sizes(NamedTuple):
    """Sizes of the states of a model, in the order in which its layers ask for them."""

    windows: list[tuple[int, int]]  # taps and channels
    recurrences: list[tuple[int, int, int, int]]  # Hk, H, Dk, Dv

    def inputs(self) -> dict[str, tuple[int, ...]]:
        """Shapes of the inputs by name, behind the number of rows."""
        left = max((taps for taps, _ in self.windows), default=1) - 1
        heads = sum(H for _, H, _, _ in self.recurrences)
        shapes: dict[str, tuple[int, ...]] = {
            "left": (left, sum(channels for _, channels in self.windows)),
            "fade": (heads, SLOTS + 1, 1),
        }
        shapes = {name: shape for name, shape in shapes.items() if shape[0]}
        for i, (Hk, H, Dk, Dv) in enumerate(self.recurrences):
            shapes |= {f"S.{i}": (H, Dk, Dv), f"k.{i}": (Hk, SLOTS, Dk), f"u.{i}": (H, SLOTS, Dv)}
        return shapes

    def outputs(self) -> list[str]:
        """Names of the outputs."""
        numbers = range(len(self.recurrences))
        some = [*["new.x"] * bool(self.windows), *["new.c"] * bool(self.recurrences)]
        return [*some, *(f"new.{x}.{i}" for i in numbers for x in ("k", "u"))]


class TracedCache(StateCalls, DynamicCache):
    """A cache whose layers append keys and values, and whose states are given: `Sizes.inputs`, or
    zeros where the sizes are still to be found out."""

    def __init__(self, stock: list[Any], grid: Grid, given: dict[str, Tensor]) -> None:
        super().__init__()
        self.layer_class_to_replicate = None
        keeping = KEEPS_TOKENS | KEEPS_BOTH
        self.layers = [DynamicLayer() if type(x).__name__ in keeping else x for x in stock]
        self.grid, self.given = grid, given
        self.used = Sizes([], [])
        self.new: dict[str, list[Tensor]] = {"x": [], "c": [], "ku": []}

    def keeping(self) -> list[DynamicLayer]:
        """The layers of keys and values."""
        return [layer for layer in self.layers if type(layer) is DynamicLayer]

    def made(self) -> list[Tensor]:
        """The outputs, as `Sizes.outputs` names them."""
        return [*(torch.cat(self.new[x], 1) for x in "xc" if self.new[x]), *self.new["ku"]]

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self.keeping()[0].get_seq_length()

    def window(self, x: Tensor, layer: int, name: str, size: int) -> Tensor:
        """Return each token behind its own last ones, `[N, C, size]`."""
        C, first = x.shape[1], sum(channels for _, channels in self.used.windows)
        self.used.windows.append((size, C))
        if self.given:
            left = self.given["left"][:, -(size - 1) :, first : first + C]
        else:
            left = x.new_zeros(len(self.grid.tokens), size - 1, C)
        new = x[:, :, 0]
        self.new["x"].append(new)
        line = torch.cat([left, self.grid.gathered(new)], 1).flatten(0, 1)
        starts = self.grid.places + self.grid.rows * (size - 1)
        taps = starts[:, None] + torch.arange(size)
        return line.index_select(0, taps.flatten()).reshape(-1, size, C).transpose(1, 2)

    def recurrence(self, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor | None) -> Tensor:
        if g.shape[3] != 1:
            raise RefusedError("decays by channel have no form on OpenVINO")
        self.calls += 1
        i, first = len(self.used.recurrences), sum(H for _, H, _, _ in self.used.recurrences)
        Hk, H, Dk, Dv = k.shape[1], v.shape[1], k.shape[3], v.shape[3]
        self.used.recurrences.append((Hk, H, Dk, Dv))
        if self.given:
            S, kp, up = (self.given[f"{name}.{i}"] for name in ("S", "k", "u"))
            fade = self.given["fade"][:, first : first + H]
        else:
            B = len(self.grid.tokens)
            S, fade = v.new_zeros(B, H, Dk, Dv), v.new_zeros(B, H, SLOTS + 1, 1)
            kp, up = v.new_zeros(B, Hk, SLOTS, Dk), v.new_zeros(B, H, SLOTS, Dv)
        q, k, v, g = (self._by_row(x) for x in (q, k, v, g))
        beta = None if beta is None else self._by_row(beta)
        out, u, c = advanced(q, k, v, g, beta, S, kp, up, fade)
        self.new["c"].append(c.float())
        self.new["ku"] += [finite(k), u]
        return self.grid.flat(out.transpose(1, 2))[:, :, None]

    def scan(self, q: Tensor, k: Tensor, u: Tensor, t: Tensor, A: Tensor) -> Tensor:
        raise RefusedError("selective scans have no form on OpenVINO")

    def _by_row(self, x: Tensor) -> Tensor:
        """`[N, H, 1, D]` -> `[B, H, W, D]`."""
        return self.grid.gathered(x[:, :, 0]).transpose(1, 2)
