"""What an export hands on: a model's graphs, and the facts that its runner and the disk cache need.

It does not know which form the graphs have, nor how they are compiled.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import openvino


@dataclass(frozen=True, slots=True)
class Exported:
    """Graphs of one model by name, and JSON-able facts about it (vocab_size, context, ...)."""

    graphs: dict[str, openvino.Model]
    facts: dict[str, Any]
