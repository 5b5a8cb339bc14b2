"""Blockwise heads (Stern et al. 2018, arXiv 1811.03115): small blocks between a target's last
hidden state and its output layer, and the file they are kept in.

Head k maps the state that the output layer read when the target chose a token, and that token, to
the state it is to read for the token k places further. The output layer is the target's own, as
Medusa's (arXiv 2401.10774), so the file is small. It does not know how heads are trained or used.
"""
# torch, NumPy, transformers and JSON leave types open
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor, nn
from torch.nn import functional
from transformers import PreTrainedModel

from foretoken.errors import InputError, RefusedError
from foretoken.models.stock.sizes import is_same_model, sketch_weights
from foretoken.storage import files

FORMAT, VERSION = "foretoken.heads", 1
DTYPES = {torch.float64, torch.float32, torch.bfloat16, torch.float16}
TENSORS = ("inner", "outer", "sketch")


class Heads(nn.Module):
    """K heads: `inner [K, H, H + E]` and `outer [K, H, H]`. `sketch`: of their target's weights."""

    def __init__(self, inner: Tensor, outer: Tensor, sketch: Tensor) -> None:
        super().__init__()
        self.inner, self.outer = nn.Parameter(inner), nn.Parameter(outer)
        self.sketch = sketch

    @classmethod
    def fresh(cls, target: PreTrainedModel, count: int, seed: int = 0) -> Heads:
        """Untrained heads for a target, each of which repeats the target's last distribution."""
        H, E = widths(target)
        random = torch.Generator().manual_seed(seed)
        inner = torch.randn(count, H, H + E, generator=random) / (H + E) ** 0.5
        return cls(inner, torch.zeros(count, H, H), sketch_weights(target))

    @property
    def count(self) -> int:
        return len(self.inner)

    def forward(self, hidden: Tensor, embedded: Tensor, first: int, last: int) -> Tensor:
        """States for the output layer from heads first to last - 1, counted from 0,
        `[N, last - first, H]`.

        `hidden [N, H]`: what it read last; `embedded [N, E]`: the tokens that were chosen then.
        """
        features = torch.cat([functional.rms_norm(x, x.shape[-1:]) for x in (hidden, embedded)], -1)
        inner = self.inner[first:last]
        wide = functional.silu(functional.linear(features, inner.flatten(0, 1)))
        wide = wide.view(len(hidden), *inner.shape[:2])  # not -1: N may be 0
        return hidden[:, None] + torch.einsum("nki,koi->nko", wide, self.outer[first:last])

    def save(self, path: str | Path) -> None:
        """Write one safetensors file, whole or not at all; OSError where it cannot be written."""
        tensors = {name: getattr(self, name).detach().contiguous() for name in TENSORS}
        files.write_atomically(
            Path(path), save(tensors, {FORMAT: json.dumps({"version": VERSION})})
        )

    @classmethod
    def load(cls, path: str | Path) -> Heads:
        """Read `save`'s file. Raises InputError for any other."""
        path = Path(path)
        if not path.is_file():
            raise InputError(
                f"there is no file {path}; make one with `python -m reproduction train heads`"
            )
        try:
            with safe_open(path, framework="pt") as file:
                facts = files.parse_json((file.metadata() or {}).get(FORMAT, "{}"))
                if not isinstance(facts, dict) or facts.get("version") != VERSION:
                    raise InputError(f"{path} holds no heads of version {VERSION}; train them anew")
                tensors = [file.get_tensor(name) for name in TENSORS]
        except (SafetensorError, OSError, ValueError) as error:
            if isinstance(error, InputError):
                raise
            raise InputError(f"{path} cannot be read ({error}); train the heads anew") from error
        if not sound(*tensors):
            raise InputError(f"{path} holds broken heads; train them anew")
        return cls(*tensors).requires_grad_(False)

    def require_shape(self, name: str, target: PreTrainedModel) -> None:
        """Raise RefusedError unless the target, which may be on meta, has their widths."""
        H, E = widths(target)
        sizes = self.outer.shape[1], self.inner.shape[2] - self.outer.shape[1]
        if sizes != (H, E):
            raise RefusedError(
                f"{name} holds heads for states of {sizes[0]} and embeddings of {sizes[1]}, "
                f"the target has {H} and {E}; train heads for this target"
            )

    def require_target(self, name: str, target: PreTrainedModel) -> None:
        """Raise RefusedError unless they were trained for this target."""
        if not is_same_model(self.sketch, sketch_weights(target)):
            raise RefusedError(
                f"{name} holds heads of another target: its weights differ; train heads for this "
                "target"
            )


def sound(inner: Tensor, outer: Tensor, sketch: Tensor) -> bool:
    """Tell whether these are heads: finite, of shapes that fit each other."""
    if not {inner.dtype, outer.dtype} <= DTYPES or sketch.dtype != torch.float32:
        return False
    if not (inner.ndim == outer.ndim == 3 and sketch.ndim == 1 and len(inner) == len(outer) > 0):
        return False
    H = outer.shape[1]
    fits = outer.shape[2] == inner.shape[1] == H < inner.shape[2]
    return fits and all(bool(x.isfinite().all()) for x in (inner, outer))


def ends_of(target: PreTrainedModel) -> tuple[Any, Any]:
    """The output layer, and the embeddings of the tokens that the decoder reads.

    Raises RefusedError where the output layer is not a linear one.
    """
    output = target.get_output_embeddings()
    decoder = target.get_decoder() if target.config.is_encoder_decoder else target
    embeddings = decoder.get_input_embeddings()
    if not hasattr(output, "in_features") or not hasattr(embeddings, "embedding_dim"):
        raise RefusedError(
            f"{type(target).__name__} has no linear output layer that heads could share; "
            "give another draft"
        )
    return output, embeddings


def widths(target: PreTrainedModel) -> tuple[int, int]:
    """H, what the output layer reads, and E, the embeddings' width."""
    output, embeddings = ends_of(target)
    return int(output.in_features), int(embeddings.embedding_dim)
