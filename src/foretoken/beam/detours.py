"""The self-check of trees: the one of sequences, with a wrong turn beside every token; and the
choice of a forest by it.

Apart from `forest`, because it imports transformers' networks, which takes seconds.
"""

from __future__ import annotations

import torch
from torch import Tensor
from transformers import PreTrainedModel

from foretoken.beam.forest import Copied, Forest, Node, Shared
from foretoken.errors import RefusedError
from foretoken.models.base import Blocks, Model, TreeModel
from foretoken.models.rows import staying
from foretoken.models.stock.selfcheck import Form, on_torch, self_check


def forest(model: Model) -> Forest:
    """An empty forest in a model's cache: one row for each tree where that is exact."""
    if isinstance(model, TreeModel):
        network = getattr(model, "model", None)
        if not isinstance(network, PreTrainedModel) or _grows_trees(network):
            return Forest(Shared(model))
    return Forest(Copied(model))


def _grows_trees(network: PreTrainedModel) -> bool:
    try:
        self_check(network, IN_TREES)
    except RefusedError:
        return False
    return True


class Detours:
    """The Model protocol by trees: every block is a path, and each of its tokens has a sibling that
    leads nowhere."""

    takes_tensors = False
    padding = 0

    def __init__(self, model: TreeModel) -> None:
        self.shared = Shared(model)
        self.tips: list[Node | None] = []  # where the rows' texts end; None: within the prompt
        self.vocab_size, self.context, self.runtime = model.vocab_size, model.context, model.runtime
        self.encoder_decoder, self.source_context = model.encoder_decoder, model.source_context
        self.source_vocab_size = model.source_vocab_size
        self.device, self.computed = model.device, model.computed

    def start(self, prompts: list[list[int]], sources: list[list[int]] | None = None) -> None:
        self.shared.start(prompts, sources)
        self.tips += [None for _ in prompts]

    def score(self, blocks: Blocks, need: list[int]) -> Tensor:
        assert isinstance(blocks, list)
        if not any(blocks):
            return torch.zeros(len(blocks), 0, self.vocab_size, device=self.device)
        paths = [self._path(b, block) for b, block in enumerate(blocks)]
        crowds = [[x for node in path for x in (*self._astray(node), node)] for path in paths]
        scored = self.shared.add(crowds)
        logits = scored[0].new_zeros(len(blocks), max(need), self.vocab_size)
        for b, (path, crowd) in enumerate(zip(paths, crowds, strict=True)):
            places = [crowd.index(node) for node in path[len(path) - need[b] :]]
            logits[b, : need[b]] = scored[b][places]
            self.tips[b] = path[-1] if path else self.tips[b]
        self._prune()
        return logits

    def _path(self, b: int, block: list[int]) -> list[Node]:
        tip, path = self.tips[b], list[Node]()
        for token in block:
            tip = tip.child(token) if tip else Node(token)
            path.append(tip)
        return path

    def _astray(self, node: Node) -> list[Node]:
        """Another child of a node's parent, and a child of that."""
        if node.parent is None:
            return []
        other = node.parent.child((node.token + 1) % self.vocab_size)
        return [other, other.child(node.token)]

    def _prune(self) -> None:
        self.shared.keep([[tip] if tip else [] for tip in self.tips])

    def set_lengths(self, lengths: list[int]) -> None:
        heads = [min(n, head) for n, head in zip(lengths, self.shared.heads, strict=True)]
        for b, (tip, n) in enumerate(zip(self.tips, lengths, strict=True)):
            above = tip.upwards() if tip else ()
            self.tips[b] = next((x for x in above if heads[b] + x.depth < n), None)
        self._prune()
        self.shared.heads = heads
        self._prune()

    def permute(self, rows: list[int]) -> None:
        self.shared.model.permute(rows)
        self.shared.heads = [self.shared.heads[b] for b in rows]
        self.shared.slots = [dict(self.shared.slots[b]) for b in rows]
        self.tips = [self.tips[b] for b in rows]

    def leave(self, rows: list[int]) -> None:
        self.permute(staying(len(self.tips), rows))


def _detoured(network: PreTrainedModel) -> Model:
    model = on_torch(network)
    assert isinstance(model, TreeModel)
    return Detours(model)


IN_TREES = Form("trees in a ragged cache", _detoured)
